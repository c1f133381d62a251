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
from tests.engine.specs import EAGLE3, MTP, MTP_LINEAR, MTP_MAMBA, SELF_DRAFTS
from tests.engine.v2.test_drafters import GREEDY, without_drafts
from tests.support.engines import Job, run, scheduler_of
from tests.support.models import phrase
from tests.support.pool import EngineSpec, go_home
from tests.support.same import PLAIN_TOLERANCE, assert_same

REQUESTS, TOKENS = 14, 100
KV_BYTES = {SELF_DRAFTS: 20 * 192 << 10}
SMALL = {
    replace(spec, name=f"{spec.name}, small KV", options=spec.options | {"kv_cache_memory_bytes": b}): spec
    for spec, b in KV_BYTES.items()
}
pytestmark = pytest.mark.engine(*SMALL)


class Preempted:
    """What has become of requests that were preempted.

    Attributes:
        times: how often each was preempted.
        drafted, accepted: of their drafts since.
        others: of those of others.
    """

    def __init__(self) -> None:
        self.times: Counter[str] = Counter()
        self.drafted: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()


@contextmanager
def watched() -> Iterator[Preempted]:
    """Inside, preemptions and drafts are counted, by request."""
    seen, finish, preempt = Preempted(), Replica.finish, Scheduler._preempt_request

    def finishing(replica: Replica, output: Any, *args: Any) -> Any:
        for name, tokens in replica.in_flight[0].scheduled_spec_decode_tokens.items():
            sampled = output.sampled_token_ids[output.req_id_to_index[name]]
            if seen.times[name]:
                seen.drafted[name] += len(tokens)
            seen.refused[name] += len(tokens) - (len(sampled) - 1)
        return finish(replica, output, *args)

    def preempting(scheduler: Scheduler, request: Any, *args: Any, **options: Any) -> None:
        if request.num_output_tokens:
            seen.times[request.request_id] += 1
        preempt(scheduler, request, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Replica, "finish", finishing)
        patch.setattr(Scheduler, "_preempt_request", preempting)
        yield seen


def test_text_is_that_without_drafts(llm: Any, spec: EngineSpec) -> None:
    """All that a model drafts for itself is accepted, also of what was preempted."""
    go_home(llm)
    rng = random.Random(6)
    jobs = {}
    for i in range(REQUESTS):
        prompt = [rng.randrange(3, 400) for _ in range(rng.randint(30, 60))]
        jobs[f"r{i}"] = Job(prompt + phrase("repeating", 8, i), GREEDY | {"max_tokens": TOKENS})
    sizes = {12: 2, 24: 1, 36: 2, 48: 1, 60: 2}

    def before_step(step: int) -> None:
        if step == 0:
            pools = [r.scheduler.kv_cache_manager.block_pool.num_gpu_blocks for r in scheduler_of(llm).replica_set.replicas]
            print("POOLS", pools)
        if step in sizes:
            assert pat_vllm.switch(llm, tp=sizes[step])
            print("SWITCH", step, dict(seen.times))

    began = len(pat_vllm.report(llm).switches)
    with watched() as seen:
        outcomes = run(llm, jobs, before_step)
    print(seen.times, seen.drafted, seen.refused, [ (s.num_seqs, s.migrated, s.recomputed) for s in pat_vllm.report(llm).switches[began:]])
    assert_same(outcomes, without_drafts(spec.model, jobs), PLAIN_TOLERANCE)
    assert len(seen.times) >= 3
