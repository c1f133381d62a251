"""What is measured: shapes of models, and how much of everything."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

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
    """How much is measured; by default all of it.

    Attributes:
        models: dense decoders, by name.
        copies: bytes of a copy, ascending.
        ranks: which of the `RANKS` devices' reshards.
        requests, tokens: what KV is moved for, and how much of each.
        wide: tensor parallelism at the far end of that move.
        kv_bytes: bound on the KV of one measurement, over all layers.
        repeats: runs of which the median is taken.
    """

    models: Mapping[str, ModelSize]
    copies: tuple[int, ...] = tuple(n << 20 for n in (1, 4, 16, 64, 256, 1024, 4096))
    ranks: tuple[int, ...] = tuple(range(RANKS))
    requests: tuple[int, ...] = (1, 4, 16, 64)
    tokens: tuple[int, ...] = (2048, 8192, 32768)
    wide: tuple[int, ...] = (2, 8)
    kv_bytes: int = 48 << 30
    repeats: int = 9


def scale_of(device: torch.device, quick: bool) -> Scale:
    """Of a GPU all of it, or in a minute the most important; of CPU tiny shapes."""
    names = ("llama-3.1-8b",) if quick else ("llama-3.1-8b", "qwen3-14b")
    whole = Scale({name: ModelSize.of(MODEL_SHAPES[name]) for name in names})
    if device.type == "cpu":
        return Scale(
            {"tiny": TINY}, (1 << 16, 1 << 20), (0, 5, 7), (1, 3), (32, 64), (2, 4), 1 << 20, 2
        )
    if quick:
        copies = tuple(n << 20 for n in (16, 256, 1024))
        return replace(
            whole, copies=copies, ranks=(0, 3, 7), requests=(1, 16), tokens=(2048, 8192), wide=(2,),
            kv_bytes=16 << 30, repeats=5,
        )  # fmt: skip
    return whole
