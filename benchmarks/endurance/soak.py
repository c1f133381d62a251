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
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from typing import Annotated

import psutil
import typer

from benchmarks.common import ENVIRONMENT
from benchmarks.endurance import storm as storms
from benchmarks.endurance.growth import MEMORY_ALLOWANCE, Trend, trend
from benchmarks.endurance.processes import engine_processes, left_in_memory, names_held, sample
from benchmarks.endurance.storm import Storm
from benchmarks.record import machine, table, write_results


@dataclass(frozen=True)
class Soaked:
    """What became of one engine.

    Attributes:
        minutes: of the storm.
        counts: what happened.
        left: shared memory and processes that are still there after the engine's end.
    """

    name: str
    minutes: float
    counts: dict[str, int]
    trends: list[Trend]
    left: list[str]

    @property
    def fine(self) -> bool:
        """Whether nothing has grown, and nothing is left."""
        return not self.left and not any(trend.grown for trend in self.trends)


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
        seconds: of work; it goes on until there are nine samples.
        interval: seconds between samples, which are taken after a batch.
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
        begun = due = time.monotonic()
        samples: list[dict[str, float]] = []
        while time.monotonic() - begun < seconds or len(samples) < 9:
            storm.run_batch()
            if time.monotonic() >= due:
                samples.append(sample(processes))
                due += interval
        minutes = (time.monotonic() - begun) / 60
        held = names_held(chain(*processes.values())) - held_before
    _, alive = psutil.wait_procs(processes["engine core"] + processes["workers"], timeout=60)
    left = [f"process {process.pid}" for process in alive] + left_in_memory(held)
    return Soaked(
        "with drafts" if speculates else "without drafts",
        minutes,
        storm.counts,
        [
            trend(
                name,
                [sample[name] for sample in samples],
                allowance if name.endswith("MiB") else 0.0,
            )
            for name in samples[0]
        ],
        left,
    )


def _text(engines: Sequence[Soaked], ranks: int) -> str:
    text = (
        f"Storms of requests, aborts, switches and draft lengths on {ranks} ranks, a tiny random "
        "model; sampled after batches. `grew`: median of the last third of the samples less that "
        "of the middle third; `allowed`: the spread of the middle third between its quartiles, for "
        f"memory {MEMORY_ALLOWANCE:.0%} if that is more. The first third is the warm-up.\n\n"
    )
    for engine in engines:
        happened = ", ".join(f"{count} {what}" for what, count in engine.counts.items())
        left = ", ".join(engine.left) or "nothing"
        text += (
            f"{engine.name}: {engine.minutes:.1f} minutes, {happened}. Left at the end: {left}.\n\n"
        )
    rows = [
        [
            engine.name,
            grew.name,
            *(f"{value:.1f}" for value in (grew.first, grew.middle)),
            f"{grew.last - grew.middle:+.1f}",
            f"{grew.allowed:.1f}",
            "**grown**" if grew.grown else "no growth",
        ]
        for engine in engines
        for grew in engine.trends
    ]
    header = ["engine", "quantity", "warm-up", "middle third", "grew", "allowed", ""]
    return text + table(header, rows)


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
