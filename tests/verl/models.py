"""Random checkpoints for verl's tests, built once per machine."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path
from typing import Any

from pat_vllm.cli.random_model import make_model
from tests.models import _cache_dir

VOCAB = 512
KNOWN = 320
"""Tokens of the tokenizer of `few_tokens`; the model's other ids must never be sampled."""

_SHAPE: dict[str, Any] = dict(arch="qwen3", hidden=128, heads=8, kv_heads=4, vocab=VOCAB)


def few_tokens(seed: int = 0) -> Path:
    """A model with more ids than its tokenizer has, as padded vocabularies have."""
    target = _cache_dir() / f"verl-few-tokens-{seed}"
    if target.is_dir():
        return target
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}-", dir=target.parent))
    make_model(scratch / "model", seed=seed, **_SHAPE)
    make_model(scratch / "small", **_SHAPE | {"vocab": KNOWN, "layers": 1})
    for file in (scratch / "small").glob("*token*"):
        shutil.copy(file, scratch / "model" / file.name)
    (scratch / "model").rename(target)
    shutil.rmtree(scratch)
    return target
