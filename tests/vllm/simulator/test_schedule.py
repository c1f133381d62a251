"""A simulated replica against vLLM's own scheduler, where KV is short: steps, preemptions, and the
tokens that are computed again; with turns also what prefix caches keep of ended ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.outputs import ModelRunnerOutput

from pat_vllm.simulator.shapes import GENERATORS
from pat_vllm.simulator.simulated_replica import SimulatedReplica
from pat_vllm.simulator.simulated_requests import SimulatedRequests
from pat_vllm.simulator.traces import LengthTrace
from tests.support.models import random_model
from tests.unit.simulator.simple import capacity_of
from tests.vllm.simulator.arrivals import Arrivals
from tests.vllm.without_workers import BLOCK_SIZE as BLOCK
from tests.vllm.without_workers import scheduler_arguments

PROMPT, BUDGET, LONGEST = 64, 512, 1000


@pytest.mark.parametrize("blocks", [400, 800])
@pytest.mark.parametrize("shape", ["deepscaler", "uniform"])
def test_as_vllm_schedules(shape: str, blocks: int) -> None:
    generated = GENERATORS[shape](48, LONGEST, 0)
    trace = replace(generated, num_prompt_tokens=(PROMPT,) * len(generated))
    steps, prefilled, preempted = of_vllm(trace, blocks)
    simulated = of_replica(trace, blocks)
    assert preempted > 10, "the case is no test"
    assert simulated[0] == pytest.approx(steps, rel=0.03)
    assert simulated[1] == pytest.approx(prefilled, rel=0.08)
    assert simulated[2] == pytest.approx(preempted, rel=0.1, abs=3)


@pytest.mark.parametrize("blocks", [200, 300, 3000])
def test_turns_as_vllm_schedules(blocks: int) -> None:
    """Contexts of ended turns stay cached while memory lasts: some, most or all of them."""
    trace = GENERATORS["agents"](24, LONGEST, 3)
    trace = replace(trace, arrivals=tuple(float(round(10 * at)) for at in trace.arrivals))
    steps, prefilled, preempted = of_vllm(trace, blocks)
    simulated = of_replica(trace, blocks)
    appended = sum(trace.num_prompt_tokens) - sum(
        trace.num_prompt_tokens[before] + trace.lengths[before]
        for before in trace.after
        if before >= 0
    )
    evicted = prefilled > 1.2 * appended
    assert evicted == (blocks < 3000), "the case is no test"
    assert simulated[0] == pytest.approx(steps, rel=0.03)
    assert simulated[1] == pytest.approx(prefilled, rel=0.08 if evicted else 0.01)
    assert simulated[2] == pytest.approx(preempted, rel=0.1, abs=3)


def of_replica(trace: LengthTrace, blocks: int) -> tuple[int, int, int]:
    profile = capacity_of(len(trace), BUDGET, {1: (blocks - 1) * BLOCK})
    requests, steps = SimulatedRequests(trace, 0.0), 0
    replica = SimulatedReplica(0, requests, profile, 1)
    to_come = list(range(len(trace)))
    while replica.num_seqs or to_come:
        arrived = [request for request in to_come if requests.arrival[request] <= steps]
        replica.waiting.extend(sorted(arrived, key=lambda i: requests.arrival[i]))
        to_come = [request for request in to_come if request not in arrived]
        if not replica.num_seqs:
            steps += 1
            continue
        replica.schedule()
        replica.per_step = 1.0
        replica.set_steps(1)
        steps += 1
        for request in replica.finish(1):
            requests.end(request, steps)
    return steps, requests.prefilled, requests.preempted


def of_vllm(trace: LengthTrace, blocks: int) -> tuple[int, int, int]:
    scheduler, arrivals = scheduler_of(len(trace), blocks), Arrivals(trace)
    requests, draw = arrivals.requests, arrivals.draw
    steps = computed = 0
    while scheduler.has_unfinished_requests() or arrivals.waiting:
        for request in arrivals.until(steps):
            scheduler.add_request(request)
        if not scheduler.has_unfinished_requests():
            steps += 1
            continue
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
        arrivals.follow(steps)
    preempted = sum(request.num_preemptions for request in requests.values())
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
