"""Sides of a comparison that take turns, batch by batch: a fixed draft length.

All engines stay alive. One that waits is stopped, so that it takes no core. Greedy, so that equal
sides generate equal tokens with equal drafts, which is checked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.common import Engine, Summary, table
from benchmarks.speculation.engines import (
    BIND,
    RANKS,
    Batch,
    Served,
    flags,
    ngram,
    pat,
    repeating_prompts,
    serve,
    stock,
    turn,
)
from benchmarks.speculation.paired import MedianRatio, turns

_BEGIN_SECONDS = 0.4
"""Until the engines of a side have begun; they wake up before."""

BAR = 1.03


@dataclass(frozen=True)
class Side:
    """Engines that share the batches of a side, and how each starts.

    Attributes:
        engines: options of `LLM` and the cores, for each.
        length: what `pat_vllm.speculate` is told before each batch; None for nothing.
    """

    engines: tuple[tuple[Mapping[str, Any], str], ...]
    length: int | None = None


@dataclass(frozen=True)
class Turn:
    """A batch of one side.

    Attributes:
        seconds: from the common beginning until the last engine is done.
        steps, drafted, accepted: of PAT's engine; 0 of stock ones.
    """

    seconds: float
    steps: int
    drafted: int
    accepted: int


@dataclass(frozen=True)
class Size:
    """Batches that are served in turns."""

    requests: int
    new_tokens: int
    repeats: int


def static(name: str, size: Size, length: int) -> tuple[dict[str, Any], str]:
    """PAT kept in a layout against stock vLLM, both with a fixed draft length.

    With tp=2 stock vLLM is one engine on both cores; with tp=1 it is two on one core each, with
    half of the requests each.
    """
    shared = flags(name) | ngram(length)
    comparisons = {
        "tp2dp1": {
            "PAT": Side(((shared | pat(2), BIND),)),
            "stock": Side(((shared | stock(2), BIND),)),
        },
        "tp1dp2": {
            "PAT": Side(((shared | pat(1), BIND),)),
            "stock": Side(tuple((shared | stock(1), str(core)) for core in range(RANKS))),
        },
    }
    body: dict[str, Any] = {}
    rows = []
    for layout, sides in comparisons.items():
        served, unequal = _alternate(sides, name, size)
        row, body[layout] = _compared(served, "PAT", "stock", BAR)
        body[layout]["unequal_batches"] = unequal
        rows.append([layout, *row, unequal])
    text = f"A fixed draft length of {length} on both sides, {_described(name, size)}\n\n" + table(
        [*_header("PAT", "stock"), "batches with other tokens"], rows
    )
    return body, text


def _described(name: str, size: Size) -> str:
    return (
        f"model {name}: {size.requests} requests of {size.new_tokens} tokens, greedy; the sides "
        f"take turns, {size.repeats} batches each. The ratio is the median of those of equal "
        "batches, with its 95% interval."
    )


def _header(ours: str, theirs: str) -> list[str]:
    return ["", f"{ours}, s", f"{theirs}, s", "ms per step", "accepted", "ratio", "bar", ""]


def _compared(
    served: Mapping[str, Sequence[Turn]], ours: str, theirs: str, bar: float | None
) -> tuple[list[Any], dict[str, Any]]:
    """Cells of a table, and the same for a file."""
    seconds = {side: [one.seconds for one in served[side]] for side in (ours, theirs)}
    ratio = MedianRatio.of(seconds[ours], seconds[theirs])
    steps, drafted, accepted = (
        sum(getattr(one, count) for one in served[ours])
        for count in ("steps", "drafted", "accepted")
    )
    cells = [
        Summary.of(seconds[ours]).show(digits=3),
        Summary.of(seconds[theirs]).show(digits=3),
        f"{1e3 * sum(seconds[ours]) / steps:.1f}",
        f"{accepted / drafted:.2f}" if drafted else "-",
        ratio.show(),
        bar or "-",
        ratio.verdict(bar) if bar else "",
    ]
    return cells, {"turns": {side: served[side] for side in seconds}, "ratio": ratio, "bar": bar}


def _alternate(
    sides: Mapping[str, Side], name: str, size: Size
) -> tuple[dict[str, list[Turn]], int]:
    """What each side did with each batch, and how many batches had unequal tokens."""
    served: dict[str, list[Turn]] = {side: [] for side in sides}
    unequal = 0
    with ExitStack() as stack:
        running: dict[str, list[Engine]] = {}
        for label, side in sides.items():
            running[label] = []
            for options, bind in side.engines:
                engine = stack.enter_context(Engine(options, bind))
                engine.wait_until_ready()
                # One after the other, or they would measure themselves while others start.
                engine.pause()
                running[label].append(engine)
        for repeat, order in enumerate(turns(list(sides), size.repeats + 1)):
            prompts = repeating_prompts(name, size.requests, seed=repeat)
            tokens = set()
            for label in order:
                batch = Batch(prompts, size.new_tokens, length=sides[label].length)
                one, generated = _serve(running[label], batch)
                tokens.add(generated)
                if repeat:  # the first one warms up
                    served[label].append(one)
            unequal += bool(repeat) and len(tokens) > 1
    return served, unequal


def _serve(engines: Sequence[Engine], batch: Batch) -> tuple[Turn, tuple[Any, ...]]:
    """A side's batch, and its tokens by request."""
    with turn(engines):
        begin_at = time.monotonic() + _BEGIN_SECONDS
        for index, engine in enumerate(engines):
            part = batch.prompts[index :: len(engines)]
            engine.start(serve, replace(batch, prompts=part, begin_at=begin_at))
        parts: list[Served] = [engine.result() for engine in engines]
    seconds = max(part.ended for part in parts) - min(part.began for part in parts)
    tokens = tuple(
        parts[index % len(parts)].tokens[index // len(parts)] for index in range(len(batch.prompts))
    )
    counts = (sum(getattr(p, one) for p in parts) for one in ("steps", "drafted", "accepted"))
    return Turn(seconds, *counts), tokens
