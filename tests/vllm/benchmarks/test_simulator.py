"""A simulated replica against vLLM's own scheduler, where KV is short: steps, preemptions, and the
tokens that are computed again."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

from benchmarks.simulator import shapes
from benchmarks.simulator.replica import SimulatedReplica, SimulatedRequests
from benchmarks.simulator.traces import LengthTrace
from tests.support.models import random_model
from tests.unit.benchmarks.simulator.simple import capacity_of
from tests.vllm.without_workers import BLOCK_SIZE as BLOCK
from tests.vllm.without_workers import request_of, scheduler_arguments

COUNT, PROMPT, BUDGET, LONGEST = 48, 64, 512, 1000
TRACES = {
    "deepscaler": shapes.deepscaler(COUNT, LONGEST),
    "uniform": shapes.uniform(COUNT, 1, LONGEST),
}


@pytest.mark.parametrize("blocks", [400, 800])
@pytest.mark.parametrize("shape", TRACES)
def test_as_vllm_schedules(shape: str, blocks: int) -> None:
    trace = replace(TRACES[shape], num_prompt_tokens=(PROMPT,) * COUNT)
    steps, prefilled, preempted = of_vllm(trace, blocks)
    simulated = of_replica(trace, blocks)
    assert preempted > 10, "the case is no test"
    assert simulated[0] == pytest.approx(steps, rel=0.03)
    assert simulated[1] == pytest.approx(prefilled, rel=0.08)
    assert simulated[2] == pytest.approx(preempted, rel=0.1, abs=3)


def of_replica(trace: LengthTrace, blocks: int) -> tuple[int, int, int]:
    profile = capacity_of(COUNT, BUDGET, {1: (blocks - 1) * BLOCK})
    requests, steps = SimulatedRequests(trace, 0.0), 0
    replica = SimulatedReplica(0, requests, profile, 1)
    replica.waiting.extend(range(COUNT))
    while replica.num_seqs:
        replica.schedule()
        steps += 1
        replica.finish()
    return steps, requests.prefilled, requests.preempted


def of_vllm(trace: LengthTrace, blocks: int) -> tuple[int, int, int]:
    scheduler, draw = scheduler_of(COUNT, blocks), random.Random(0)
    requests = [
        request_of(str(i), [draw.randrange(3, 300) for _ in range(PROMPT)], length)
        for i, length in enumerate(trace.lengths)
    ]
    for request in requests:
        scheduler.add_request(request)
    steps = computed = 0
    while scheduler.has_unfinished_requests():
        step = scheduler.schedule()
        steps += 1
        computed += step.total_num_scheduled_tokens
        names = list(step.num_scheduled_tokens)
        running = [requests[int(name)] for name in names]
        whole = [request.num_computed_tokens >= request.num_tokens for request in running]
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=[[draw.randrange(3, 300)] if is_whole else [] for is_whole in whole],
        )
        scheduler.update_from_output(step, output)
    preempted = sum(request.num_preemptions for request in requests)
    return steps, computed - sum(trace.lengths) + len(trace), preempted


def scheduler_of(max_num_seqs: int, blocks: int) -> Any:
    config = EngineArgs(
        model=str(random_model("qwen3")),
        max_model_len=2048,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=BUDGET,
        enforce_eager=True,
        async_scheduling=False,
    ).create_engine_config()
    init_none_hash(sha256)
    return Scheduler(vllm_config=config, **scheduler_arguments(config, blocks))
