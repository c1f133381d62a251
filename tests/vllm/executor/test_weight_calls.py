"""Calls that may change weights, and steps while some of the weights are not there."""

from __future__ import annotations

from typing import Any
from unittest.mock import Mock

import pytest
from vllm.v1.core.sched.output import SchedulerOutput

from pat_vllm.executor import executor as executor_module
from pat_vllm.executor import rpc
from pat_vllm.executor import weight_calls as weight_calls_module
from pat_vllm.executor.lanes import EXECUTE
from pat_vllm.executor.messages import PATSchedulerOutput
from pat_vllm.executor.weight_calls import WeightCalls
from tests.vllm.executor.test_executor import COMMAND, Executor


def test_weights_are_not_touched_while_they_are_away() -> None:
    """A step while the engine sleeps only ends requests. The first one afterwards derives them."""
    executor = Executor()
    executor.layout = COMMAND.target
    executor.collective_rpc("sleep")
    executor.is_sleeping = True
    executor._enter_lanes()
    executor.collective_rpc("wake_up")
    assert rpc.REFRESH_WEIGHTS not in executor.calls
    executor.is_sleeping = False
    executor._enter_lanes()
    lanes, derived = rpc.SERVE_LANE, rpc.REFRESH_WEIGHTS
    assert executor.calls == ["sleep", lanes, "wake_up", derived, lanes]


@pytest.mark.parametrize(
    ("method", "call", "version"),
    [
        ("profile", "profile", 0),
        ("sleep", "sleep", 1),
        ("load_my_weights", "pat_call_in_base", 1),
        (print, "pat_call_in_base", 1),
        ("liveness_probe", "liveness_probe", 0),
        ("my_gauge", "my_gauge", 0),
    ],
)
def test_which_calls_may_change_weights(method: Any, call: str, version: int) -> None:
    executor = Executor()
    executor._weight_calls = WeightCalls(["my_gauge"])
    executor.collective_rpc(method)
    assert (executor.calls, executor.weights_version) == ([call], version)
    assert executor._stale == bool(version)


def test_a_call_that_may_only_have_read_is_told_of_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where deriving the weights again took long."""
    logger = Mock()
    monkeypatch.setattr(weight_calls_module, "logger", logger)
    calls = WeightCalls(["my_gauge"])
    for method, seconds in (
        ("my_gauge", 1.0), ("sleep", 1.0), ("quick", 0.001), ("slow", 0.04), ("slow", 0.05)
    ):  # fmt: skip
        calls.keeps_weights(method)
        calls.refreshed(seconds)
    ((words, *values),) = [call.args for call in logger.info.call_args_list]
    line = words % tuple(values)
    assert "collective_rpc('slow')" in line and "in 40 ms" in line
    assert "name it in pat.readonly_calls" in line


def step_of(tokens: int, in_flight: bool = False) -> PATSchedulerOutput:
    step = SchedulerOutput.make_empty()
    step.total_num_scheduled_tokens = tokens
    return PATSchedulerOutput.of({0: step}, in_flight)


def test_steps_in_an_update() -> None:
    executor: Any = Executor()
    executor._lanes.send = lambda layout, replica, kind, step: executor.calls.append(kind)
    executor.collective_rpc("start_weight_update")
    executor.whole = False
    for in_flight in (False, True):
        executor.calls.clear()
        executor.execute_model(step_of(0, in_flight))
        assert executor.calls[-1] == EXECUTE, "of a request that was aborted"
        with pytest.raises(RuntimeError, match="finish_weight_update comes first"):
            executor.execute_model(step_of(1))
        assert executor.calls.count(EXECUTE) == 1, "with half of the weights"
    executor.collective_rpc("finish_weight_update")
    executor.whole = True
    executor.calls.clear()
    for _ in range(2):
        executor.execute_model(step_of(1))
    assert executor.calls == [rpc.REFRESH_WEIGHTS, rpc.SERVE_LANE, EXECUTE, EXECUTE]


def test_requests_wait_as_long_as_a_step_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers are asked once for each call that may have brought the rest."""
    clock = 1000.0
    monkeypatch.setattr(executor_module.time, "monotonic", lambda: clock)
    monkeypatch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "60")
    executor = Executor()
    assert not executor.waits_for_weights() and not executor.calls
    executor.whole = False
    for call in ("start_weight_update", "update_weights"):
        executor.collective_rpc(call)
        for waited in (0, 59):
            clock += waited
            assert executor.waits_for_weights()
    assert executor.calls.count(rpc.REFRESH_WEIGHTS) == 2
    clock += 1
    assert not executor.waits_for_weights(), "the step tells why it cannot be made"
    executor.whole = True
    executor.collective_rpc("finish_weight_update")
    assert not executor.waits_for_weights()


@pytest.mark.parametrize(
    ("method", "why"),
    [
        ("skyrl_sleep_for_weight_sync", "offload_kv_for_weight_sync to false"),
        ("init_nccl_reshard_comm_group", "by collective or by ipc"),
    ],
)
def test_calls_by_which_something_would_be_lost_are_refused(method: str, why: str) -> None:
    """The engine is as before."""
    executor = Executor()
    with pytest.raises(RuntimeError, match=f"PAT refuses {method}: .*{why}"):
        executor.collective_rpc(method)
    assert not executor.calls and not executor._stale
