"""What vLLM 0.31 lacks or does otherwise, as vLLM 0.32 has it.

The one place that knows of another version: on vLLM 0.32 and later all of this is vLLM's own.
With the support of 0.31 this module goes.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pat_vllm.patches.replacing import replace, replaced

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
    from vllm.v1.request import Request
    from vllm.v1.worker.gpu_worker import Worker as _Worker
else:
    _Worker = object


def add_hits_by_source(into: PrefixCacheStats, other: PrefixCacheStats) -> None:
    """Add the hits of `other` to `into`, by the cache that had them. 0.31 does not count them."""
    if hits := getattr(other, "hits_by_source", None):
        vars(into)["hits_by_source"] = dict(Counter(vars(into)["hits_by_source"]) + Counter(hits))


def clear_kv_fetches(stats: SchedulerStats) -> None:
    """Have statistics name no request whose KV is fetched. 0.31 counts none."""
    if fetches := getattr(stats, "num_kv_fetch_reqs_by_stage", None):
        fetches.clear()


def forget_kv_fetch(scheduler: Scheduler, request: Request) -> None:
    """Have a request not count as one whose KV is fetched. 0.31 counts none."""
    if set_stage := getattr(scheduler, "_set_kv_fetch_stage", None):
        set_stage(request, None)


def drain_carried_requests(scheduler: Scheduler) -> None:
    """Have a pause that waits for running requests also wait for waiting ones that hold KV.

    Without it: 0.31 neither runs nor counts what a switch has carried, and the pause ends before
    these requests do. vLLM has no hook for it.
    """
    if hasattr(scheduler, "_set_kv_fetch_stage"):
        return
    from vllm.v1.core.sched.interface import PauseState
    from vllm.v1.core.sched.request_queue import create_request_queue

    def schedule(stock: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            if scheduler.pause_state != PauseState.PAUSED_NEW or not scheduler.kv_holding_waiting:
                return stock(*args, **options)
            queued, scheduler.waiting = scheduler.waiting, create_request_queue(scheduler.policy)
            scheduler.set_pause_state(PauseState.UNPAUSED)
            try:
                return stock(*args, **options)
            finally:
                for preempted in reversed(list(scheduler.waiting)):
                    queued.prepend_request(preempted)
                scheduler.waiting = queued
                scheduler.set_pause_state(PauseState.PAUSED_NEW)

        return call

    def count(stock: Callable[[], int]) -> Callable[[], int]:
        def call() -> int:
            if scheduler.pause_state != PauseState.PAUSED_NEW:
                return stock()
            held = len(scheduler.kv_holding_waiting)
            return stock() + held - scheduler.num_waiting_for_streaming_input

        return call

    replace(scheduler, "schedule", schedule)
    replace(scheduler, "get_num_unfinished_requests", count)


def external_weight_memory(loader: BaseModelLoader, config: VllmConfig) -> int:
    """Bytes of weights that another process holds. 0.31 has no such loaders."""
    memory: int = getattr(loader, "get_external_weight_memory")(config)  # noqa: B009
    return memory


class MakesModelRunner(_Worker):
    """A GPU worker of vLLM that makes its model runner in a method.

    0.31 names the runner's class in `init_device`.
    """

    def init_device(self) -> None:
        if hasattr(super(), "_make_model_runner"):
            super().init_device()
            return
        with replaced(self._runners(), "GPUModelRunner", lambda *args: self._make_model_runner()):
            super().init_device()

    def _make_model_runner(self) -> Any:
        if make := getattr(super(), "_make_model_runner", None):
            return make()
        return self._runners().GPUModelRunner(self.vllm_config, self.device)

    def _runners(self) -> Any:
        name = "gpu.model_runner" if self.use_v2_model_runner else "gpu_model_runner"
        return importlib.import_module(f"vllm.v1.worker.{name}")


@contextmanager
def use_memory_pool(tag: str) -> Iterator[None]:
    """vLLM's sleep-mode pool for a tag. Earlier pools of the tag are kept, and trimmed here.

    0.31 drops the pool that the tag had before, whose tensors live on.
    """
    from vllm.device_allocator import get_mem_allocator_instance

    allocator: Any = get_mem_allocator_instance()
    pools = allocator.allocator_and_pools
    if isinstance(pools.get(tag), tuple):
        from vllm.device_allocator.cumem import unmap_and_release

        pools[f"{tag} {len(pools)}"] = pools[tag]
        earlier = [pool for name, (pool, _) in pools.items() if name.startswith(f"{tag} ")]
        for segment in (segment for pool in earlier for segment in pool.snapshot()):
            if segment["allocated_size"] == 0 and segment["address"] in allocator.pointer_to_data:
                unmap_and_release(allocator._python_free_callback(segment["address"]))
    with allocator.use_memory_pool(tag=tag):
        yield
