"""Random checkpoints for verl's tests, built once per machine."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tests.support.drafters import mimo
from tests.support.models import cache_dir
from tests.support.quiet import quiet_qwen2_5_vl
from tests.support.random_models import kept_model
from tests.support.vision import PLACE

VOCAB = 512
KNOWN = 320
"""Tokens of the tokenizer of `few_tokens`; the model's other ids must never be sampled."""

_SHAPE: dict[str, Any] = dict(hidden=128, heads=8, kv_heads=4, vocab=VOCAB)
_OF_ARCH: dict[str, dict[str, Any]] = {
    # At the default gain a class without norms of queries and keys amplifies rounding: in float32
    # transformers' log-probabilities were off by up to 4.5e-4, at this one by up to 1.6e-5.
    "llama": dict(gain=1.5),
    "qwen2": dict(gain=1.5, heads=4, kv_heads=2),
    "gemma3_text": dict(tie=True, window=40),
    "gpt_oss": dict(layers=2, window=40, expert_intermediate=128),
    "deepseek_v3": dict(heads=4, layers=2),
    "qwen3_next": dict(heads=4, layers=3, head_dim=64),
    "nemotron_h": dict(heads=4, layers=4, head_dim=64),
}


END_TOKENS = 100
"""Tokens that end a response of `repeating_chat`: many, for it seldom leaves its phrase."""


BLOCKS: dict[str, Any] = dict(
    hidden=256, heads=4, kv_heads=4, head_dim=128, intermediate=512, layers=2
)
"""Sizes of which each of two ranks has whole blocks of 128 x 128."""


def few_tokens(
    arch: str,
    seed: int = 0,
    repeat: float = 0.0,
    finish: Callable[[Path], object] | None = None,
    **shape: Any,
) -> Path:
    """A model with more ids than its tokenizer has, as padded vocabularies have.

    Args:
        finish: makes another kind of model of it.
    """
    shape = _SHAPE | {"arch": arch} | _OF_ARCH.get(arch, {}) | shape
    small = kept_model(cache_dir(), "verl-small", shape | {"vocab": KNOWN, "layers": 1})

    def with_its_tokenizer(model: Path) -> None:
        for file in small.glob("*token*"):
            shutil.copy(file, model / file.name)

        if finish is not None:
            finish(model)

    sizes = shape | {"seed": seed, "repeat": repeat}
    kind = arch if finish is None else finish.__name__
    return kept_model(cache_dir(), f"verl-few-tokens-{kind}", sizes, with_its_tokenizer)


def quantized_in_full(model: Path) -> Path:
    """What is left of a model of `BLOCKS` when verl has quantized it, in 32 bits."""
    from safetensors.torch import load_file, save_file
    from verl.utils.kernel.fp8_kernel import _scaled_fp8_blockwise_pytorch as quantize

    from tests.support.fp8_on_cpu import in_full

    def of_blocks(weight: Any) -> Any:
        quantized, scale = quantize(weight, [128, 128])
        return in_full(quantized, scale.squeeze(-1))

    target = model.with_name(f"{model.name}-quantized")
    if not target.exists():
        shutil.copytree(model, target)
        file = target / "model.safetensors"
        weights = {
            name: of_blocks(weight) if name.endswith("_proj.weight") else weight
            for name, weight in load_file(file).items()
        }
        save_file(weights, file, metadata={"format": "pt"})
    return target


def repeating_chat(arch: str, repeat: float = 1.35) -> Path:
    """A model for the GRPO example whose n-gram drafts are accepted half of the time."""
    sizes = _SHAPE | {"arch": arch, "repeat": repeat}
    return _chat("repeating", sizes, range(VOCAB - END_TOKENS + 1, VOCAB))


def mixture_chat(arch: str) -> Path:
    """A mixture of experts for the GRPO example. verl wants tokens of Qwen's of Qwen's classes."""
    sizes = dict(arch=arch, hidden=128, heads=4, kv_heads=4, layers=2, vocab=VOCAB)
    return _chat("mixture", sizes, range(VOCAB - 8, VOCAB))


def small_chat(arch: str, **shape: Any) -> Path:
    """A model of `few_tokens`' shape for the GRPO example. Its longest responses are longer than
    windows, where it has some."""
    sizes = _SHAPE | {"arch": arch} | _OF_ARCH[arch] | shape
    eos = _EOS.get(arch)
    ends = range(VOCAB - 40, VOCAB)
    return _chat("small-own-end", sizes, ends, eos) if eos else _chat("small", sizes, ends)


_EOS = {"deepseek_v3": "<\uff5cend\u2581of\u2581sentence\uff5c>"}
"""Which verl looks for in tokenizers of the class."""


def mtp_chat() -> Path:
    """A model for the GRPO example with an MTP module, of whose drafts some are accepted."""
    sizes = _SHAPE | _OF_ARCH["qwen2"] | {"arch": "qwen2", "repeat": 1.35}
    return _chat("mtp", sizes, range(VOCAB - END_TOKENS + 1, VOCAB), finish=mimo)


def pictured_chat() -> Path:
    """A Qwen2.5-VL for the GRPO example, with the end token that verl seeks in its tokenizer."""
    sizes = _SHAPE | _OF_ARCH["qwen2"] | {"arch": "qwen2"}
    first = min(token for place in PLACE.values() for token in place)
    return _chat("pictured", sizes, range(first - 40, first), "<|im_end|>", quiet_qwen2_5_vl)


def _chat(
    name: str,
    sizes: dict[str, Any],
    ends: Sequence[int],
    eos: str = "<eos>",
    finish: Callable[[Path], object] = lambda model: None,
) -> Path:
    """A model whose responses end with any of these tokens, too. `finish`: as of `few_tokens`."""

    def with_ends(model: Path) -> None:
        config = json.dumps({"eos_token_id": [1, *ends]})
        (model / "generation_config.json").write_text(config)
        for file in model.glob("*token*"):
            file.write_text(file.read_text().replace("<eos>", eos))
        finish(model)

    return kept_model(cache_dir(), f"verl-{name}-chat-{len(ends)}", sizes, with_ends)
