"""Random Hugging Face checkpoints with a tokenizer, for tests, the demo and benchmarks.

The weights are noise, but scaled so that generation behaves like a model's: logits are peaked (an
argmax is not decided by rounding) and depend on the whole context. A model may also repeat itself
(`_repeat`), so that n-gram drafts are accepted. torch, transformers and tokenizers are imported by
the functions, so the command line starts without them.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pat_vllm.cli.command_options import RandomModel
from pat_vllm.files.reading import name_of, shown
from pat_vllm.files.writing import forgotten
from pat_vllm.model_size import MIXTURES

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig

ARCHS = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    # Sliding windows: in all layers, in every second one, in two of three.
    "mistral": "MistralForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    # Mixtures of experts.
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
    # Chunked attention in three layers of four; without experts.
    "llama4_text": "Llama4ForCausalLM",
    # Both: windows in every second layer.
    "gpt_oss": "GptOssForCausalLM",
    # Latent attention, and a mixture whose first layer is dense.
    "deepseek_v2": "DeepseekV2ForCausalLM",
    "deepseek_v3": "DeepseekV3ForCausalLM",
    # Linear attention in two layers of three; with experts, but for one.
    "qwen3_next": "Qwen3NextForCausalLM",
    "qwen3_5_text": "Qwen3_5ForCausalLM",
    "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
    # Mamba2 in two layers of four, then an MLP and attention.
    "nemotron_h": "NemotronHForCausalLM",
}
LINEAR = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
WINDOWS = ("mistral", "phi3", "gemma2", "gemma3_text", "gpt_oss")
LATENT = ("deepseek_v2", "deepseek_v3")
KV_RANK, ROPE_DIM = 512, 64
"""Of latent attention. vLLM has no kernel on CPU for others."""
DTYPES = ("float32", "bfloat16", "float16")
SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>")
MIN_VOCAB = 256 + len(SPECIAL_TOKENS)
"""One token for every byte, and the special tokens."""

_MOST_PARAMETERS = 20e9

NORM_STD = 0.1
BIAS_STD = 0.5
_EMBEDDING = 0.3
"""Standard deviation of what Gemma's embeddings add to the residual stream; norms add 1 each."""

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)

TOKENIZER_TEXT = """\
In a synchronous step every response of the batch must finish before training can go on. Lengths
are skewed: most responses are short, a few are long, and the long ones run alone at the end.
Many small replicas serve the full batch best, because no layer waits for another device; one wide
group serves the last sequences best, because every device reads only a part of the weights.
The question is therefore not which layout is best, but when to change from one to the next.
Write a short story about a river. What is the sum of 12 and 30? The answer is 42. Explain why the
sky is blue, step by step, and then list three numbers: 1, 2, 3. Let x be the number of apples.
If Anna has three times as many apples as Ben, and together they have 24, how many has each of them?
"""


def make_model(path: str | Path, **sizes: Any) -> int:
    """Write a random checkpoint as `write_model` does.

    Args:
        sizes: fields of `RandomModel`.
    """
    return write_model(Path(path), RandomModel(**sizes))


