"""How replies to calls of worker methods are read, so that none is taken for another's."""

from __future__ import annotations

import contextlib
import math
import os
import time
import uuid
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

import vllm.envs as envs
from vllm.v1.executor.multiproc_executor import WorkerProc

from pat_vllm.executor import rpc
from pat_vllm.executor.messages import CallFailed
from pat_vllm.executor.readers import reader_of, wait_for_any

if TYPE_CHECKING:
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor as _Base
else:
    _Base = object  # vLLM's executor is the next base of the class that mixes this in

RECHECK_SECONDS = 0.02
"""Longest sleep between looks at replies, should an announcement get lost."""
_SPIN_SECONDS = 1.0
"""How long to look for the replies to a switch without sleep, as vLLM's own wait does."""
_ARRIVES_WITHIN = 60.0
"""Seconds in which a reply that is announced has come."""


class OwnRepliesMixin(_Base):
    """vLLM's calls of worker methods, each of which gets its own replies.

    vLLM reads no further reply once one is an error or late. It would take those that it leaves
    for the replies to the next call.
    """

    _unread = False
    """Whether replies may be left of calls that failed or timed out."""

    def _raise_if_failed(self) -> None:
        if self.is_failed:
            raise RuntimeError("Executor failed.")

    def _call(self, *args: Any, **options: Any) -> Any:
        """vLLM's `collective_rpc`, after what earlier calls have left."""
        if not options.get("non_block"):
            self._read_earlier_replies()  # vLLM would, too, but take what they leave for its own
        self._drop_unread()
        try:
            replies = super().collective_rpc(*args, **options)
        except Exception:
            self._unread = True
            raise
        if isinstance(replies, Future):
            replies.add_done_callback(self._note_unread)
        return replies

    def _call_together(
        self,
        method: str,
        *args: Any,
        timeout: float | None = None,
        check: Callable[[Any], Any] | None = None,
    ) -> list[Any]:
        """Call a worker method in which ranks wait for each other; results by rank.

        vLLM reads replies in the order of ranks, and would wait for one that waits for another that
        has failed. Here they are read as they come. After an error the others' are left.

        Args:
            timeout: seconds; None: `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`.
            check: is given each reply as it comes, and raises what ends the call.

        Raises:
            RuntimeError: a worker failed, or `check` says so.
            TimeoutError: it took longer than `timeout` seconds.
        """
        self._raise_if_failed()
        self._read_earlier_replies()
        self._drop_unread()
        # Not in a variable: a shutdown by another thread removes what nobody refers to.
        assert self.rpc_broadcast_mq is not None
        self.rpc_broadcast_mq.enqueue((method, args, {}, None))  # each rank replies
        if timeout is None:
            timeout = envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        begun = time.perf_counter()
        waiting = {rank: reader_of(mq) for rank, mq in enumerate(self.response_mqs)}
        results: dict[int, Any] = {}
        while waiting:
            taken = time.perf_counter() - begun
            if taken < _SPIN_SECONDS:
                os.sched_yield()
            else:
                wait_for_any(waiting.values(), RECHECK_SECONDS)
            self._raise_if_failed()
            if taken >= timeout:
                raise TimeoutError(f"{method} timed out on the ranks {sorted(waiting)}")
            for rank in [rank for rank, reader in waiting.items() if reader.ready()]:
                status, results[rank] = waiting.pop(rank).dequeue(timeout=_ARRIVES_WITHIN)
                if status != WorkerProc.ResponseStatus.SUCCESS:
                    raise RuntimeError(
                        f"{method} failed on rank {rank} with error '{results[rank]}', please "
                        "check the stack trace above for the root cause"
                    )
                if check is not None:
                    check(results[rank])
        return [results[rank] for rank in sorted(results)]

    def _call_of_user(self, *call: Any, timeout: float | None) -> list[Any]:
        """Call a method or function of a user's; see `WeightUpdatesMixin.pat_call_in_base`.

        Raises:
            RuntimeError: it failed on a rank. Others may still wait for that one.
            TimeoutError: it took longer than `timeout` seconds; None: there is no limit.
        """
        limit = math.inf if timeout is None else timeout
        try:
            return self._call_together(rpc.CALL_IN_BASE, *call, timeout=limit, check=checked)
        except Exception:
            self._unread = True
            raise

    def _note_unread(self, replies: Future[Any]) -> None:
        self._unread = self._unread or replies.exception() is not None

    def _read_earlier_replies(self) -> None:
        """Have the calls that did not block get their replies before others are read."""
        if self.futures_queue:
            with contextlib.suppress(Exception):  # the caller of that call will hear it
                self.futures_queue[0].result()  # vLLM's last call; reads for all before it

    def _drop_unread(self) -> None:
        """Read what calls that failed or timed out have left, up to the reply to a last one.

        Raises:
            RuntimeError: a worker has ended.
            TimeoutError: such a call still runs after `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`.
        """
        if not self._unread:
            return
        self._raise_if_failed()
        self._read_earlier_replies()
        assert self.rpc_broadcast_mq is not None
        last = uuid.uuid4().hex
        self.rpc_broadcast_mq.enqueue((rpc.ECHO, (last,), {}, None))
        give_up = time.perf_counter() + envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS
        for rank, mq in enumerate(self.response_mqs):
            reader, reply = reader_of(mq), None
            while not (isinstance(reply, str) and reply == last):
                self._raise_if_failed()
                if reader.ready():
                    _, reply = reader.dequeue(timeout=_ARRIVES_WITHIN)
                elif time.perf_counter() > give_up:
                    raise TimeoutError(f"rank {rank} is still busy with a call that has timed out")
                else:
                    wait_for_any([reader], RECHECK_SECONDS)
        self._unread = False


def checked(replies: Any) -> Any:
    """What a call has returned: a reply, a list of replies, or futures of either.

    A failure of a user's call is a reply, `CallFailed`. vLLM stops to read at the first error, and
    would take the other ranks' replies for those to later calls.

    Raises:
        RuntimeError: a reply is `CallFailed`. Where replies come later, their future raises it.
    """
    if isinstance(replies, list):
        return [_checked(reply) for reply in replies]
    return _checked(replies)


def _checked(reply: Any) -> Any:
    if isinstance(reply, CallFailed):
        raise RuntimeError(f"Worker failed with error '{reply.error}'")
    return _CheckedFuture(reply) if isinstance(reply, Future) else reply


class _CheckedFuture(Future):
    """Resolves as another future does, to `checked` replies."""

    def __init__(self, replies: Future[Any]) -> None:
        super().__init__()
        self._replies = replies
        replies.add_done_callback(self._take)

    def _take(self, replies: Future[Any]) -> None:
        try:
            self.set_result(checked(replies.result()))
        except Exception as error:
            self.set_exception(error)

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            # vLLM reads the replies when a future is asked for them.
            self._replies.result(timeout)
        return super().result(timeout)


def completed(result: Any) -> Future[Any]:
    """A future that has its result."""
    future: Future[Any] = Future()
    future.set_result(result)
    return future


class Deferred(Future):
    """Calls a function when its result is asked for, which is to be once.

    It is never done, and has no callbacks: vLLM's engine asks for the result at once.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function = function

    def result(self, timeout: float | None = None) -> Any:
        return self._function()
