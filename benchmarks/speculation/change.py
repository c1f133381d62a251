"""What a change of the draft length costs: step by step, against the same change in stock vLLM.

A step that verifies more tokens takes longer, so steps with different draft lengths are not
compared. Both engines change at the same steps of the same greedy batch. Their steps verify the
same tokens, which is checked.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from benchmarks.common import Engine, table
from benchmarks.speculation.engines import (
    BIND,
    RANKS,
    SEQS_PER_RANK,
    flags,
    ngram,
    pat,
    repeating_prompts,
    stock,
    turn,
)
from benchmarks.speculation.paired import MedianRatio, turns
from benchmarks.speculation.switches import Live

_STEPS = 6
"""Steps between two changes."""
_WARM_UP = 2
"""Cycles of a batch that are not counted."""


@dataclass(frozen=True)
class Step:
    """A step of an engine.

    Attributes:
        length: the draft length that held when it began.
        position: steps since that began to hold.
        tokens: that the step computed.
    """

    length: int
    position: int
    tokens: int
    seconds: float


def measure(
    name: str, requests: int, cycles: int, repeats: int, length: int
) -> tuple[dict[str, Any], str]:
    """PAT against stock vLLM, in turns.

    Args:
        cycles: changes there and back of a batch.
        repeats: batches of each engine.
    """
    # vLLM keeps a length ready that its own schedule names.
    speculative = ngram(length)["speculative_config"] | {
        "num_speculative_tokens_per_batch_size": [(1, 1, 0), (2, 2 * SEQS_PER_RANK, length)]
    }
    shared = flags(name) | {"speculative_config": speculative}
    sides = {"PAT": pat(RANKS), "stock": stock(RANKS)}
    taken: dict[str, list[list[Step]]] = {side: [] for side in sides}
    with ExitStack() as stack:
        running = {
            side: stack.enter_context(Engine(shared | options, BIND, core_inside=True))
            for side, options in sides.items()
        }
        for engine in running.values():
            engine.wait_until_ready()
            engine.pause()
        for repeat, order in enumerate(turns(list(sides), repeats)):
            prompts = repeating_prompts(name, requests, seed=repeat)
            for side in order:
                with turn([running[side]]):
                    steps: list[Step] = running[side].call(take_changes, prompts, cycles, length)
                taken[side].append(steps)
    return _shown(name, requests, length, taken)


def _shown(
    name: str, requests: int, length: int, taken: dict[str, list[list[Step]]]
) -> tuple[dict[str, Any], str]:
    sides = [[step for batch in taken[side] for step in batch] for side in ("PAT", "stock")]
    ours, theirs = ([(one.length, one.position, one.tokens) for one in side] for side in sides)
    assert ours == theirs, "the engines did not verify the same tokens"

    rows = []
    for held, position in sorted({(one.length, one.position) for one in sides[0]}):
        of_ours, of_theirs = (
            [one for one in side if (one.length, one.position) == (held, position)]
            for side in sides
        )
        ratio = MedianRatio.of([s.seconds for s in of_ours], [s.seconds for s in of_theirs])
        rows.append(
            [
                held,
                position + 1,
                f"{statistics.mean(one.tokens for one in of_ours):.1f}",
                *(_median_ms(of) for of in (of_ours, of_theirs)),
                ratio.show(),
            ]
        )
    whole = MedianRatio.of(
        [sum(step.seconds for step in batch) for batch in taken["PAT"]],
        [sum(step.seconds for step in batch) for batch in taken["stock"]],
    )
    text = (
        f"Model {name}, {requests} live requests, greedy, tp{RANKS}dp1: the draft length goes from "
        f"{length} to 0 and back every {_STEPS} steps. {len(taken['PAT'])} batches of each engine, "
        "in turns; in each step both verify the same tokens.\n\n"
        + table(["draft length", "step", "tokens", "PAT, ms", "stock, ms", "PAT / stock"], rows)
        + f"\nWhole batches, PAT / stock: {whole.show()}.\n"
    )
    return {"steps": taken, "ratio": whole}, text


def _median_ms(steps: Sequence[Step]) -> str:
    return f"{1e3 * statistics.median(one.seconds for one in steps):.1f}"


# -------------------------------------------------------------------- in the engine's process


def take_changes(llm: Any, prompts: Sequence[Any], cycles: int, length: int) -> list[Step]:
    """Steps of a batch between changes of the draft length, there and back."""
    scheduler = llm.llm_engine.engine_core.engine_core.scheduler
    computed: list[int] = []
    schedule = scheduler.schedule

    def noting(*args: Any, **options: Any) -> Any:
        step = schedule(*args, **options)
        computed.append(step.total_num_scheduled_tokens)
        return step

    live = Live(llm, prompts)
    scheduler.schedule = noting
    found = []
    try:
        for cycle in range(_WARM_UP + cycles):
            for held in (length, 0):
                _change(llm, scheduler, held)
                for position in range(_STEPS):
                    computed.clear()
                    begun = time.perf_counter()
                    llm.llm_engine.step()
                    seconds = time.perf_counter() - begun
                    if cycle >= _WARM_UP:
                        found.append(Step(held, position, sum(computed), seconds))
    finally:
        scheduler.schedule = schedule
    live.abort()
    return found


def _change(llm: Any, scheduler: Any, length: int) -> None:
    """Have the next steps use a draft length; vLLM itself has no call for it."""
    if hasattr(scheduler, "replica_set"):
        import pat_vllm

        pat_vllm.speculate(llm, length)
    else:
        scheduler.dynamic_sd_lookup = [length] * len(scheduler.dynamic_sd_lookup)