def kept_model(
    directory: Path,
    name: str,
    sizes: Mapping[str, Any],
    finish: Callable[[Path], object] = lambda path: None,
) -> Path:
    """A random checkpoint that is made on the first call, and again when this module changes.

    Several processes may ask for the same one at once.

    Args:
        directory: where it is made and kept.
        name: what the checkpoint's directory begins with.
        sizes: fields of `RandomModel`.
        finish: changes the files that were made, before anybody sees them.

    Returns:
        The checkpoint's directory.
    """
    model = RandomModel(**sizes)
    key = json.dumps([vars(model), finish.__qualname__]).encode() + Path(__file__).read_bytes()
    target = directory.resolve() / f"{name}-{hashlib.sha256(key).hexdigest()[:12]}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when complete, so that an interrupted run leaves no half of a model behind.
    scratch = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=target.parent))
    for left in target.parent.glob(f".{name}-*"):
        if forgotten(left, scratch.stat().st_mtime):
            shutil.rmtree(left, ignore_errors=True)
    try:
        write_model(scratch, model)
        finish(scratch)
        scratch.rename(target)
    except OSError:
        # Another process was first: a directory can't be renamed onto one that is not empty.
        if not target.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def write_model(path: Path, model: RandomModel) -> int:
    """Write a random checkpoint and its tokenizer; return the number of parameters.

    The same model has the same weights. Takes 10 to 20 s per billion parameters.

    Args:
        path: a directory that does not exist or is empty.
        model: of architectures, "qwen3" normalises queries and keys, "qwen2" has biases on q, k and
            v. Of mixtures, "qwen2_moe" and "glm4_moe" have shared experts, too, of the width
            `intermediate` and of one expert's; in "glm4_moe" the first layer is dense. Of latent
            attention, "deepseek_v3" has compressed queries, too, and a bias of the router's choice.
            Weights are drawn in `dtype`. With fewer than `MIN_VOCAB` tokens only the words "w3",
            "w4" and so on can be encoded; every id decodes to text. A smaller `gain` makes a
            logprob less sensitive to rounding, too. `repeat` is how strongly the model continues
            its phrase, relative to all else that it might say: at 1 greedy text follows it most of
            the time.

    Raises:
        OSError: the files cannot be written.
        ValueError: the sizes do not fit each other, or `path` is not empty.
    """
    _check(path, model)
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import AutoConfig

    bos, eos, pad = range(len(SPECIAL_TOKENS))
    config = AutoConfig.for_model(
        model.arch,
        architectures=[ARCHS[model.arch]],  # vLLM picks its model class, and the task, by this name
        hidden_size=model.hidden,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        vocab_size=model.vocab,
        max_position_embeddings=model.max_position_embeddings,
        tie_word_embeddings=model.tie,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype=model.dtype,
        **{"intermediate_size": model.intermediate}
        | _heads(model)
        | _windows(model)
        | _linear_attention(model)
        | _mamba(model)
        | _mixture(model),
    )
    weights = dict(_random_weights(config, getattr(torch, model.dtype), model.seed, model.gain))
    if model.repeat:
        _repeat(weights, model)

    path.mkdir(parents=True, exist_ok=True)
    try:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"the weights cannot be written: {error}") from error
    config.save_pretrained(path)
    _save_tokenizer(path, model.vocab, model.max_position_embeddings)
    return sum(weight.numel() for weight in weights.values())


