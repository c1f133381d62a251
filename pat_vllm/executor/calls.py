"""Calls of worker methods: which of them may change weights, and how their replies are read."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

from vllm.logger import init_logger
from vllm.v1.executor.multiproc_executor import WorkerProc

from pat_vllm.commands import WORKER_METHODS
from pat_vllm.executor.messages import CallFailed
from pat_vllm.executor.readers import reader_of, wait_for_any

logger = init_logger(__name__)

RECHECK_SECONDS = 0.02
"""Longest sleep between looks at replies, should an announcement get lost."""
_SPIN_SECONDS = 1.0
"""How long to look for the replies to a switch without sleep, as vLLM's own wait does."""
_ARRIVES_WITHIN = 60.0
"""Seconds in which a reply that is announced has come."""

_DISCARD_WEIGHTS = frozenset({"sleep", "wake_up", "discard"})
"""Worker methods of vLLM after which weights may be gone, in all layouts alike."""
_KEEP_WEIGHTS = WORKER_METHODS | {
    "check_health",
    "execute_dummy_batch",
    "get_supported_tasks",
    "profile",
    "reset_encoder_cache",
    "reset_mm_cache",
    "shutdown",
    "supports_draft_weight_updates",
    "synchronize_device",
}
"""Worker methods that are called on a running engine and change no weight of a user's."""
_OF_TRAINERS = {
    "liveness_probe": "prime-rl, inference/vllm: its server's /liveness",
    "bind_numa": "NeMo-RL, models/generation/vllm/vllm_worker.py: post_init",
    "report_device_id": "NeMo-RL, likewise, and vLLM's own examples of RLHF",
}
"""Such methods of trainers' worker extensions, and who calls them.

Any other may be a weight update. Trainers have too many ways to make one to know them all.
"""
_REFUSED = {
    "skyrl_sleep_for_weight_sync": (
        "it discards weights past vLLM's sleep, and keeps the buffers of one layout's model only; "
        "set SkyRL's generator.inference_engine.offload_kv_for_weight_sync to false"
    ),
    "init_nccl_reshard_comm_group": (
        "NeMo-RL sends each rank its shard of one group of all, which PAT's base layout need not "
        "have; use its transfer by collective or by ipc"
    ),
}
"""Worker methods that would lose something, and what to do instead."""
_DEAR = 0.005
"""Seconds to derive weights again from which on a call is told of that may only have read."""


class WeightCalls:
    """Which calls of worker methods, or of functions, may write weights, and what they cost."""

    def __init__(self, readonly: Iterable[str] = ()) -> None:
        """`readonly`: worker methods that a user says only read."""
        self._keep = _KEEP_WEIGHTS | _OF_TRAINERS.keys() | set(readonly)
        self._made: set[str] = set()
        self._told: set[str] = set()

    def keep_weights(self, method: Any) -> bool:
        """Whether a call leaves all weights as they are. One that may not is noted.

        Raises:
            RuntimeError: the call would lose something.
        """
        if isinstance(method, str):
            if method in _REFUSED:
                raise RuntimeError(f"PAT refuses {method}: {_REFUSED[method]}")
            if method in self._keep:
                return True
            self._made.add(method)
        return False

    def refreshed(self, seconds: float) -> None:
        """Say what calls cost, once for each: the layouts' weights were derived again."""
        new = sorted(self._made - self._told - _DISCARD_WEIGHTS)
        self._made.clear()
        if new and seconds >= _DEAR:
            self._told.update(new)
            logger.info(
                "PAT took collective_rpc(%s) for a weight update, after which all layouts' weights "
                "were derived again in %.0f ms, and prefix caches are not carried over the next "
                "switch. If it only reads, name it in pat.readonly_calls.",
                ", ".join(map(repr, new)),
                1e3 * seconds,
            )


def discards_weights(method: Any) -> bool:
    """Whether weights may be gone after a call, in all layouts alike."""
    return isinstance(method, str) and method in _DISCARD_WEIGHTS


# -------------------------------------------------------------------- replies


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
    """Resolves, whenever it is asked, to what a function returns then."""

    def __init__(self, function: Callable[[], Any]) -> None:
        super().__init__()
        self._function = function

    def result(self, timeout: float | None = None) -> Any:
        return self._function()


def read_together(
    method: str,
    response_mqs: Sequence[Any],
    raise_if_failed: Callable[[], None],
    timeout: float = math.inf,
) -> list[Any]:
    """The reply of each rank to a call in which ranks wait for each other; results by rank.

    vLLM reads replies in the order of ranks, and would wait for one that waits for another that
    has failed. Here they are read as they come.

    Raises:
        RuntimeError: a worker failed.
        TimeoutError: it took longer than `timeout` seconds.
    """
    begun = time.perf_counter()
    waiting = {rank: reader_of(mq) for rank, mq in enumerate(response_mqs)}
    results: dict[int, Any] = {}
    while waiting:
        taken = time.perf_counter() - begun
        if taken < _SPIN_SECONDS:
            os.sched_yield()
        else:
            wait_for_any(waiting.values(), RECHECK_SECONDS)
        raise_if_failed()
        if taken >= timeout:
            raise TimeoutError(f"{method} timed out on the ranks {sorted(waiting)}")
        for rank in [rank for rank, reader in waiting.items() if reader.ready()]:
            status, results[rank] = waiting.pop(rank).dequeue(timeout=_ARRIVES_WITHIN)
            if status != WorkerProc.ResponseStatus.SUCCESS:
                raise RuntimeError(
                    f"{method} failed on rank {rank} with error '{results[rank]}', please "
                    "check the stack trace above for the root cause"
                )
    return [results[rank] for rank in sorted(results)]


def drop_until(
    answer: str,
    response_mqs: Sequence[Any],
    raise_if_failed: Callable[[], None],
    timeout: float,
) -> None:
    """Read each rank's replies up to `answer`, the last one. Nobody waits for those before it.

    Raises:
        RuntimeError: a worker has ended.
        TimeoutError: it took longer than `timeout` seconds.
    """
    give_up = time.perf_counter() + timeout
    for rank, mq in enumerate(response_mqs):
        reader, reply = reader_of(mq), None
        while not (isinstance(reply, str) and reply == answer):
            raise_if_failed()
            if reader.ready():
                _, reply = reader.dequeue(timeout=_ARRIVES_WITHIN)
            elif time.perf_counter() > give_up:
                raise TimeoutError(f"rank {rank} is still busy with a call that has timed out")
            else:
                wait_for_any([reader], RECHECK_SECONDS)
