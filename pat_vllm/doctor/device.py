"""Figures of the devices, without an engine: `python -m pat_vllm.doctor.device`.

How fast they copy, and against that the rows of weights and the KV that a switch moves. On CPU a
device is what a rank has: its share of the cores.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from pat_vllm.doctor.journal import Ended, Journal
from pat_vllm.layout import Layout
from pat_vllm.model_size import MODEL_SHAPES, ModelSize

if TYPE_CHECKING:
    from pat_vllm.doctor.speed.timing import Stopwatch

DEFAULT_MODEL = "llama-3.1-8b"
"""Whose sizes are measured with where a user names no model."""


@dataclass(frozen=True)
class Scale:
    """How much is measured.

    Attributes:
        copies: bytes of copies.
        weights, kv: bytes, at most, of the weights whose rows move and of the KV; of one layer at
            least.
        requests, tokens: in each replica of the narrowest layout, and of each.
        repeats: of which the median is taken.
    """

    copies: tuple[int, ...]
    weights: int
    kv: int
    requests: int
    tokens: int
    repeats: int = 5


ON_CPU = Scale((256 << 20,), 512 << 20, 128 << 20, 4, 2048)
ON_GPU = Scale((256 << 20, 1 << 30), 8 << 30, 4 << 30, 16, 2048, 9)


@dataclass(frozen=True)
class Moves:
    """What to measure with.

    Attributes:
        model: its config, as in a config.json; None for `DEFAULT_MODEL`.
        ranks, tps: of the engine; the base layout's tp first.
        scale: by default that of the platform.
    """

    model: dict[str, Any] | None
    ranks: int
    tps: tuple[int, ...]
    scale: Scale | None = None

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The base layout first."""
        return tuple(Layout.of(tp, self.ranks) for tp in self.tps)

    def named_model(self) -> tuple[str, ModelSize]:
        """Name and sizes; of `DEFAULT_MODEL` where a model has experts, which are not measured.

        Those of `DEFAULT_MODEL` are widened until the ranks can share it.

        Raises:
            ValueError: the model's config has no such sizes.
        """
        if self.model is not None:
            size = ModelSize.of(self.model)
            if size.experts is None:
                return str(self.model.get("model_type", "model")), size
        size = ModelSize.of(MODEL_SHAPES[DEFAULT_MODEL])
        if all(map(size.divides, self.tps)):
            return DEFAULT_MODEL, size
        heads, kv_heads, intermediate = (
            math.lcm(one, self.ranks) for one in (size.heads, size.kv_heads, size.intermediate)
        )
        wide = replace(size, heads=heads, kv_heads=kv_heads, intermediate=intermediate)
        return f"{DEFAULT_MODEL}, widened", wide


MOVES = TypeAdapter(Moves)


