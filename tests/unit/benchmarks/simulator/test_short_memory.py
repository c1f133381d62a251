"""What a simulated replica admits where its memory is short, as vLLM does: in order."""

from __future__ import annotations

import pytest

from benchmarks.simulator.engine import carry
from benchmarks.simulator.replica import SimulatedReplica, SimulatedRequests
from benchmarks.simulator.traces import LengthTrace
from pat_vllm.layout import Layout
from tests.unit.benchmarks.simulator.simple import capacity_of

CAPACITY = capacity_of(kv_tokens={2: 100})


def requests_of(prompts: tuple[int, ...], computed: tuple[int, ...]) -> SimulatedRequests:
    trace = LengthTrace("short", (10,) * len(prompts), num_prompt_tokens=prompts)
    requests = SimulatedRequests(trace, 0.0)
    requests.computed[:] = computed
    return requests


def test_no_request_overtakes_one_that_a_switch_finds_no_room_for() -> None:
    """Or those behind it hold memory that it waits for."""
    requests = requests_of((50, 60, 45), (50, 60, 45))
    old = [SimulatedReplica(index, requests, CAPACITY, 1) for index in (0, 1)]
    old[0].running = [0, 1, 2]
    new = SimulatedReplica(0, requests, CAPACITY, 2)
    assert carry(requests, old, [new], Layout.of(1, 2), Layout.of(2, 2)) == (1, 50, 2)
    assert requests.computed.tolist() == [50, 0, 0]
    new.schedule()
    assert new.running == [0] and list(new.waiting) == [1, 2]


@pytest.mark.parametrize(("prompt", "runs"), [(50, [0, 1]), (60, [0])])
def test_the_rest_of_a_half_computed_prompt_needs_room(prompt: int, runs: list[int]) -> None:
    requests = requests_of((45, prompt), (45, 10))
    replica = SimulatedReplica(0, requests, CAPACITY, 2)
    replica.waiting.extend([0, 1])
    step = replica.schedule()
    assert replica.running == runs and step.decoding.tolist() == [0]
    assert not requests.preempted
