"""What is measured: shapes of models, and how much of everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from pat_vllm.layout import Layout
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.model_size import ModelSize

TINY = ModelSize(2, 64, 8, 4, 16, 128, 512, tied=False)

RANKS = 8
"""Devices of the engines whose shards are measured."""
LAYOUTS = tuple(Layout.of(tp, RANKS) for tp in (1, 2, 4, 8))
"""Of these engines, the base layout first."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        models: dense decoders, by name.
        copies: bytes of a copy.
        ranks: which of the `RANKS` devices' reshards.
        requests, tokens: what KV is moved for, and how much of each.
        wide: tensor parallelism at the far end of that move.
        kv_bytes: bound on the KV of one measurement, over all layers.
        repeats: runs of which the median is taken.
    """

    models: Mapping[str, ModelSize]
    copies: tuple[int, ...]
    ranks: tuple[int, ...]
    requests: tuple[int, ...]
    tokens: tuple[int, ...]
    wide: tuple[int, ...]
    kv_bytes: int
    repeats: int


def _known(*names: str) -> dict[str, ModelSize]:
    """Of `MODEL_SHAPES`."""
    return {name: ModelSize.of(MODEL_SHAPES[name]) for name in names}


_FULL = Scale(
    models=_known("llama-3.1-8b", "qwen3-14b"),
    copies=tuple(n << 20 for n in (1, 4, 16, 64, 256, 1024, 4096)),
    ranks=tuple(range(RANKS)),
    requests=(1, 4, 16, 64),
    tokens=(2048, 8192, 32768),
    wide=(2, 8),
    kv_bytes=48 << 30,
    repeats=9,
)
_QUICK = Scale(
    models=_known("llama-3.1-8b"),
    copies=tuple(n << 20 for n in (16, 256, 1024)),
    ranks=(0, 3, 7),
    requests=(1, 16),
    tokens=(2048, 8192),
    wide=(2,),
    kv_bytes=16 << 30,
    repeats=5,
)
_TINY = Scale(
    models={"tiny": TINY},
    copies=(1 << 16, 1 << 20),
    ranks=(0, 5, 7),
    requests=(1, 3),
    tokens=(32, 64),
    wide=(2, 4),
    kv_bytes=1 << 20,
    repeats=2,
)


def scale_of(device: torch.device, quick: bool) -> Scale:
    """Of a GPU all of it, or in a minute the most important; of CPU tiny shapes."""
    if device.type == "cpu":
        return _TINY
    return _QUICK if quick else _FULL
