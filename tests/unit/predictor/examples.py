"""Requests, switches, profiles and batches that tests of the predictor share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from benchmarks.simulator import shapes
from benchmarks.simulator.traces import LengthTrace
from pat_vllm.layout import Layout
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.length_model import LengthModel
from pat_vllm.predictor.state import LiveRequests
from pat_vllm.profile import Profile, StepSample, StepShape, SwitchSample
from pat_vllm.reporting import SwitchReport

REPLICAS, GROUP = Layout(1, 2), Layout(2, 1)
BOUND = 384
"""The longest response in `batches`, tokens."""


def live_requests(
    prompts: Sequence[int],
    outputs: ArrayLike = 0,
    max_tokens: ArrayLike = 1000,
    exact: ArrayLike = False,
    steps: int = 0,
) -> LiveRequests:
    """Requests whose contexts are computed, of replicas that made so many steps."""
    count = len(prompts)
    context = np.array(prompts, np.int64)
    generated = np.broadcast_to(np.array(outputs, np.int64), count)
    return LiveRequests(
        num_prompt_tokens=context,
        num_output_tokens=generated,
        max_tokens=np.broadcast_to(np.array(max_tokens, np.int64), count),
        exact=np.broadcast_to(np.array(exact, np.bool_), count),
        group=np.arange(count),
        number=np.arange(count),
        replica_steps=np.full(count, steps),
        num_computed_tokens=context + generated,
    )


def some_lengths() -> LengthModel:
    """A model that has learnt from one batch of 32 responses."""
    model = LengthModel(1000)
    for length in range(1, 33):
        model.finished(10 * length, True)
    model.end_of_batch()
    return model


def switch_report(source: Layout, target: Layout, **values: Any) -> SwitchReport:
    """A switch by the policy, of which everything else that is not given took no time."""
    zeros: dict[str, Any] = dict.fromkeys(SwitchReport.__dataclass_fields__, 0)
    return SwitchReport(**zeros | {"source": source, "target": target, "reason": "policy"} | values)


def switch_sample(
    source: Layout, target: Layout, num_seqs: int, tokens: int, seconds: float, **parts: Any
) -> SwitchSample:
    """A measured switch, of which the parts that are not given took no time."""
    fields = {"kv_bytes": 0, "kv": 0.0, "weights": 0.0} | parts
    return SwitchSample(
        source=source, target=target, num_seqs=num_seqs, tokens=tokens, seconds=seconds, **fields
    )


def decode(batch: int, each: int = 512, busy: int = 1) -> StepShape:
    """A decode step of `batch` requests of equal contexts."""
    return StepShape(batch, batch * each, each, 0, busy)


def profile_of(
    layouts: Sequence[Layout],
    steps: Iterable[StepSample],
    switches: Iterable[SwitchSample] = (),
    **values: Any,
) -> Profile:
    """A profile of an engine of these layouts."""
    tps = [layout.tp for layout in layouts]
    fields: dict[str, Any] = {
        "kind": "modelled",
        "title": "",
        "created": "2026-01-01",
        "key": {},
        "ranks": layouts[0].world_size,
        "layouts": tuple(layouts),
        "max_num_seqs": {tp: 128 * tp for tp in tps},
        "max_batch_tokens": {tp: 8192 * tp for tp in tps},
        "kv_tokens": {tp: 10**6 * tp for tp in tps},
        "kv_bytes_per_token": 20_000,
        "steps": tuple(steps),
        "switches": tuple(switches),
    }
    return Profile(**fields | values)


def step_seconds(shape: StepShape, tp: int) -> float:
    """Reading weights, which a group divides, and work per request, which it does not."""
    return 0.004 + 0.030 / tp**0.9 + 0.0024 * shape.batch + 1e-7 * shape.context / tp


def two_ranks(slower: dict[int, float] | None = None) -> Profile:
    """A profile of two ranks; `slower` scales its step times by tp."""
    steps = [
        StepSample.of(
            layout, shape, [share * seconds for share in (0.85, 1, 1, 1, 1.3)]
        ).model_copy(update={"times": ()})
        for layout in (REPLICAS, GROUP)
        for busy in range(1, layout.replicas + 1)
        for batch in (1, 2, 4, 8, 16, 32, 64, 128)
        for each in (64, 256)
        for shape in [decode(batch, each, busy)]
        for seconds in [(slower or {}).get(layout.tp, 1) * step_seconds(shape, layout.tp)]
    ]
    switches = [
        switch_sample(
            *(source, target, live, 100 * live),
            seconds=0.008 + 0.0006 * live,
            kv_bytes=live << 21,
            kv=0.0005 * live,
        )
        for source, target in permutations((REPLICAS, GROUP))
        for live in (0, 1, 8, 32)
    ]
    return profile_of((REPLICAS, GROUP), steps, switches)


def long_tail(seed: int) -> LengthTrace:
    """The paper's lengths, 64 times shorter."""
    trace = shapes.deepscaler(128, 64 * BOUND, seed)
    lengths = tuple(max(1, round(length / 64)) for length in trace.lengths)
    return replace(trace, lengths=lengths, max_tokens=BOUND, num_prompt_tokens=(20,) * 128)


WORKLOADS = {
    "long tail": long_tail,
    "two modes": lambda seed: shapes.two_mode(128, 24, 0.5, 0.04, BOUND, seed),
    "short": lambda seed: shapes.uniform(128, 24, 48, BOUND, seed),
    "long": lambda seed: shapes.uniform(24, 150, 200, BOUND, seed),
    "straggler": lambda seed: shapes.straggler(32, 40, 320, BOUND, seed),
}


def batches(name: str) -> list[LengthTrace]:
    """Three batches of a workload."""
    return [WORKLOADS[name](seed) for seed in range(3)]


def policy_of(profile: Profile, bound: int = BOUND, **options: Any) -> AdaptivePolicy:
    """A policy whose own work takes no time, so that runs are reproducible."""
    return AdaptivePolicy(profile, bound=bound, timer=lambda: 0.0, **options)
