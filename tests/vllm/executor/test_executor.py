"""How the executor reads workers' replies, and what it does when one fails, is late, or dies.

There are no workers: tests reply in their place. Steps go to a replica by its lane, a ring of its
own; all other calls go to all ranks by vLLM's ring.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import vllm.envs as envs
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue
from vllm.v1.executor.multiproc_executor import WorkerProc
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from pat_vllm.executor import executor as executor_module
from pat_vllm.executor import rpc
from pat_vllm.executor.executor import PATExecutor, PATExecutorMixin
from pat_vllm.executor.messages import CallFailed, StepReply, SwitchCommand
from pat_vllm.executor.os_resources import OsResourceCleanup
from pat_vllm.executor.readers import reader_of
from pat_vllm.executor.weight_calls import WeightCalls
from pat_vllm.layout import Layout
from pat_vllm.worker.worker import PATWorkerMixin

SUCCESS, FAILURE = WorkerProc.ResponseStatus.SUCCESS, WorkerProc.ResponseStatus.FAILURE
COMMAND = SwitchCommand(1, Layout.of(1, 2), Layout.of(2, 2))


def begin(executor: Any) -> None:
    """Give an executor its state after the start: first layout, lanes open, no step in flight."""
    executor.layout = COMMAND.source
    executor._lanes = Mock()
    executor._in_lanes = False
    executor._pending = {}
    executor._unsampled = []
    executor._commands = {}
    executor._stale = False
    executor._weight_calls = WeightCalls()
    executor.is_failed = False
    executor.failure_callback = Mock()
    executor.rpc_broadcast_mq = Mock()


def step_timeout(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Set vLLM's limit for a step. From the environment vLLM would take whole seconds only."""
    name = "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"
    monkeypatch.setitem(envs.environment_variables, name, lambda: seconds)


class Stock:
    """As much of vLLM's executor as is asked for, also by `test_weight_calls.py`.

    Attributes:
        calls: names of the methods that were called.
        whole: whether the second rank has all its weights.
    """

    is_sleeping = False
    vllm_config = None

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.whole = True
        self.futures_queue: deque[Any] = deque()

    def compile_or_warm_up_model(self) -> None:
        """Nothing to do."""

    def collective_rpc(self, method: str, *args: Any, **options: Any) -> Any:
        self.calls.append(method)
        return Future() if options else []


class Executor(PATExecutorMixin, Stock):
    def __init__(self) -> None:
        Stock.__init__(self)
        begin(self)
        self._os_resources = OsResourceCleanup([])
        self.rpc_broadcast_mq.enqueue = lambda call: self.calls.append(call[0])

    def _call_together(self, method: str, *args: Any, **options: Any) -> list[Any]:
        self.calls.append(method)
        # One rank may be through with it before the other.
        return [True, self.whole] if method == rpc.REFRESH_WEIGHTS else []


class RealExecutor(PATExecutor):
    """PAT's executor over vLLM's own. Both send calls and read replies as they always do."""

    def __init__(self) -> None:
        begin(self)
        self.futures_queue: deque[Any] = deque()
        self.sleeping_tags: set[str] = set()
        # Asked by vLLM 0.33 where a worker fails.
        parallel = SimpleNamespace(enable_fault_tolerance=False)
        self.vllm_config: Any = SimpleNamespace(parallel_config=parallel)


@pytest.fixture(params=["multiproc", "ray, another node"])
def rings(request: Any) -> Iterator[tuple[RealExecutor, list[MessageQueue]]]:
    """An executor, and the ends from which two ranks reply."""
    executor = RealExecutor()
    local = request.param != "ray, another node"
    writers = [MessageQueue(1, int(local), connect_ip="127.0.0.1") for _ in range(2)]
    executor.response_mqs = [MessageQueue.create_from_handle(w.export_handle(), 0) for w in writers]
    if not local:  # as the Ray executor does
        executor.response_mqs = [reader_of(mq) for mq in executor.response_mqs]
    for writer, reader in zip(writers, executor.response_mqs, strict=True):
        other = threading.Thread(target=reader.wait_until_ready)
        other.start()
        writer.wait_until_ready()
        other.join()
    yield executor, writers
    for ring in (*writers, *executor.response_mqs):
        ring.shutdown()


