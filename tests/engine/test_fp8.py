"""fp8 weights and activations, in which layouts round differently: each is what stock vLLM has at
its tp.

With activations in 32 bits, in which they do not, an engine is in `test_switch.py` and in
`test_weight_updates.py`.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest

import pat_vllm
from tests.engine.specs import FP8_CHANNELS, FP8_ONLINE
from tests.engine.test_switch import at_steps, batch
from tests.support.engines import Job, Outcome, run, teacher_forced
from tests.support.pool import EngineSpec, go_home
from tests.support.stock import stock_answers

pytestmark = pytest.mark.engine(FP8_ONLINE, FP8_CHANNELS)


def alone(llm: Any, jobs: Mapping[str, Job]) -> dict[str, Outcome]:
    """One request after the other: what a kernel rounds depends on the others of its batch."""
    return {
        name: outcome for name in jobs for name, outcome in run(llm, {name: jobs[name]}).items()
    }


def greedy() -> dict[str, Job]:
    jobs = {}
    for name, job in batch(requests=4, longest=24).items():
        sampling = {**job.sampling, "temperature": 0.0}
        sampling.pop("seed", None)
        jobs[name] = Job(job.prompt[:60], sampling)
    return jobs


def test_each_layout_is_stock_vllm_at_its_tp(llm: Any, spec: EngineSpec) -> None:
    """To the last bit, after a walk over all layouts."""
    sizes, rng = [layout.tp for layout in pat_vllm.report(llm).layouts], random.Random(2)
    for tp in [*sizes, *rng.choices(sizes, k=4), *sizes[::-1]]:
        go_home(llm)
        assert pat_vllm.switch(llm, tp=tp)
    for tp in sizes:
        go_home(llm)
        expected = stock_answers(spec.model, greedy(), ranks=tp, how=alone, **spec.options)

        def in_layout(step: int, tp: int = tp) -> None:
            at_steps(llm, {0: tp})(step)

        for name, job in greedy().items():
            (outcome,) = run(llm, {name: job}, before_step=in_layout).values()
            assert outcome.token_ids == expected[name].token_ids, (tp, name)
            assert outcome.logprobs == expected[name].logprobs, (tp, name)
            go_home(llm)


def test_requests_in_flight_go_on_as_near_as_layouts_are(llm: Any) -> None:
    """A token after a switch is as probable as the target finds it, but for what the layouts
    differ in: its KV is partly the source's."""
    sizes = [layout.tp for layout in pat_vllm.report(llm).layouts]
    for source, target in [(s, t) for s in sizes for t in sizes if s != t]:
        jobs = greedy()
        outcomes = run(llm, jobs, before_step=at_steps(llm, {0: source, 8: target}))
        go_home(llm)
        assert pat_vllm.switch(llm, tp=target)
        sequences = {n: (jobs[n].prompt, o.token_ids) for n, o in outcomes.items()}
        scores = teacher_forced(llm, sequences)
        apart = {
            name: [abs(a - b) for a, b in zip(outcome.logprobs, scores[name], strict=True)]
            for name, outcome in outcomes.items()
        }
        before = max(value for values in apart.values() for value in values[:7])
        after = max(value for values in apart.values() for value in values[9:])
        print(f"tp={source} to tp={target}: {before:.3f} apart before, {after:.3f} after")
        assert after <= max(2 * before, 0.05)
        go_home(llm)
