"""The models of the workloads with speculation, and an engine's change from one to the other."""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pat_vllm.cli import random_model
from pat_vllm.cli.demo import MODEL

REPEATING, SCATTERED = "repeating", "scattered"

SHAPE: Mapping[str, Any] = {**MODEL, "vocab": 64_000, "layers": 8}
"""The other workloads' model with a smaller vocabulary and more layers: memory has to hold four
engines at once, and reading weights takes a larger part of a step, as on GPUs."""

SPECS: Mapping[str, Mapping[str, Any]] = {
    # Goes through one phrase again and again, with interruptions: most drafts are accepted.
    REPEATING: {**SHAPE, "repeat": 1.4},
    # Says the tokens of its phrase in any order: the same two follow each other again and again, so
    # that drafts are found, but each of the 32 may be next.
    SCATTERED: {**SHAPE, "repeat": 1.5, "phrase": 32},
}
"""Of equal size, so that an engine can go from one's weights to the other's."""


def model(name: str, directory: Path) -> Path:
    """The checkpoint `SPECS[name]` in `directory`, made on the first call."""
    spec = dict(SPECS[name])
    sources = Path(random_model.__file__).read_bytes() + Path(__file__).read_bytes()
    key = json.dumps([name, spec], sort_keys=True).encode() + sources
    target = directory.resolve() / f"bench-{name}-{hashlib.sha256(key).hexdigest()[:12]}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when complete, so that an interrupted run leaves no half of a model behind.
    scratch = Path(tempfile.mkdtemp(prefix=".bench-", dir=target.parent))
    try:
        random_model.make_model(scratch, **spec)
        if name == SCATTERED:
            _scatter(scratch / "model.safetensors", spec["phrase"])
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _scatter(weights: Path, phrase: int) -> None:
    """Make all tokens of the phrase equally likely, and others unlikely, whatever came before."""
    from safetensors.torch import load_file, save_file

    tensors = load_file(weights)
    first = len(random_model.SPECIAL_TOKENS)
    rows = tensors["lm_head.weight"][first : first + phrase]
    called = rows[:, :phrase].max().item()  # by the token before, in its channel
    rows.zero_()
    rows[:, :phrase] = called
    save_file(tensors, weights, metadata={"format": "pt"})
