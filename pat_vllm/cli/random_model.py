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
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pat_vllm.files.reading import name_of, shown
from pat_vllm.model_size import MIXTURES

if TYPE_CHECKING:
    import torch
    from tokenizers import Tokenizer
    from transformers import PretrainedConfig

ARCHS = {
    "qwen3": "Qwen3ForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "llama": "LlamaForCausalLM",
    # Mixtures of experts.
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "glm4_moe": "Glm4MoeForCausalLM",
}
DTYPES = ("float32", "bfloat16", "float16")
SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>")
MIN_VOCAB = 256 + len(SPECIAL_TOKENS)
"""One token for every byte, and the special tokens."""

_ALLOWED = {
    "hidden": (1, 1 << 16),
    "layers": (1, 1 << 10),
    "heads": (1, 1 << 12),
    "kv_heads": (1, 1 << 12),
    "head_dim": (1, 1 << 12),
    "intermediate": (1, 1 << 18),
    "vocab": (len(SPECIAL_TOKENS) + 1, 1 << 20),
    "max_position_embeddings": (1, 1 << 24),
    "experts": (1, 1 << 12),
    "experts_per_token": (1, 1 << 12),
    "expert_intermediate": (1, 1 << 18),
    "gain": (0, 1e3),
    "repeat": (0, 1e3),
    "seed": (-(2**63), 2**63 - 1),
}
"""Least and most of each number."""
_MOST_PARAMETERS = 20e9

# A linear weight has standard deviation gain / sqrt(fan_in), so unit-variance input gives output of
# standard deviation gain whatever the width: 0.35 per weight at hidden 128. Initialisation for
# training (0.02) leaves logits so flat that float32 rounding can change an argmax.
GAIN = 4.0
NORM_STD = 0.1
BIAS_STD = 0.5

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


def make_model(
    path: str | Path,
    *,
    arch: str = "qwen3",
    hidden: int = 128,
    layers: int = 3,
    heads: int = 8,
    kv_heads: int = 4,
    head_dim: int = 32,
    intermediate: int = 256,
    vocab: int = 512,
    dtype: str = "float32",
    max_position_embeddings: int = 2048,
    tie: bool = False,
    experts: int = 8,
    experts_per_token: int = 2,
    expert_intermediate: int = 64,
    gain: float = GAIN,
    repeat: float = 0.0,
    phrase: int = 16,
    seed: int = 0,
) -> int:
    """Write a random checkpoint and its tokenizer to `path`; return the number of parameters.

    The same arguments give the same weights. Takes 10 to 20 s per billion parameters.

    Args:
        path: a directory that does not exist or is empty.
        arch: one of `ARCHS`. "qwen3" normalises queries and keys, "qwen2" has biases on q, k and v.
            Of mixtures, "qwen2_moe" and "glm4_moe" have shared experts, too, of the width
            `intermediate` and of one expert's; in "glm4_moe" the first layer is dense.
        head_dim: vLLM's CPU attention supports 32, 64, 80, 96, 112, 128 and some larger ones.
        vocab: every id decodes to text. With fewer than `MIN_VOCAB` only the words "w3", "w4" and
            so on can be encoded.
        dtype: one of `DTYPES`; the weights are drawn in it.
        max_position_embeddings: longest context, tokens.
        tie: whether the output head is the embedding matrix.
        experts, experts_per_token, expert_intermediate: of a mixture.
        gain: about the standard deviation of the logits. A smaller one than the default makes
            sampling more even, and a logprob less sensitive to rounding.
        repeat: how strongly the model continues its phrase, relative to all else that it might
            say; 0 is not at all. At 1 greedy text follows the phrase most of the time.
        phrase: tokens after which the phrase starts again.

    Raises:
        OSError: the files cannot be written.
        ValueError: an argument is not allowed, or `path` is not empty.
    """
    numbers = locals()
    path = Path(path)
    for name, (least, most) in _ALLOWED.items():
        if not least <= numbers[name] <= most:
            raise ValueError(f"{name}={numbers[name]} must be from {least} to {most}")
    _check(path, arch, hidden, heads, kv_heads, head_dim, dtype)
    _check_phrase(repeat, phrase, hidden, vocab, tie)
    mlps = max(1, experts * (arch in MIXTURES)) * max(intermediate, expert_intermediate)
    of_layer = hidden * (2 * (heads + kv_heads) * head_dim + 3 * mlps)
    if (parameters := 2 * vocab * hidden + layers * of_layer) > _MOST_PARAMETERS:
        raise ValueError(
            f"a model of these sizes has about {parameters / 1e9:.0f} billion parameters; at most "
            f"{_MOST_PARAMETERS / 1e9:.0f} are made: take smaller sizes"
        )
    import torch
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    from transformers import AutoConfig

    bos, eos, pad = range(len(SPECIAL_TOKENS))
    config = AutoConfig.for_model(
        arch,
        architectures=[ARCHS[arch]],  # vLLM picks its model class, and the task, by this name
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype=dtype,
        **{"intermediate_size": intermediate}
        | _mixture(arch, experts, experts_per_token, expert_intermediate, intermediate),
    )
    weights = dict(_random_weights(config, getattr(torch, dtype), seed, gain))
    if repeat:
        _repeat(weights, layers, gain, repeat, phrase)

    path.mkdir(parents=True, exist_ok=True)
    try:
        save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    except SafetensorError as error:
        raise OSError(f"the weights cannot be written: {error}") from error
    config.save_pretrained(path)
    _save_tokenizer(path, vocab, max_position_embeddings)
    return sum(weight.numel() for weight in weights.values())


