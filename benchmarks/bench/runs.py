"""A batch on one side: served in an engine's process, and cut out of its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.batch import Request, serve_batch
from benchmarks.simulator.traces import LengthTrace
from pat_vllm.layout import Layout
from pat_vllm.reporting import DecisionReport

PAT = "PAT"
"""Name of the adaptive side."""

_SPECIAL_TOKENS = 3
"""Ids below are no text in the random models."""


@dataclass(frozen=True)
class Run:
    """One batch on one side.

    Attributes:
        side: a static layout's name, or `PAT`.
        repeat: 0 is the first batch of a fresh engine.
        seconds: from the first submit to the last output.
        switches: that carried requests.
        stalled: seconds in which nothing ran for a switch.
        planning: seconds in which the policy planned.
        decisions: that switched.
        step_error: by layout: predicted steps, and their mean absolute relative error.
    """

    side: str
    workload: str
    repeat: int
    seconds: float
    tokens: int
    switches: int
    stalled: float
    planning: float
    decisions: tuple[DecisionReport, ...]
    step_error: Mapping[str, tuple[int, float]]


def requests_of(trace: LengthTrace, vocab: int, seed: int) -> tuple[Request, ...]:
    """Random prompts of a trace's sizes; requests of a group have the same."""

    def prompt(group: int, tokens: int) -> tuple[int, ...]:
        random = np.random.default_rng((seed, group))
        return tuple(int(token) for token in random.integers(_SPECIAL_TOKENS, vocab, size=tokens))

    return tuple(
        Request(prompt(group, tokens), length, arrival)
        for group, tokens, length, arrival in zip(
            trace.groups, trace.num_prompt_tokens, trace.lengths, trace.arrivals, strict=True
        )
    )


def serve(llm: Any, side: str, workload: str, repeat: int, requests: Sequence[Request]) -> Run:
    """In an engine's process, serve requests as they arrive, neither less nor more tokens than each
    wants; what the batch was is cut out of the engine's history."""
    from pat_vllm.api import report

    past = report(llm).predictor
    began, times, tokens = serve_batch(llm, requests, f"{workload}-{repeat}")
    assert tokens == [request.length for request in requests]
    after, ended = report(llm), max(times)
    switches = [s for s in after.switches if began <= s.at <= ended and s.reason != "idle"]
    now = after.predictor
    return Run(
        side=side,
        workload=workload,
        repeat=repeat,
        seconds=ended - began,
        tokens=sum(tokens),
        switches=len(switches),
        stalled=sum(switch.seconds - switch.quiesce for switch in switches),
        planning=now.planning - past.planning,
        decisions=tuple(d for d in now.decisions if d.fired and began <= d.at <= ended),
        step_error=_since(now.step_error, past.step_error),
    )


def _since(
    now: Mapping[Layout, tuple[int, float]], before: Mapping[Layout, tuple[int, float]]
) -> dict[str, tuple[int, float]]:
    """Counts and means since then, from cumulative ones."""
    since = {}
    for layout, (count, mean) in now.items():
        earlier, earlier_mean = before.get(layout, (0, 0.0))
        if count > earlier:
            mean = (count * mean - earlier * earlier_mean) / (count - earlier)
            since[str(layout)] = (count - earlier, mean)
    return since
