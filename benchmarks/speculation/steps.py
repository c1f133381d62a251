"""What steps take: after a change of the draft length, and where no drafts are made.

A step that verifies more tokens takes longer, so steps with different draft lengths are not
compared. Engines take the same steps of the same greedy batch, in turns.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping, Sequence
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

OFF_BAR = 1.01
_STEPS = 6
"""Steps between two changes."""
_WARM_UP = 2
"""Cycles, or steps of each request, that are not counted."""


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


def change(
    name: str, requests: int, cycles: int, repeats: int, length: int
) -> tuple[dict[str, Any], str]:
    """Changes of the draft length, in PAT and in stock vLLM. Both verify the same tokens.

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
    arguments = (take_changes, cycles, length)
    taken = _in_turns(
        {side: shared | sides[side] for side in sides}, name, requests, repeats, arguments
    )
    return _shown(name, requests, length, taken)


def off(
    name: str, requests: int, steps: int, repeats: int, length: int
) -> tuple[dict[str, Any], str]:
    """A draft length of 0, against engines without speculation: PAT's and vLLM's own.

    What two equal engines differ by is shown by these two.

    Args:
        steps: of a batch.
        repeats: batches of each engine.
    """
    shared = flags(name)
    sides = {
        "0 drafts": shared | ngram(length) | pat(RANKS),
        "none": shared | pat(RANKS),
        "stock": shared | stock(RANKS),
    }
    taken = _in_turns(sides, name, requests, repeats, (take_plain_steps, steps))
    medians = {
        side: [statistics.median(one.seconds for one in batch) for batch in taken[side]]
        for side in sides
    }
    rows = []
    body: dict[str, Any] = {"median_steps": medians, "bar": OFF_BAR}
    for ours, theirs, bar in (
        ("0 drafts", "none", OFF_BAR),
        ("0 drafts", "stock", None),
        ("none", "stock", None),
    ):
        ratio = MedianRatio.of(medians[ours], medians[theirs])
        body[f"{ours} / {theirs}"] = ratio
        milliseconds = [f"{1e3 * statistics.median(medians[side]):.2f}" for side in (ours, theirs)]
        verdict = [bar, ratio.verdict(bar)] if bar else ["-", ""]
        rows.append([f"{ours} / {theirs}", *milliseconds, ratio.show(), *verdict])
    text = (
        f"Model {name}, {requests} live requests, greedy, tp{RANKS}dp1, a draft length of 0 where "
        f"up to {length} could be used, against engines without speculation: the median of a "
        f"batch's {steps} decode steps. The engines take turns, {repeats} batches each. The ratio "
        "is the median of those of equal batches, with its 95% interval.\n\n"
        + table(["", "ours, ms", "theirs, ms", "ratio", "bar", ""], rows)
    )
    return body, text


def _in_turns(
    sides: Mapping[str, Mapping[str, Any]],
    name: str,
    requests: int,
    repeats: int,
    call: tuple[Any, ...],
) -> dict[str, list[list[Step]]]:
    """What each side's engine took for each batch; `call` is a function and its other arguments."""
    taken: dict[str, list[list[Step]]] = {side: [] for side in sides}
    function, *arguments = call
    with ExitStack() as stack:
        running = {}
        for side, options in sides.items():
            running[side] = stack.enter_context(Engine(options, BIND, core_inside=True))
            running[side].wait_until_ready()
            # One after the other, or they would measure themselves while others start.
            running[side].pause()
        for repeat, order in enumerate(turns(list(sides), repeats)):
            prompts = repeating_prompts(name, requests, seed=repeat)
            for side in order:
                with turn([running[side]]):
                    taken[side].append(running[side].call(function, prompts, *arguments))
    return taken


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


def take_plain_steps(llm: Any, prompts: Sequence[Any], steps: int) -> list[Step]:
    """Steps of a batch that decodes without drafts."""
    from vllm.v1.engine.core import EngineCore

    import pat_vllm

    core: EngineCore = llm.llm_engine.engine_core.engine_core
    if core.vllm_config.speculative_config is not None:
        pat_vllm.speculate(llm, 0)
    live = Live(llm, prompts)
    live.take(_WARM_UP)
    found = []
    for position in range(steps):
        begun = time.perf_counter()
        llm.llm_engine.step()
        found.append(Step(0, position, len(prompts), time.perf_counter() - begun))
    live.abort()
    return found


def _change(llm: Any, scheduler: Any, length: int) -> None:
    """Have the next steps use a draft length; vLLM itself has no call for it."""
    if hasattr(scheduler, "replica_set"):
        import pat_vllm

        pat_vllm.speculate(llm, length)
    else:
        scheduler.dynamic_sd_lookup = [length] * len(scheduler.dynamic_sd_lookup)
