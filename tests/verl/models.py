"""Random checkpoints for verl's tests, built once per machine."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pat_vllm.cli.random_model import make_model
from tests.support.models import cache_dir

VOCAB = 512
KNOWN = 320
"""Tokens of the tokenizer of `few_tokens`; the model's other ids must never be sampled."""

_SHAPE: dict[str, Any] = dict(arch="qwen3", hidden=128, heads=8, kv_heads=4, vocab=VOCAB)


END_TOKENS = 100
"""Tokens that end a response of `repeating_chat`: many, for it seldom leaves its phrase."""


def few_tokens(seed: int = 0, repeat: float = 0.0, arch: str = "qwen3") -> Path:
    """A model with more ids than its tokenizer has, as padded vocabularies have."""
    shape = _SHAPE | {"arch": arch}

    def write(model: Path) -> None:
        make_model(model, seed=seed, repeat=repeat, **shape)
        small = model.with_name("small")
        make_model(small, **shape | {"vocab": KNOWN, "layers": 1})
        for file in small.glob("*token*"):
            shutil.copy(file, model / file.name)

    name = "verl-few-tokens" if arch == "qwen3" else f"verl-few-tokens-{arch}"
    return _kept(f"{name}-{seed}" + (f"-{repeat}" if repeat else ""), write)


def repeating_chat(repeat: float = 1.35) -> Path:
    """A model for the GRPO example whose n-gram drafts are accepted half of the time."""

    def write(model: Path) -> None:
        make_model(model, repeat=repeat, **_SHAPE | {"arch": "llama"})
        ends = [1, *range(VOCAB - END_TOKENS + 1, VOCAB)]
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))

    return _kept(f"verl-repeating-chat-{repeat}-{END_TOKENS}", write)


def mixture_chat() -> Path:
    """A mixture of experts for the GRPO example. verl wants tokens of Qwen's of Qwen's classes."""

    def write(model: Path) -> None:
        make_model(model, arch="olmoe", hidden=128, heads=4, kv_heads=4, layers=2, vocab=VOCAB)
        ends = [1, *range(VOCAB - 8, VOCAB)]
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))

    return _kept("verl-mixture-chat-olmoe", write)


def _kept(name: str, write: Callable[[Path], None]) -> Path:
    """A directory that `write` has made, now or earlier."""
    target = cache_dir() / name
    if target.is_dir():
        return target
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    write(scratch / "model")
    (scratch / "model").rename(target)
    shutil.rmtree(scratch)
    return target
