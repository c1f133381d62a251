"""Replays traces of response lengths under a policy, asked as the engine asks it. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace

from benchmarks.simulator.engine import SimulatedEngine, SimulatedReport
from benchmarks.simulator.ground_truth import GroundTruth
from benchmarks.simulator.traces import LengthTrace
from pat_vllm.policy_config import IDLE_SECONDS
from pat_vllm.predictor.policy import Policy
from pat_vllm.profile import Profile

TRAINING_SECONDS = 60.0
"""Between two batches."""


def simulate(
    trace: LengthTrace, policy: Policy, truth: GroundTruth, profile: Profile, began: float = 0.0
) -> SimulatedReport:
    """Replay one trace.

    A batch is over when no request came for `IDLE_SECONDS`, as in an engine, which then returns to
    its policy's default layout before the next one; and at the end of the trace.

    Args:
        policy: its layouts are the engine's; it may have seen earlier runs.
        truth: what steps and switches take.
        profile: of the engine, whose limits and memory its replicas have.
        began: time of the trace's beginning; must not lie before the end of an earlier run.

    Raises:
        ValueError: a request does not fit into a replica's memory.
    """
    engine = SimulatedEngine(trace, truth, profile, policy, began)
    idle_since = math.inf
    while engine.num_seqs or engine.arriving:
        if not engine.num_seqs:
            if engine.next_arrival - idle_since >= IDLE_SECONDS:
                engine.now = engine.next_arrival
                _end_batch(engine, policy)
            if not engine.num_seqs:
                engine.advance()  # to the next arrival
        target = policy.choose(engine.state())
        if target != engine.layout:
            engine.switch(target, "policy")
        if engine.num_seqs:
            engine.advance()
        if not engine.num_seqs:
            policy.idle(engine.now)
            idle_since = engine.now
    _end_batch(engine, policy)
    return engine.report()


def _end_batch(engine: SimulatedEngine, policy: Policy) -> None:
    """The batch is over: the engine returns to its policy's default layout."""
    policy.batch_over(engine.now)
    if policy.default_layout != engine.layout:
        engine.switch(policy.default_layout, "idle")


def simulate_batches(
    traces: Iterable[LengthTrace], policy: Policy, truth: GroundTruth, profile: Profile
) -> list[SimulatedReport]:
    """Replay traces one after another with the same policy, `TRAINING_SECONDS` apart.

    Their prompts are taken for different ones, whatever their groups are called.
    """
    runs: list[SimulatedReport] = []
    first = 0
    for trace in traces:
        groups = tuple(first + group for group in trace.groups)
        first = max(groups) + 1
        began = runs[-1].back + TRAINING_SECONDS if runs else 0.0
        runs.append(simulate(replace(trace, groups=groups), policy, truth, profile, began))
    return runs
