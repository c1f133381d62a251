"""Decode steps and memory of one engine, stock vLLM's or PAT's: `python -m pat_vllm.doctor.steps`.

Both are asked the same, in the same way: tokens are timed as they come to the front end.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from pat_vllm.doctor.in_workers import FACTS_METHOD
from pat_vllm.doctor.journal import Ended, Journal
from pat_vllm.doctor.session import switch_to
from pat_vllm.layout import Layout

if TYPE_CHECKING:
    from vllm import LLM

STOCK = "stock"
"""In place of a layout's name."""
_TOKENS = 64
_UNSETTLED = 8
"""Tokens of a request that do not count: others may still be admitted."""


@dataclass(frozen=True)
class Steps:
    """An engine, and what to time.

    Attributes:
        engine: keyword arguments of `vllm.LLM`, with `in_workers.EXTENSION`.
        prompts: token ids, for as many requests as there may be at most.
        requests: of a replica; 1 is a request alone in the engine, others are in each replica.
        label: what the engine is called.
    """

    engine: dict[str, Any]
    prompts: tuple[tuple[int, ...], ...]
    requests: tuple[int, ...]
    label: str


@dataclass(frozen=True)
class StepTime:
    """The median time between two tokens of a request, with the fastest and the slowest; ms."""

    layout: str
    requests: int
    ms: float
    low: float
    high: float


@dataclass(frozen=True)
class Measured:
    """Of one engine.

    Attributes:
        facts: of each rank, as `InWorkers.doctor_facts` returns them.
    """

    steps: tuple[StepTime, ...]
    facts: tuple[dict[str, Any], ...]

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Of an engine with PAT: what it keeps ready, both kinds of a mixture's."""
        return tuple(map(Layout.parse, dict.fromkeys(one.layout for one in self.steps)))


STEPS = TypeAdapter(Steps)
MEASURED = TypeAdapter(Measured)


def measure(steps: Steps, journal: Journal) -> Measured:
    """Start the engine, time it, ask its workers, end it."""
    from vllm import LLM

    with journal.check(steps.label) as found:
        llm = LLM(**steps.engine)
        try:
            measured = _measure(llm, steps, journal)
        finally:
            llm.llm_engine.engine_core.shutdown()
        found.append(f"{len(measured.facts)} ranks")
    return measured


def _measure(llm: LLM, steps: Steps, journal: Journal) -> Measured:
    from pat_vllm.doctor.speed.timing import Timing

    layouts: tuple[Layout | None, ...] = (None,)
    if "pat" in steps.engine.get("additional_config", {}):
        from pat_vllm.api import report

        layouts = report(llm).layouts
    names = itertools.count()
    times = []
    for layout in layouts:
        for requests in steps.requests:
            total = requests if layout is None or requests == 1 else requests * layout.replicas
            for _ in range(2):  # the first one warms up
                if layout is not None:
                    switch_to(llm, layout)
                gaps = _gaps(llm, steps.prompts[:total], names)
                journal.beat()
            timing = Timing.of(gaps)
            name = STOCK if layout is None else str(layout)
            ms = (1e3 * seconds for seconds in (timing.median, timing.low, timing.high))
            times.append(StepTime(name, requests, *ms))
    return Measured(tuple(times), tuple(llm.collective_rpc(FACTS_METHOD)))


def _gaps(
    llm: LLM, prompts: tuple[tuple[int, ...], ...], names: itertools.count[int]
) -> list[float]:
    """Seconds between the tokens of each request, all requests together."""
    from vllm import SamplingParams

    engine = llm.llm_engine
    params = SamplingParams(temperature=0.0, max_tokens=_TOKENS, ignore_eos=True, detokenize=False)
    for prompt in prompts:
        engine.add_request(str(next(names)), {"prompt_token_ids": list(prompt)}, params)
    came: dict[str, list[float]] = defaultdict(list)
    while engine.has_unfinished_requests():
        answered = engine.step()
        now = time.perf_counter()
        for one in answered:
            came[one.request_id].append(now)
    return [b - a for one in came.values() for a, b in pairwise(one[_UNSETTLED:])]


def main(request: str, answer: str, journal: str) -> None:
    """Files in, files out."""
    steps = STEPS.validate_json(Path(request).read_text())
    with Path(journal).open("a") as file:
        try:
            measured = measure(steps, Journal(file))
        except Ended:
            sys.exit(1)
    Path(answer).write_bytes(MEASURED.dump_json(measured))


if __name__ == "__main__":
    main(*sys.argv[1:])
