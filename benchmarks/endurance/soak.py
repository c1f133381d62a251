"""Switch storms for long: what an engine's processes hold must not grow.

    python -m benchmarks.endurance.soak --minutes 20

An engine without speculation, then one with it, for half of the time each. Requests arrive and are
given up, layouts and draft lengths change at random. After each batch, when the engine is idle,
memory, file descriptors, threads, shared memory, sockets and processes are counted. The first third
of the samples is the warm-up. A quantity has grown if the median of the last third is above that of
the middle third by more than the middle third's own spread, and for memory by more than 1%
(`benchmarks/endurance/growth.py`). Exit status 1 if one has.
"""

from __future__ import annotations

import os
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Annotated

import psutil
import typer

from benchmarks.common import ENVIRONMENT
from benchmarks.endurance import storm as storms
from benchmarks.endurance.growth import MEMORY_ALLOWANCE, Trend, trends
from benchmarks.endurance.processes import SHARED_MEMORY, engine_processes, names_held, sample
from benchmarks.endurance.storm import Storm
from benchmarks.record import machine, table, write_results

POINTS = 30
"""Of each quantity's course that the file keeps: medians."""


@dataclass(frozen=True)
class Soaked:
    """What became of one engine.

    Attributes:
        minutes: of the storm.
        counts: what happened.
        courses: quantity -> its medians over time, at most `POINTS`.
        left: shared memory and processes that are still there after the engine's end.
    """

    name: str
    minutes: float
    counts: dict[str, int]
    trends: list[Trend]
    courses: dict[str, list[float]]
    left: list[str]

    @property
    def fine(self) -> bool:
        """Whether nothing has grown, and nothing is left."""
        return not self.left and not any(trend.grown for trend in self.trends)


def soak(
    storm: Storm,
    processes: dict[str, list[psutil.Process]],
    seconds: float,
    interval: float,
) -> list[dict[str, float]]:
    """Run batches for so long, and at least nine samples; they are `interval` seconds apart."""
    begun = due = time.monotonic()
    samples: list[dict[str, float]] = []
    while time.monotonic() - begun < seconds or len(samples) < 9:
        storm.run_batch()
        if time.monotonic() >= due:
            samples.append(sample(processes))
            due += interval
    return samples


def soak_engine(
    speculates: bool,
    seconds: float,
    interval: float,
    ranks: int = 2,
    from_server: bool = False,
    allowance: float = MEMORY_ALLOWANCE,
) -> Soaked:
    """Start an engine, have it work for so long, and end it.

    Args:
        from_server: see `tests.support.engines.engine`.
        allowance: share of its memory that an engine may grow by.
    """
    from tests.support.engines import engine

    options = {"speculative_config": storms.SPECULATIVE} if speculates else {}
    before = psutil.Process().children(recursive=True)
    held_before = names_held([psutil.Process()])
    with engine(
        storms.MODEL, ranks, {}, in_process=False, from_server=from_server, **options
    ) as llm:
        sizes = [tp for tp in (1, 2, 4, 8) if ranks % tp == 0]
        storm = Storm(llm, random.Random(ranks), sizes, speculates)
        processes = engine_processes(before)
        begun = time.monotonic()
        samples = soak(storm, processes, seconds, interval)
        minutes = (time.monotonic() - begun) / 60
        held = names_held(chain(*processes.values())) - held_before
    _, alive = psutil.wait_procs(processes["engine core"] + processes["workers"], timeout=60)
    left = [str(path) for path in sorted(held) if path.parent == SHARED_MEMORY and path.exists()]
    left += [f"process {process.pid}" for process in alive]
    return Soaked(
        "with drafts" if speculates else "without drafts",
        minutes,
        storm.counts(),
        trends(samples, allowance),
        {name: _course([values[name] for values in samples]) for name in samples[0]},
        left,
    )


def _course(values: Sequence[float]) -> list[float]:
    size = -(-len(values) // POINTS)
    parts = [values[i : i + size] for i in range(0, len(values), size)]
    return [round(statistics.median(part), 1) for part in parts]


def _text(engines: Sequence[Soaked], ranks: int) -> str:
    text = (
        f"Storms of requests, aborts, switches and draft lengths on {ranks} ranks, a tiny random "
        "model; sampled after batches. `grew`: median of the last third of the samples less that "
        "of the middle third; `allowed`: the spread of the middle third between its quartiles, for "
        f"memory {MEMORY_ALLOWANCE:.0%} if that is more. The first third is the warm-up.\n\n"
    )
    happened = [
        [engine.name, f"{engine.minutes:.1f}", *engine.counts.values()] for engine in engines
    ]
    text += table(["engine", "minutes", *engines[0].counts], happened) + "\n"
    rows = [
        [
            engine.name,
            trend.name,
            f"{trend.first:.1f}",
            f"{trend.middle:.1f}",
            f"{trend.last - trend.middle:+.1f}",
            f"{trend.allowed:.1f}",
            "**grown**" if trend.grown else "no growth",
        ]
        for engine in engines
        for trend in engine.trends
    ]
    header = ["engine", "quantity", "warm-up", "middle third", "grew", "allowed", ""]
    text += table(header, rows) + "\n"
    for engine in engines:
        text += f"Left after the end, {engine.name}: {', '.join(engine.left) or 'nothing'}.\n"
    return text


def run(
    minutes: Annotated[float, typer.Option(min=0, help="Of storms, of both engines.")] = 20.0,
    ranks: Annotated[int, typer.Option(min=2, help="Of an engine.")] = 2,
    interval: Annotated[float, typer.Option(min=0, help="Seconds between samples.")] = 2.0,
) -> None:
    """Have engines work for long, and see whether what they hold grows."""
    os.environ.update(ENVIRONMENT | storms.ENVIRONMENT)
    facts = machine()
    engines = [soak_engine(on, 30 * minutes, interval, ranks) for on in (False, True)]
    body = {"ranks": ranks, "engines": [asdict(engine) for engine in engines]}
    write_results("soak", facts, body, _text(engines, ranks))
    raise typer.Exit(not all(engine.fine for engine in engines))


if __name__ == "__main__":
    typer.run(run)