def _check(path: Path, model: RandomModel) -> None:
    """Refuse what can't be built or vLLM can't load."""
    arch, hidden, heads, phrase = model.arch, model.hidden, model.heads, model.phrase
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(
            f"path={name_of(path)} is not an empty directory: remove it or name another"
        )
    if arch not in ARCHS:
        raise ValueError(f"arch={shown(arch)} must be one of {', '.join(ARCHS)}")
    if model.dtype not in DTYPES:
        raise ValueError(f"dtype={shown(model.dtype)} must be one of {', '.join(DTYPES)}")
    if heads % model.kv_heads:
        raise ValueError(f"heads={heads} must be a multiple of kv_heads={model.kv_heads}")
    if arch in ("qwen2", "qwen2_moe", "olmoe") and hidden != (width := heads * model.head_dim):
        raise ValueError(f"hidden={hidden} must be heads * head_dim = {width} for {arch}")
    if arch.startswith("gemma") and not model.tie:
        raise ValueError(f"tie=False is not of {arch}, whose head is its embeddings: set tie=True")
    if model.repeat and model.tie:
        raise ValueError("tie=True needs repeat=0: a token would call for itself, not for the next")
    if model.repeat and phrase > (most := min(model.vocab - len(SPECIAL_TOKENS), hidden // 2)):
        raise ValueError(
            f"phrase={phrase} must be at most {most}: "
            "the vocabulary's ordinary tokens, and half of `hidden`"
        )
    mlps = max(1, model.experts * (arch in MIXTURES)) * max(
        model.intermediate, model.expert_intermediate
    )
    of_layer = hidden * (2 * (heads + model.kv_heads) * model.head_dim + 3 * mlps)
    if (parameters := 2 * model.vocab * hidden + model.layers * of_layer) > _MOST_PARAMETERS:
        raise ValueError(
            f"a model of these sizes has about {parameters / 1e9:.0f} billion parameters; at most "
            f"{_MOST_PARAMETERS / 1e9:.0f} are made: take smaller sizes"
        )


def _heads(model: RandomModel) -> dict[str, Any]:
    """What a model's config says of its heads beside their number."""
    if model.arch not in LATENT:
        return {"head_dim": model.head_dim}
    longest = model.max_position_embeddings
    scaled = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "mscale": 0.707}
    scaled |= {"mscale_all_dim": 0.707, "original_max_position_embeddings": max(1, longest // 2)}
    return {
        "q_lora_rank": None if model.arch == "deepseek_v2" else max(1, model.hidden // 2),
        "kv_lora_rank": KV_RANK,
        "qk_rope_head_dim": ROPE_DIM,
        "qk_nope_head_dim": model.head_dim,
        "v_head_dim": model.head_dim,
        # With plain positions, what vLLM computes of a token on CPU depends on the others of its
        # step, and on how they are batched.
        "rope_parameters": scaled,
    }


def _windows(model: RandomModel) -> dict[str, Any]:
    """What a model's config says of its sliding windows or chunks, if it has some."""
    if model.arch == "llama4_text":
        return {
            "attention_chunk_size": model.window,
            "intermediate_size_mlp": model.intermediate,
            "moe_layers": [],
            "interleave_moe_layer_step": model.layers + 1,
        }
    if model.arch not in WINDOWS:
        return {}
    config: dict[str, Any] = {"sliding_window": model.window}
    if every := {"gemma2": 2, "gemma3_text": 3, "gpt_oss": 2}.get(model.arch):
        kinds = ["sliding_attention"] * (every - 1) + ["full_attention"]
        config["layer_types"] = [kinds[layer % every] for layer in range(model.layers)]
    if model.arch.startswith("gemma"):
        config["query_pre_attn_scalar"] = model.head_dim
    return config


def _linear_attention(model: RandomModel) -> dict[str, Any]:
    """What a model's config says of its layers with linear attention, if it has some."""
    if model.arch not in LINEAR:
        return {}
    kinds = ["linear_attention"] * 2 + ["full_attention"]
    return {
        "layer_types": [kinds[layer % 3] for layer in range(model.layers)],
        "linear_num_key_heads": model.linear_heads,
        "linear_num_value_heads": 2 * model.linear_heads,
        "linear_key_head_dim": 64,  # vLLM's CPU kernels take no narrower ones
        "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
    }


def _mamba(model: RandomModel) -> dict[str, Any]:
    """What a model's config says of its layers with Mamba2, if it has some."""
    if model.arch != "nemotron_h":
        return {}
    kinds = ["linear_attention", "linear_attention", "mlp", "full_attention"]
    return {
        "layers_block_type": [kinds[layer % 4] for layer in range(model.layers)],
        "n_groups": model.linear_heads,
        "mamba_num_heads": 2 * model.linear_heads,
        "mamba_head_dim": 64,
        "ssm_state_size": 64,
        "conv_kernel": 4,
        "time_step_min": 1e-9,  # transformers takes no shorter steps, vLLM does
    }


def _mixture(model: RandomModel) -> dict[str, Any]:
    """What a model's config says of its experts, if it has some."""
    experts, width = model.experts, model.expert_intermediate
    common: dict[str, Any] = {"num_experts_per_tok": model.experts_per_token}
    # In two groups, of which a token goes to one.
    deepseek = common | {"n_routed_experts": experts, "moe_intermediate_size": width}
    deepseek |= {"first_k_dense_replace": 1, "n_group": 2, "topk_group": 1}
    return {
        "qwen3_moe": common
        | {"num_experts": experts, "moe_intermediate_size": width, "norm_topk_prob": True},
        "qwen2_moe": common
        | {"num_experts": experts, "moe_intermediate_size": width}
        | {"shared_expert_intermediate_size": model.intermediate},
        "qwen3_next": common
        | {"num_experts": experts, "moe_intermediate_size": width, "norm_topk_prob": True}
        | {"shared_expert_intermediate_size": model.intermediate},
        "qwen3_5_moe_text": common
        | {"num_experts": experts, "moe_intermediate_size": width}
        | {"shared_expert_intermediate_size": model.intermediate},
        "mixtral": common | {"num_local_experts": experts, "intermediate_size": width},
        "olmoe": common | {"num_experts": experts, "intermediate_size": width},
        "glm4_moe": common
        | {"n_routed_experts": experts, "moe_intermediate_size": width, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
        "deepseek_v2": deepseek
        | {"n_shared_experts": 2, "topk_method": "group_limited_greedy"}
        | {"scoring_func": "softmax", "norm_topk_prob": False, "routed_scaling_factor": 2.0},
        "deepseek_v3": deepseek
        | {"n_shared_experts": 1, "topk_method": "noaux_tc", "num_nextn_predict_layers": 0}
        | {"scoring_func": "sigmoid", "norm_topk_prob": True, "routed_scaling_factor": 2.5},
        "gpt_oss": common
        | {"num_local_experts": experts, "intermediate_size": width}
        | {"rope_parameters": _yarn(model.max_position_embeddings)},
    }.get(model.arch, {})


def _yarn(longest: int) -> dict[str, Any]:
    """Of a model that was trained with contexts of half the length."""
    return {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 2.0,
        "original_max_position_embeddings": max(1, longest // 2),
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }


def _as_published(
    arch: str, name: str, shape: Sequence[int]
) -> Iterator[tuple[str, Sequence[int]]]:
    """The weights, by name and shape, of which transformers makes this one.

    Published checkpoints have the experts of a layer one by one, but for those of gpt-oss.
    """
    path, _, kind = name.rpartition(".")
    if arch == "gpt_oss" or not path.endswith(".experts"):
        yield name, shape
        return
    experts, rows, columns = shape
    parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
    for expert in range(experts):
        for part in parts:
            yield f"{path}.{expert}.{part}.weight", (rows // len(parts), columns)


def _as_mixtral(name: str) -> str:
    """The name of a weight in published checkpoints of Mixtral."""
    for ours, theirs in {
        ".mlp.": ".block_sparse_moe.",
        ".gate_proj.": ".w1.",
        ".up_proj.": ".w3.",
        ".down_proj.": ".w2.",
    }.items():
        name = name.replace(ours, theirs)
    return name


def _random_weights(
    config: PretrainedConfig, dtype: torch.dtype, seed: int, gain: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight of the checkpoint by its name.

    Each weight has a generator of its own, seeded by its name, so models that differ in one
    respect (tied embeddings, more layers) share all other weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    for name, meta in shapes.items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        for part, shape in _as_published(config.model_type, name, meta.shape):
            digest = hashlib.sha256(f"{seed}/{part}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            mean, std = _distribution(part, shape, gain)
            if config.model_type in LINEAR:
                mean, std = _of_linear(part, mean, std)
            if config.model_type.startswith("gemma"):
                mean, std = _of_gemma(part, shape, mean, std, gain)
            weight = torch.empty(tuple(shape), dtype=dtype)
            published = _as_mixtral(part) if config.model_type == "mixtral" else part
            yield published, weight.normal_(mean, std, generator=generator)


def _repeat(weights: dict[str, torch.Tensor], model: RandomModel) -> None:
    """Write a phrase into the weights: each of its tokens calls for the next, the last the first.

    The phrase is the first `phrase` ids that are not special; another token stands for the one at
    its id modulo `phrase`. The first `phrase` channels of the residual stream say which one it is.
    The embedding writes them, no layer does, and the output head's rows of the phrase read them.
    All other logits, and so the tokens that interrupt the phrase, depend on the whole context.
    """
    import torch

    gain, phrase = model.gain, model.phrase
    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    vocab, hidden = embedding.shape
    ids = torch.arange(vocab)
    first = len(SPECIAL_TOKENS)
    size = gain * math.sqrt(phrase / hidden)  # as long as what it replaces
    embedding[:, :phrase] = 0
    embedding[ids, (ids - first) % phrase] = size
    for name, weight in weights.items():
        if name.endswith(
            ("o_proj.weight", "out_proj.weight", "down_proj.weight", ".w2.weight", "o_proj.bias")
        ):
            weight[:phrase] = 0
        elif name.endswith(("experts.down_proj", "experts.down_proj_bias")):  # of gpt-oss
            weight[..., :phrase] = 0
    # The last norm divides by what the layers add, of which an MLP's share is about gain ** 3.
    divisor = gain**3 * math.sqrt(model.layers / 2)
    # The largest of `vocab` normal numbers is about sqrt(2 ln vocab) standard deviations.
    largest = gain * math.sqrt(2 * math.log(vocab))
    head[:, :phrase] = 0
    head[first + (ids[:phrase] + 1) % phrase, ids[:phrase]] = (
        model.repeat * largest * divisor / size
    )


def _distribution(name: str, shape: Sequence[int], gain: float) -> tuple[float, float]:
    """Mean and standard deviation of one weight.

    Args:
        shape: of a matrix `[out, in]`; of gpt-oss' experts `[experts, in, out]`.
    """
    if name.endswith("norm.weight"):
        return 1.0, NORM_STD
    if name.endswith("bias"):
        return 0.0, BIAS_STD
    if name.endswith("sinks"):
        return 0.0, 1.0
    if name.endswith("A_log"):  # states forget slowly: they depend on the whole context
        return -3.0, 0.5
    if name.endswith(("norm_f.weight", "mixer.D")):
        return 1.0, NORM_STD
    if name.endswith("conv1d.weight"):
        return 0.0, 1 / math.sqrt(shape[2])
    return 0.0, gain / math.sqrt(shape[1])


def _of_gemma(
    name: str, shape: Sequence[int], mean: float, std: float, gain: float
) -> tuple[float, float]:
    """The same for Gemma, whose norms add 1, and whose embeddings are the head's, too.

    They are scaled by the root of the width. Were they as large as the logits ask for, a token
    would call for itself; the last norm makes up for it.
    """
    if name == "model.embed_tokens.weight":
        return mean, _EMBEDDING / math.sqrt(shape[1])
    if name == "model.norm.weight":
        return gain / _EMBEDDING - 1, std
    return (0.0 if name.endswith("norm.weight") else mean), std


def _of_linear(name: str, mean: float, std: float) -> tuple[float, float]:
    """The same for models with linear attention, whose norms add 1 but for those of its output."""
    if name.endswith("norm.weight") and not name.endswith("linear_attn.norm.weight"):
        return 0.0, std
    return mean, std


def _save_tokenizer(path: Path, vocab: int, max_length: int) -> None:
    """Write a tokenizer with exactly `vocab` tokens: of bytes, or of words if bytes don't fit."""
    from transformers import PreTrainedTokenizerFast

    bos, eos, pad = SPECIAL_TOKENS
    PreTrainedTokenizerFast(
        tokenizer_object=(_byte_tokenizer if vocab >= MIN_VOCAB else _word_tokenizer)(vocab),
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(path)


def _byte_tokenizer(vocab: int) -> Tokenizer:
    """Byte-level BPE.

    About 500 tokens are learnt from `TOKENIZER_TEXT`; the rest are words that no merge produces:
    text is never encoded to them, but whatever id the model samples decodes to text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    def byte_level(model: models.BPE) -> Tokenizer:
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    learnt = byte_level(models.BPE())
    learnt.train_from_iterator(
        [TOKENIZER_TEXT],
        trainers.BpeTrainer(
            vocab_size=min(vocab, 512),
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    trained: dict[str, Any] = json.loads(learnt.to_str())["model"]
    ids: dict[str, int] = trained["vocab"]
    # "Ġ" is byte-level BPE's way to write a space.
    ids |= {f"Ġw{index}": index for index in range(len(ids), vocab)}
    tokenizer = byte_level(models.BPE(vocab=ids, merges=[tuple(m) for m in trained["merges"]]))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer


def _word_tokenizer(vocab: int) -> Tokenizer:
    """The words "w3", "w4" and so on, divided by spaces; every other word is padding."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = [*SPECIAL_TOKENS, *(f"w{index}" for index in range(len(SPECIAL_TOKENS), vocab))]
    ids = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=SPECIAL_TOKENS[-1]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    return tokenizer