def measure(moves: Moves, journal: Journal) -> None:
    """Write a check for each figure."""
    import torch

    from pat_vllm.doctor.speed import kv_blocks, reshard

    on_gpu = torch.cuda.is_available()
    scale = moves.scale or (ON_GPU if on_gpu else ON_CPU)
    with journal.check("copies") as found:
        stopwatch, rate = _copies(scale, moves.ranks, found, on_gpu)
    if len(moves.layouts) < 2:
        return
    name, size = moves.named_model()
    ranks = sorted({0, moves.ranks // 2, moves.ranks - 1})
    fused = (size.heads + 2 * size.kv_heads) * size.head_dim + 2 * size.intermediate
    layers = _layers(size, scale.weights * moves.tps[0], 2 * fused * size.hidden)
    some = replace(size, layers=layers)
    journal.beat()
    with journal.check("rows of weights") as found:
        rows = reshard.measure(stopwatch, name, some, moves.layouts, ranks, rate)
        found.append(f"{layers} of {size.layers} layers of {name}, bfloat16")
        found += _found(rows, "source", "target")
    narrow, wide = moves.layouts[0], moves.layouts[-1]
    one_layer = kv_blocks.Case(replace(size, layers=1), narrow, wide, scale.requests, scale.tokens)
    layers = _layers(size, scale.kv, 8 * one_layer.words)
    case = replace(one_layer, model=replace(size, layers=layers))
    with journal.check("KV") as found:
        memory = torch.empty(case.words, dtype=torch.int64, device=stopwatch.device)
        rows = kv_blocks.measure(stopwatch, memory, case, rate)
        found.append(
            f"{scale.requests} requests of {scale.tokens} tokens a replica of {narrow}, "
            f"{layers} of {size.layers} layers of {name}"
        )
        found += _found(rows, "what", "direction")


def _layers(size: ModelSize, bound: int, of_layer: int) -> int:
    """As many as take no more bytes than the bound, but one at least."""
    return max(1, min(size.layers, bound // of_layer))


def _copies(scale: Scale, ranks: int, found: list[Any], on_gpu: bool) -> tuple[Stopwatch, float]:
    """Measure every device. Returns a stopwatch for a rank's device, and how fast that copies."""
    import torch

    from pat_vllm.doctor.speed import ceiling
    from pat_vllm.doctor.speed.timing import Stopwatch

    rates: dict[str, dict[str, Any]] = {}
    if on_gpu:
        for index in range(torch.cuda.device_count()):
            torch.cuda.set_device(index)
            stopwatch = Stopwatch(torch.device("cuda", index), scale.repeats)
            rates[f"GPU {index}"] = ceiling.measure(stopwatch, scale.copies)
        torch.cuda.set_device(0)
        of_rank = "GPU 0"
        stopwatch = Stopwatch(torch.device("cuda", 0), scale.repeats)
    else:
        usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1
        share = max(1, usable // ranks)
        stopwatch = Stopwatch(torch.device("cpu"), scale.repeats)
        for threads in sorted({1, share, usable}, reverse=True):
            torch.set_num_threads(threads)
            rates[_cores(threads)] = ceiling.measure(stopwatch, scale.copies)
        of_rank = _cores(share)
        torch.set_num_threads(share)
    found.append({"bytes_per_second": rates})
    for name, one in rates.items():
        copied, swapped = (one[f"{how}_bytes_per_second"] / 1e9 for how in ("copy", "swap"))
        found.append(f"{name}: {copied:,.1f} GB/s copied, {swapped:,.1f} GB/s swapped in place")
    found.append("bytes read plus bytes written")
    return stopwatch, rates[of_rank]["copy_bytes_per_second"]


def _cores(threads: int) -> str:
    return "one core" if threads == 1 else f"{threads} cores"


def _slowest(rows: Sequence[Mapping[str, Any]], *by: str) -> list[dict[str, Any]]:
    """Of each kind, by the values of some fields, the row that is furthest from a copy's speed."""
    found: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        kind = tuple(row[name] for name in by)
        if kind not in found or row["share_of_copy"] < found[kind]["share_of_copy"]:
            found[kind] = row
    return [
        {
            "label": f"tp={kind[0]} to tp={kind[1]}" if by[0] == "source" else " ".join(kind),
            "bytes": row["bytes_read_and_written"],
            "ms": row["ms"],
            "share_of_copy": row["share_of_copy"],
        }
        for kind, row in found.items()
    ]


def _found(rows: Sequence[Mapping[str, Any]], *by: str) -> Iterator[str | Mapping[str, Any]]:
    """The slowest of each kind, in words; and all rows."""
    slowest = _slowest(rows, *by)
    for row in slowest:
        gigabytes = row["bytes"] / 1e9
        yield (
            f"{row['label']}: {gigabytes:.2f} GB in {row['ms']:.1f} ms, "
            f"{1e3 * gigabytes / row['ms']:,.1f} GB/s, {row['share_of_copy']:.0%} of a copy"
        )
    yield {"slowest": slowest, "moves": list(rows)}


def main(request: str, answer: str, journal: str) -> None:
    """Files in, and lines of the journal out; there is no other answer."""
    moves = MOVES.validate_json(Path(request).read_text())
    with Path(journal).open("a") as file:
        try:
            measure(moves, Journal(file))
        except Ended:
            sys.exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