# -------------------------------------------------------------------- switches


def test_replies_come_back_by_rank(rings: Any) -> None:
    executor, writers = rings
    for rank in (1, 0):
        writers[rank].enqueue((SUCCESS, f"of {rank}"))
    assert executor.switch(COMMAND) == ["of 0", "of 1"]
    assert executor.layout == COMMAND.target
    executor.rpc_broadcast_mq.enqueue.assert_called_once_with(("pat_switch", (COMMAND,), {}, None))
    executor.failure_callback.assert_not_called()


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_fails_is_heard_while_the_other_waits_for_it(rings: Any, rank: int) -> None:
    executor, writers = rings
    callback = executor.failure_callback
    writers[rank].enqueue((FAILURE, "no memory left"))
    for _ in range(2):  # once failed, it stays so
        with pytest.raises(
            RuntimeError, match=r"rank \d with error 'no memory left'|Executor failed"
        ):
            executor.switch(COMMAND)
    assert executor.layout == COMMAND.source
    callback.assert_called_once_with()
    with pytest.raises(RuntimeError, match="Executor failed"):
        executor.finished()


def test_a_rank_that_never_replies_fails_the_engine(
    rings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, writers = rings
    callback = executor.failure_callback
    step_timeout(monkeypatch, 0.1)
    writers[0].enqueue((SUCCESS, "of 0"))
    with pytest.raises(TimeoutError, match=r"pat_switch timed out on the ranks \[.*1\]"):
        executor.switch(COMMAND)
    callback.assert_called_once_with()


# -------------------------------------------------------------------- calls of users


CALL: Any = "load_my_weights"
"""A worker method that PAT knows nothing of."""
FAILED = CallFailed("no such file")
"""The reply when a user's method has raised. Its status is SUCCESS, or vLLM would stop reading."""


@pytest.mark.parametrize(("block", "rank"), [(True, 0), (False, 1)])
def test_a_failure_of_a_call_is_heard_and_later_replies_are_not_mixed_up(
    rings: Any, block: bool, rank: int
) -> None:
    executor, writers = rings
    writers[rank].enqueue((SUCCESS, FAILED))
    writers[1 - rank].enqueue((SUCCESS, "fine"))
    with pytest.raises(RuntimeError, match="no such file"):
        if block:
            executor.collective_rpc(CALL)
        else:
            executor.collective_rpc(CALL, non_block=True).result()
    executor.rpc_broadcast_mq.enqueue = answering(writers, "later")
    assert executor.collective_rpc(CALL) == ["later", "later"]
    executor.failure_callback.assert_not_called()


def answering(writers: list[MessageQueue], reply: str) -> Any:
    """Has each rank answer a call.

    After a failed call the executor sends a "pat_echo", and drops what comes before its reply.
    """

    def send(call: Any) -> None:
        for writer in writers:
            writer.enqueue((SUCCESS, call[1][0] if call[0] == "pat_echo" else reply))

    return send


@pytest.mark.parametrize("rank", [0, 1])
def test_a_failure_of_a_call_is_heard_while_the_other_rank_waits(rings: Any, rank: int) -> None:
    """In a transfer of weights, say. The other may reply after the failure was raised."""
    executor, writers = rings
    writers[rank].enqueue((SUCCESS, FAILED))
    with pytest.raises(RuntimeError, match="no such file"):
        executor.collective_rpc(CALL)
    writers[1 - rank].enqueue((SUCCESS, "late"))
    executor.rpc_broadcast_mq.enqueue = answering(writers, "later")
    assert executor.collective_rpc(CALL) == ["later", "later"]
    executor.failure_callback.assert_not_called()


def test_a_call_may_take_as_long_as_its_caller_says(
    rings: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    executor, writers = rings
    with pytest.raises(TimeoutError, match="timed out"):
        executor.collective_rpc(CALL, timeout=0.05)
    executor.rpc_broadcast_mq.enqueue = answering(writers, "later")
    assert executor.collective_rpc(CALL, timeout=60) == ["later", "later"]
    executor.failure_callback.assert_not_called()
    # The weights are derived again afterwards. That has a limit of its own: a step's.
    step_timeout(monkeypatch, 0.1)
    executor.rpc_broadcast_mq.enqueue = Mock()
    callback = executor.failure_callback
    with pytest.raises(TimeoutError, match="pat_refresh_weights timed out on the ranks"):
        executor.refresh_weights()
    callback.assert_called_once_with()


def test_a_failure_of_the_one_rank_that_replies(rings: Any) -> None:
    executor, writers = rings
    for reply in ("fine", FAILED):
        writers[1].enqueue((SUCCESS, reply))
    assert executor.collective_rpc(CALL, unique_reply_rank=1) == "fine"
    with pytest.raises(RuntimeError, match="no such file"):
        executor.collective_rpc(CALL, unique_reply_rank=1, non_block=True).result()


@pytest.mark.parametrize("switches", [False, True], ids=["call", "switch"])
@pytest.mark.parametrize("late", [False, True], ids=["it fails", "it is late"])
def test_what_a_failed_call_leaves_is_no_reply_to_the_next(
    rings: Any, late: bool, switches: bool
) -> None:
    """vLLM reads no further than the first error. A "profile" is vLLM's own method: PAT does not
    wrap it, so it fails with FAILURE, not with `CallFailed`."""
    executor, writers = rings

    def workers(call: Any) -> None:
        method, args, *_ = call
        if method == "profile":
            if not late:
                for writer in writers:
                    writer.enqueue((FAILURE, "no profiler"))
            return
        for writer in writers:
            if method == "pat_echo" and late:
                writer.enqueue((SUCCESS, None))  # of the call that was late
            writer.enqueue((SUCCESS, args[0] if method == "pat_echo" else True))

    executor.rpc_broadcast_mq.enqueue = workers
    with pytest.raises(TimeoutError if late else RuntimeError, match=r"timed out|no profiler"):
        executor.collective_rpc("profile", timeout=0.05 if late else None)
    if switches:
        assert executor.switch(COMMAND) == [True, True]
    else:
        assert executor.collective_rpc("check_health") == [True, True]
    executor.failure_callback.assert_not_called()
    assert not any(mq_is_ready(mq) for mq in executor.response_mqs)


def test_a_call_that_does_not_block_and_fails_leaves_nothing_either(rings: Any) -> None:
    executor, writers = rings
    replies = executor.collective_rpc("profile", non_block=True)
    for writer in writers:
        writer.enqueue((FAILURE, "no profiler"))
    with pytest.raises(RuntimeError, match="no profiler"):
        replies.result()
    executor.rpc_broadcast_mq.enqueue = answering(writers, "later")
    assert executor.switch(COMMAND) == ["later", "later"]


def mq_is_ready(mq: Any) -> bool:
    return bool(reader_of(mq).ready())


def test_a_rank_that_fails_at_start_is_heard_while_the_other_waits_for_it(rings: Any) -> None:
    executor, writers = rings
    writers[1].enqueue((FAILURE, "no memory left"))
    with pytest.raises(RuntimeError, match="rank 1 with error 'no memory left'"):
        executor.compile_or_warm_up_model()


@pytest.mark.parametrize("switches", [False, True], ids=["call", "switch"])
def test_replies_to_earlier_calls_are_not_lost(rings: Any, switches: bool) -> None:
    """A later call, or a switch, reads them first, and gives them to the futures that wait."""
    executor, writers = rings
    fine, failed = (executor.collective_rpc(CALL, non_block=True) for _ in range(2))
    executor._stale = False  # or a switch would first derive the weights again
    for writer in writers:
        for reply in ("before", FAILED, "later"):
            writer.enqueue((SUCCESS, reply))
    later = executor.switch(COMMAND) if switches else executor.collective_rpc(CALL)
    assert later == ["later", "later"]
    assert fine.done() and fine.result() == ["before", "before"]
    with pytest.raises(RuntimeError, match="no such file"):
        failed.result()
    assert isinstance(failed.exception(), RuntimeError)
    executor.failure_callback.assert_not_called()


def test_an_executor_that_gives_a_future_for_each_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM's interface says of `non_block`."""
    futures: list[Future[Any]] = [Future(), Future()]
    monkeypatch.setattr(Stock, "collective_rpc", lambda *args, **options: list(futures))
    replies = Executor().collective_rpc(CALL, non_block=True)
    futures[0].set_result("fine")
    futures[1].set_result(FAILED)
    assert replies[0].result() == "fine"
    with pytest.raises(RuntimeError, match="no such file"):
        replies[1].result()


def test_commands_answer_as_workers_would() -> None:
    executor = Executor()
    executor.register_command("pat_report", lambda x=1: 2 * x)
    assert executor.collective_rpc("pat_report", args=(4,)) == [8]
    assert executor.collective_rpc("pat_report", non_block=True).result() == [2]
    assert executor.collective_rpc("pat_report", unique_reply_rank=0) == 2


def test_workers_have_the_methods_that_are_called() -> None:
    """Calls go by name; `rpc.py` is where both ends find it."""
    constants = {value for name, value in vars(rpc).items() if name.isupper()}
    workers = {value for value in constants if isinstance(value, str)}
    front_ends = {
        rpc.SWITCH_COMMAND,
        rpc.SPECULATE_COMMAND,
        rpc.REPORT_COMMAND,
        rpc.PROFILE_COMMAND,
    }
    assert workers - front_ends == rpc.WORKER_METHODS
    methods = {name for name in dir(PATWorkerMixin) if name.startswith("pat_")}
    assert methods == rpc.WORKER_METHODS


# -------------------------------------------------------------------- lanes


def test_a_worker_that_dies_while_the_lanes_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's rings would wait for it without end."""
    released = threading.Event()
    lanes = SimpleNamespace(handles=list, connect=list, wait_until_ready=released.wait)
    monkeypatch.setattr(executor_module, "Lanes", lambda *args: lanes)
    executor = Executor()
    executor.setup = SimpleNamespace(layouts=[])  # type: ignore[assignment]
    executor._lanes = None
    died: Future[Any] = Future()
    died.set_exception(RuntimeError("cancelled"))
    monkeypatch.setattr(
        Stock,
        "collective_rpc",
        lambda self, method, *args, non_block=False: died if non_block else [],
    )
    with pytest.raises(RuntimeError, match="cancelled"):
        executor.compile_or_warm_up_model()
    # Or just after its reply.
    died = Future()
    died.set_result([])
    executor.is_failed = True
    with pytest.raises(RuntimeError, match="Executor failed"):
        executor.compile_or_warm_up_model()
    released.set()


class PlayedLanes:
    """Replies of leaders, by rank."""

    def __init__(self) -> None:
        self.replies: dict[int, deque[Any]] = {0: deque(), 1: deque()}

    def has_reply(self, rank: int) -> bool:
        return bool(self.replies[rank])

    def receive(self, rank: int, timeout: float) -> StepReply:
        if not self.replies[rank]:
            raise TimeoutError
        return StepReply(self.replies[rank].popleft())

    def wait(self, ranks: Any, timeout: float) -> None:
        """Meanwhile the first of these ranks replies."""
        for rank in list(ranks)[:1]:
            self.replies[rank].append(EMPTY_MODEL_RUNNER_OUTPUT)


def test_steps_finish_in_each_replicas_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """`finished` returns some of them, or all. A step that takes too long ends the engine."""
    executor: Any = Executor()
    executor._lanes = lanes = PlayedLanes()
    # When each replica's steps were sent: so late that none times out.
    executor._pending = {0: deque([1e12, 1e12]), 1: deque([1e12])}
    lanes.replies[1].append("of 1")
    assert [(result.replica, result.output) for result in executor.finished()] == [(1, "of 1")]
    lanes.replies[0].append("first")
    executor._pending[1].append(1e12)
    every = executor.finished(wait_for_all=True)
    assert sorted(result.replica for result in every) == [0, 0, 1]
    assert next(result.output for result in every if result.replica == 0) == "first"
    assert not any(executor._pending.values())
    executor._pending[0].append(0.0)  # was sent long ago
    step_timeout(monkeypatch, 0.0)
    callback = executor.failure_callback
    with pytest.raises(TimeoutError, match="replica 0 timed out"):
        executor.finished()
    callback.assert_called_once_with()
