"""Requests with a drafter that are preempted for their KV, with switches in between.

What is preempted is computed again, by the drafter, too.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from vllm.v1.core.sched.scheduler import Scheduler

import pat_vllm
from pat_vllm.scheduler.replica import Replica
from tests.engine.specs import V2_MTP, V2_SELF_DRAFTS
from tests.engine.test_drafters import GREEDY, without_drafts
from tests.support.engines import Job, run
from tests.support.models import phrase
from tests.support.pool import EngineSpec, go_home
from tests.support.same import PLAIN_TOLERANCE, assert_same

REQUESTS, TOKENS = 14, 100
SMALL_SELF_DRAFTS, SMALL_MTP = (
    replace(
        spec,
        name=f"{spec.name}, small KV",
        options={**spec.options, "kv_cache_memory_bytes": 20 * of_block},
    )
    for spec, of_block in ((V2_SELF_DRAFTS, 192 << 10), (V2_MTP, 64 << 10))
)
"""Pools of 20 blocks."""
pytestmark = pytest.mark.engine(SMALL_SELF_DRAFTS, SMALL_MTP)


class Seen:
    """What steps have shown, by request.

    Attributes:
        preempted: how often it was, having generated something.
        drafted_since: drafts of it that were verified after the first time.
        refused: drafts of it.
    """

    def __init__(self) -> None:
        self.preempted: Counter[str] = Counter()
        self.drafted_since: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()


@contextmanager
def watched() -> Iterator[Seen]:
    """Inside, preemptions and drafts are counted."""
    seen, finish, preempt = Seen(), Replica.finish, Scheduler._preempt_request

    def finishing(replica: Replica, output: Any, *args: Any) -> Any:
        for name, tokens in replica.in_flight[0].scheduled_spec_decode_tokens.items():
            sampled = output.sampled_token_ids[output.req_id_to_index[name]]
            seen.drafted_since[name] += len(tokens) if seen.preempted[name] else 0
            # What was in flight when a request was preempted counts for nothing.
            seen.refused[name] += max(0, len(tokens) - (len(sampled) - 1)) if sampled else 0
        return finish(replica, output, *args)

    def preempting(scheduler: Scheduler, request: Any, *args: Any, **options: Any) -> None:
        seen.preempted[request.request_id] += bool(request.num_output_tokens)
        preempt(scheduler, request, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replica, "finish", finishing)
        patch.setattr(Scheduler, "_preempt_request", preempting)
        yield seen


def test_text_is_that_without_drafts(llm: Any, spec: EngineSpec) -> None:
    """And all that a model drafts for itself is accepted."""
    rng, jobs = random.Random(6), {}
    for i in range(REQUESTS):
        prompt = [rng.randrange(3, 400) for _ in range(rng.randint(30, 60))]
        jobs[f"r{i}"] = Job(prompt + phrase("repeating", 8, i), GREEDY | {"max_tokens": TOKENS})
    sizes = {12: 2, 24: 1, 36: 2, 48: 1}

    def before_step(step: int) -> None:
        if step in sizes:
            assert pat_vllm.switch(llm, tp=sizes[step])

    go_home(llm)
    began = len(pat_vllm.report(llm).switches)
    with watched() as seen:
        outcomes = run(llm, jobs, before_step)
    assert_same(outcomes, without_drafts(spec.model, jobs), PLAIN_TOLERANCE)
    switches = pat_vllm.report(llm).switches[began:]
    assert sum(bool(switch.migrated) for switch in switches) >= 3, switches
    # Some have no step left after it that verifies drafts.
    again = [name for name, times in seen.preempted.items() if times and seen.drafted_since[name]]
    assert len(again) >= 3, (seen.preempted, seen.drafted_since)
    assert any(seen.refused.values()) == (spec is not SMALL_SELF_DRAFTS), seen.refused
