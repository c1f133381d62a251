"""What drafts in flight do to a switch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import Engine, Summary, table
from benchmarks.speculation.engines import BIND, flags, ngram, pat, repeating_prompts
from benchmarks.speculation.paired import MedianRatio, neighbours

BAR = 1.05
_STEPS_BETWEEN = 4
"""Before a switch: steps of each request, so that the drafts of the last one are in flight."""


@dataclass(frozen=True)
class Switches:
    """Switches there and back, in turns with drafts and without.

    Attributes:
        with_drafts: whether each had drafts in flight.
        reports: of `pat_vllm.report`, as dictionaries.
        drafted: draft tokens that steps with drafts verified, as a share of the most that they
            could. In the first step after a switch there is none.
        accepted: share of these.
    """

    with_drafts: tuple[bool, ...]
    reports: tuple[dict[str, Any], ...]
    drafted: float
    accepted: float


def measure(name: str, requests: int, switches: int, length: int) -> tuple[dict[str, Any], str]:
    """Switches of one engine.

    Args:
        switches: there and back, with drafts and as many without.
    """
    options = (
        flags(name)
        | ngram(length)
        | pat(1, kv_transfer="migrate")  # always the same way, whatever is cheaper
    )
    with Engine(options, BIND) as engine:
        engine.wait_until_ready()
        prompts = repeating_prompts(name, requests, seed=0)
        engine.call(take_switches, prompts, 2, length)  # warm-up
        taken: Switches = engine.call(take_switches, prompts, switches, length)
    body: dict[str, Any] = {"switches": taken, "bar": BAR}
    text = (
        f"Model {name}, {requests} live requests, in turns with a draft length of {length} and of "
        f"0; {switches} switches there and back of each; ms, median (low-high). The stall is the "
        "switch without `quiesce`, which finishes the step in flight. The ratio is the median of "
        f"those of neighbours, with its 95% interval. Steps verified {taken.drafted:.0%} of the "
        f"draft tokens for which there was room, and accepted {taken.accepted:.0%} of them. A "
        f"switch drops those in flight; it comes every {_STEPS_BETWEEN} steps.\n\n"
    )
    return body, text + _switch_table(taken, body)


def _switch_table(taken: Switches, body: dict[str, Any]) -> str:
    quantities = {
        "stall": [one["seconds"] - one["quiesce"] for one in taken.reports],
        "whole": [one["seconds"] for one in taken.reports],
        "quiesce": [one["quiesce"] for one in taken.reports],
        "first step": [one["first_step"] for one in taken.reports],
    }
    ways = [f"{one['source']} -> {one['target']}" for one in taken.reports]
    rows = []
    for quantity, values in quantities.items():
        for way in sorted(set(ways)):
            at = [index for index, one in enumerate(ways) if one == way]
            ours, theirs = neighbours(
                [way] * len(at), [values[i] for i in at], [taken.with_drafts[i] for i in at]
            )
            ratio = MedianRatio.of(ours, theirs)
            body[f"{quantity} {way}"] = ratio
            bar = BAR if quantity == "stall" else None
            rows.append(
                [
                    quantity,
                    way,
                    Summary.of(ours).show(1e3),
                    Summary.of(theirs).show(1e3),
                    ratio.show(),
                    bar or "-",
                    ratio.verdict(bar) if bar else "",
                ]
            )
    return table(["", "switch", "with drafts", "without", "ratio", "bar", ""], rows)


# -------------------------------------------------------------------- in the engine's process


class Live:
    """A batch that an engine decodes, taken step by step."""

    def __init__(self, llm: Any, prompts: Sequence[Any]) -> None:
        """Begin, and take outputs until all requests decode."""
        from vllm import SamplingParams

        from benchmarks.speculation.engines import MAX_MODEL_LEN

        self._engine = llm.llm_engine
        params = SamplingParams(
            temperature=0.0, max_tokens=MAX_MODEL_LEN, ignore_eos=True, detokenize=False
        )
        self._steps: dict[str, int] = {}
        for index, prompt in enumerate(prompts):
            request_id = f"{time.monotonic()}-{index}"
            self._engine.add_request(request_id, prompt, params)
            self._steps[request_id] = 0
        self.ids = list(self._steps)

    def take(self, steps: int) -> None:
        """Take outputs of that many further steps of each request."""
        target = {one: done + steps for one, done in self._steps.items()}
        while any(self._steps[one] < target[one] for one in self.ids):
            for output in self._engine.step():
                assert not output.finished, "the context is too short for so many steps"
                self._steps[output.request_id] += 1

    def abort(self) -> None:
        """End all requests."""
        self._engine.abort_request(self.ids)
        while self._engine.has_unfinished_requests():
            self._engine.step()


def take_switches(llm: Any, prompts: Sequence[Any], there_and_back: int, length: int) -> Switches:
    """Switch there and back with drafts in flight, and as often without, one after the other."""
    import pat_vllm

    began = time.monotonic()
    live = Live(llm, prompts)
    live.take(2)
    with_drafts = []
    for turn in range(2 * there_and_back):
        drafts = turn % 4 in (0, 3)
        pat_vllm.speculate(llm, length if drafts else 0)
        for tp in (2, 1):
            live.take(_STEPS_BETWEEN)
            assert pat_vllm.switch(llm, tp)
            with_drafts.append(drafts)
    live.take(_STEPS_BETWEEN)
    report = pat_vllm.report(llm, since=began)
    live.abort()
    with_length = [one for one in report.drafts if one.num_speculative_tokens]
    most = sum(one.steps * length * len(prompts) / one.layout.replicas for one in with_length)
    drafted = sum(one.drafted for one in with_length)
    accepted = sum(one.accepted for one in with_length)
    assert accepted, "no draft was accepted"
    reports = [
        vars(one) | {"source": str(one.source), "target": str(one.target)}
        for one in report.switches
        if one.reason == "forced"
    ]
    assert len(reports) == len(with_drafts)
    return Switches(tuple(with_drafts), tuple(reports), drafted / most, accepted / drafted)