def _check(
    path: Path,
    arch: str,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: str,
) -> None:
    """Refuse what `make_model` can't build or vLLM can't load."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(
            f"path={name_of(path)} is not an empty directory: remove it or name another"
        )
    if arch not in ARCHS:
        raise ValueError(f"arch={shown(arch)} must be one of {', '.join(ARCHS)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={shown(dtype)} must be one of {', '.join(DTYPES)}")
    if heads % kv_heads:
        raise ValueError(f"heads={heads} must be a multiple of kv_heads={kv_heads}")
    if arch in ("qwen2", "qwen2_moe", "olmoe") and hidden != heads * head_dim:
        raise ValueError(
            f"hidden={hidden} must be heads * head_dim = {heads * head_dim} for {arch}"
        )


def _check_phrase(repeat: float, phrase: int, hidden: int, vocab: int, tie: bool) -> None:
    """Refuse a phrase that can't be written into the weights."""
    if repeat and tie:
        raise ValueError("tie=True needs repeat=0: a token would call for itself, not for the next")
    most = min(vocab - len(SPECIAL_TOKENS), hidden // 2)
    if repeat and not 2 <= phrase <= most:
        raise ValueError(
            f"phrase={phrase} must be from 2 to {most}: "
            "the vocabulary's ordinary tokens, and half of `hidden`"
        )


def _mixture(
    arch: str, experts: int, experts_per_token: int, width: int, shared_width: int
) -> dict[str, Any]:
    """What a model's config says of its experts, if it has some."""
    common = {"num_experts_per_tok": experts_per_token}
    return {
        "qwen3_moe": common
        | {"num_experts": experts, "moe_intermediate_size": width, "norm_topk_prob": True},
        "qwen2_moe": common
        | {"num_experts": experts, "moe_intermediate_size": width}
        | {"shared_expert_intermediate_size": shared_width},
        "mixtral": common | {"num_local_experts": experts, "intermediate_size": width},
        "olmoe": common | {"num_experts": experts, "intermediate_size": width},
        "glm4_moe": common
        | {"n_routed_experts": experts, "moe_intermediate_size": width, "n_shared_experts": 1}
        | {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0},
    }.get(arch, {})


def _as_published(name: str, shape: Sequence[int]) -> Iterator[tuple[str, Sequence[int]]]:
    """The weights, by name and shape, of which transformers makes this one.

    Published checkpoints have the experts of a layer one by one.
    """
    path, _, kind = name.rpartition(".")
    if not path.endswith(".experts"):
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
        for part, shape in _as_published(name, meta.shape):
            digest = hashlib.sha256(f"{seed}/{part}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
            mean, std = _distribution(part, shape, gain)
            weight = torch.empty(tuple(shape), dtype=dtype)
            published = _as_mixtral(part) if config.model_type == "mixtral" else part
            yield published, weight.normal_(mean, std, generator=generator)


def _repeat(
    weights: dict[str, torch.Tensor], layers: int, gain: float, repeat: float, phrase: int
) -> None:
    """Write a phrase into the weights: each of its tokens calls for the next, the last the first.

    The phrase is the first `phrase` ids that are not special; another token stands for the one at
    its id modulo `phrase`. The first `phrase` channels of the residual stream say which one it is.
    The embedding writes them, no layer does, and the output head's rows of the phrase read them.
    All other logits, and so the tokens that interrupt the phrase, depend on the whole context.
    """
    import torch

    embedding, head = weights["model.embed_tokens.weight"], weights["lm_head.weight"]
    vocab, hidden = embedding.shape
    ids = torch.arange(vocab)
    first = len(SPECIAL_TOKENS)
    size = gain * math.sqrt(phrase / hidden)  # as long as what it replaces
    embedding[:, :phrase] = 0
    embedding[ids, (ids - first) % phrase] = size
    for name, weight in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", ".w2.weight")):
            weight[:phrase] = 0
    # The last norm divides by what the layers add, of which an MLP's share is about gain ** 3.
    divisor = gain**3 * math.sqrt(layers / 2)
    # The largest of `vocab` normal numbers is about sqrt(2 ln vocab) standard deviations.
    largest = gain * math.sqrt(2 * math.log(vocab))
    head[:, :phrase] = 0
    head[first + (ids[:phrase] + 1) % phrase, ids[:phrase]] = repeat * largest * divisor / size


def _distribution(name: str, shape: Sequence[int], gain: float) -> tuple[float, float]:
    """Mean and standard deviation of one weight; `shape` of a matrix is `[out, in]`."""
    if name.endswith("norm.weight"):
        return 1.0, NORM_STD
    if name.endswith("bias"):
        return 0.0, BIAS_STD
    return 0.0, gain / math.sqrt(shape[1])


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
