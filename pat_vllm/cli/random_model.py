"""`pat-vllm random-model`: random checkpoints with a tokenizer, also for tests and benchmarks.

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
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pat_vllm.cli import random_config, random_tokenizer
from pat_vllm.cli.options import failed, options_of
from pat_vllm.cli.random_config import ARCHS, EXPERT_GROUPS, LINEAR, RandomModel, fields_of
from pat_vllm.cli.random_tokenizer import SPECIAL_TOKENS, save_tokenizer
from pat_vllm.files.writing import forgotten
from pat_vllm.models.model_classes import MIXTURES
from pat_vllm.start.text_only import without_vision_and_audio

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

DTYPES = ("float32", "bfloat16", "float16")

_MOST_PARAMETERS = 20e9

NORM_STD = 0.1
BIAS_STD = 0.5
_EMBEDDING = 0.3
"""Standard deviation of what Gemma's embeddings add to the residual stream; norms add 1 each."""


@options_of(RandomModel)
def write_random_model(
    model: RandomModel,
    path: Annotated[Path, typer.Argument(help="Directory to write; must be new or empty.")],
) -> None:
    """Write a random model with a tokenizer: real shapes and timings without a download."""
    without_vision_and_audio()
    try:
        parameters = write_model(path, model)
    except (OSError, RuntimeError) as error:  # too little memory
        raise failed(f"{path} cannot be written: {error}") from error
    typer.echo(f"{path}: {model.arch}, {parameters / 1e6:.1f}M parameters, {model.dtype}")


def make_model(path: str | Path, **sizes: Any) -> int:
    """`write_model`, of a `RandomModel` with these fields."""
    return write_model(Path(path), RandomModel(**sizes))


def kept_model(
    directory: Path,
    name: str,
    sizes: Mapping[str, Any],
    finish: Callable[[Path], object] = lambda path: None,
) -> Path:
    """A random checkpoint that is made on the first call, and again when its modules change.

    Several processes may ask for the same one at once.

    Args:
        name: what the checkpoint's folder in `directory` begins with.
        sizes: fields of `RandomModel`.
        finish: changes the files that were made, before anybody sees them.
    """
    model = RandomModel(**sizes)
    key = json.dumps([vars(model), finish.__qualname__]).encode()
    for module in (__file__, random_config.__file__, random_tokenizer.__file__):
        key += Path(module).read_bytes()
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
        model: "qwen2_moe" and "glm4_moe" have shared experts, too, of the width `intermediate` and
            of one expert's. Weights are drawn in `dtype`. With fewer than `MIN_VOCAB` tokens only
            the words "w3", "w4" and so on can be encoded; every id decodes to text. A smaller
            `gain` makes a logprob less sensitive to rounding, too. `repeat` is how strongly the
            model continues its phrase, relative to all else that it might say: at 1 greedy text
            follows it most of the time.

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
        **fields_of(model),
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
    save_tokenizer(path, model.vocab, model.max_position_embeddings)
    return sum(weight.numel() for weight in weights.values())


def check_written(path: Path, dtype: str) -> None:
    """Refuse a directory that is not empty, and weights of a type that vLLM can't load.

    Raises:
        ValueError: says which.
    """
    from pat_vllm.files.reading import name_of, shown  # slow, for `--help`

    if dtype not in DTYPES:
        raise ValueError(f"dtype={shown(dtype)} must be one of {', '.join(DTYPES)}")
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(
            f"path={name_of(path)} is not an empty directory: remove it or name another"
        )


def _check(path: Path, model: RandomModel) -> None:
    """Refuse what can't be built or vLLM can't load."""
    from pat_vllm.files.reading import shown

    arch, hidden, heads, phrase = model.arch, model.hidden, model.heads, model.phrase
    check_written(path, model.dtype)
    if arch not in ARCHS:
        raise ValueError(f"arch={shown(arch)} must be one of {', '.join(ARCHS)}")
    if heads % model.kv_heads:
        raise ValueError(f"heads={heads} must be a multiple of kv_heads={model.kv_heads}")
    if arch in ("qwen2", "qwen2_moe", "olmoe") and hidden != (width := heads * model.head_dim):
        raise ValueError(f"hidden={hidden} must be heads * head_dim = {width} for {arch}")
    if arch.startswith("gemma") and not model.tie:
        raise ValueError(f"tie=False is not of {arch}, whose head is its embeddings: set tie=True")
    if arch in MIXTURES and model.experts < model.experts_per_token:
        raise ValueError(
            f"experts={model.experts} must be at least experts_per_token={model.experts_per_token}"
        )
    if arch.startswith("deepseek") and model.experts % EXPERT_GROUPS:
        raise ValueError(
            f"experts={model.experts} must be a multiple of {EXPERT_GROUPS} for {arch}"
        )
    if model.repeat and arch == "nemotron_h":
        raise ValueError("repeat needs another arch than nemotron_h: set repeat=0")
    if model.repeat and not model.gain:
        raise ValueError("repeat needs logits that differ: set gain above 0, or repeat=0")
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
