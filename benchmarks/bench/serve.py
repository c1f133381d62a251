"""A batch of the benchmark: served in an engine's process, and cut out of its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.batch import Request, serve_batch
from benchmarks.bench.runs import Run
from pat_vllm.cli import random_model
from pat_vllm.layout import Layout
from pat_vllm.reporting import PredictorReport, Report
from pat_vllm.simulator.traces import LengthTrace


@dataclass(frozen=True)
class Served:
    """A served batch: seconds on the monotonic clock, tokens by request, the engine's report."""

    began: float
    ended: tuple[float, ...]
    tokens: tuple[int, ...]
    report: Report


def serve(llm: Any, requests: Sequence[Request], name: str) -> Served:
    """Serve requests as they arrive, neither less nor more tokens than each wants."""
    from pat_vllm.api import report

    began, ended, tokens = serve_batch(llm, requests, name)
    return Served(began, tuple(ended), tuple(tokens), report(llm))


def requests_of(trace: LengthTrace, vocab: int, seed: int) -> tuple[Request, ...]:
    """Random prompts of a trace's sizes; requests of a group have the same."""
    first = min(len(random_model.SPECIAL_TOKENS), vocab - 1)

    def prompt(group: int, tokens: int) -> tuple[int, ...]:
        random = np.random.default_rng((seed, group))
        return tuple(int(token) for token in random.integers(first, vocab, size=tokens))

    return tuple(
        Request(prompt(group, tokens), length, arrival)
        for group, tokens, length, arrival in zip(
            trace.groups, trace.num_prompt_tokens, trace.lengths, trace.arrivals, strict=True
        )
    )


def run_of(
    side: str,
    trace: LengthTrace,
    repeat: int,
    served: Served,
    before: Report | None,
) -> Run:
    """What a batch was, cut out of the engine's history.

    Args:
        before: the engine's report after its last batch.
    """
    report = served.report
    began, seconds = served.began, max(served.ended) - served.began
    expected = began + max(trace.arrivals)

    def during(at: float) -> bool:
        return began <= at <= began + seconds

    switches = tuple(
        s for s in report.switches if during(s.at) and (s.reason != "idle" or s.at < expected)
    )
    samples = [s for s in report.timeline if during(s.at)]
    layouts = [samples[0].layout if samples else report.layout, *(s.target for s in switches)]
    starts = [0.0, *(s.at - began for s in switches)]
    arrivals = zip(served.ended, trace.arrivals, strict=True)
    steps = {}
    for layout, now in report.steps.items():
        earlier = before.steps.get(layout) if before else None
        count = now.steps - (earlier.steps if earlier else 0)
        total = now.seconds - (earlier.seconds if earlier else 0.0)
        if count:
            steps[layout] = (count, total / count)
    past = before.predictor if before else PredictorReport()
    return Run(
        side=side,
        workload=trace.name,
        repeat=repeat,
        began=began,
        seconds=seconds,
        tokens=sum(served.tokens),
        response=sum(end - began - arrival for end, arrival in arrivals) / len(trace),
        live=(*((s.at - began, s.num_seqs) for s in samples if s.num_seqs), (seconds, 0)),
        spans=tuple(zip(layouts, starts, [*starts[1:], seconds], strict=True)),
        switches=switches,
        decisions=tuple(d for d in report.predictor.decisions if during(d.at)),
        steps=steps,
        step_error=_since(report.predictor.step_error, past.step_error),
        plans=report.predictor.plans - past.plans,
        planning=report.predictor.planning - past.planning,
    )


def _since(
    now: Mapping[Layout, tuple[int, float]], before: Mapping[Layout, tuple[int, float]]
) -> dict[Layout, tuple[int, float]]:
    """Counts and means since then, from cumulative ones."""
    since = {}
    for layout, (count, mean) in now.items():
        earlier, earlier_mean = before.get(layout, (0, 0.0))
        if count > earlier:
            mean = (count * mean - earlier * earlier_mean) / (count - earlier)
            since[layout] = (count - earlier, mean)
    return since
