"""The models of the workloads with speculation, and an engine's change from one to the other."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pat_vllm.cli import random_model
from pat_vllm.cli.demo_batch import MODEL

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
    finish = _scatter if name == SCATTERED else lambda path: None
    return random_model.kept_model(directory, f"bench-{name}", SPECS[name], finish)


def _scatter(path: Path) -> None:
    """Make all tokens of the phrase equally likely, and others unlikely, whatever came before."""
    from safetensors.torch import load_file, save_file

    weights, phrase = path / "model.safetensors", SPECS[SCATTERED]["phrase"]
    tensors = load_file(weights)
    first = len(random_model.SPECIAL_TOKENS)
    rows = tensors["lm_head.weight"][first : first + phrase]
    called = rows[:, :phrase].max().item()  # by the token before, in its channel
    rows.zero_()
    rows[:, :phrase] = called
    save_file(tensors, weights, metadata={"format": "pt"})
