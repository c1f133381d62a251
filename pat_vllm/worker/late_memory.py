"""What is allocated after vLLM has measured a layout's steps.

That are the buffers that come with a KV cache, CUDA graphs, and what a switch stages. Of one layout
vLLM counts the graphs, and leaves the buffers to what `gpu_memory_utilization` keeps free.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, cast

import torch
from vllm.config import CUDAGraphMode, set_current_vllm_config

from pat_vllm.modelled.gpus import GiB
from pat_vllm.models.kinds import fewest_heads
from pat_vllm.patches.groups import capture_without_ipc
from pat_vllm.patches.runners import (
    attention_workspace,
    capture_on,
    is_v2,
    one_graph_pool,
    use_attention_workspace,
)
from pat_vllm.start.memory_estimate import num_regions, staged_share

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2

    from pat_vllm.layout import Layout
    from pat_vllm.worker.runtime import LayoutRuntime, ModelRunner

Enter = Callable[["LayoutRuntime"], None]
"""Makes a layout the worker's active one."""


def measure_buffers(
    runtimes: Sequence[LayoutRuntime], enter: Enter
) -> tuple[list[int], torch.Tensor | None]:
    """What each layout allocates with its KV cache, beside the cache.

    Each gets the smallest KV cache that vLLM measures CUDA graphs with. All of it is given back.

    Args:
        runtimes: the base layout first.

    Returns:
        Bytes by layout, and the workspace of the base layout's attention, which the others use.
    """
    sizes: list[int] = []
    workspace: torch.Tensor | None = None
    for runtime in runtimes:
        enter(runtime)
        free = _free_bytes()
        with set_current_vllm_config(runtime.config), use_attention_workspace(workspace):
            _start_smallest_kv_cache(runtime.runner)
        if not sizes:
            workspace = attention_workspace(runtime.runner)
        storages = (view.untyped_storage() for view in runtime.runner.kv_caches)
        kv_cache = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        sizes.append(max(0, free - _free_bytes() - kv_cache))
    for runtime in runtimes:
        enter(runtime)
        _end_smallest_kv_cache(runtime.runner)
    return sizes, workspace


def measure_graphs(
    runtimes: Sequence[LayoutRuntime],
    enter: Enter,
    workspace: torch.Tensor | None,
    stream: torch.cuda.Stream,
) -> list[int]:
    """What the CUDA graphs of each layout add to a pool that has those of the layouts before.

    As when they are captured for good, in the one pool of the process, on one stream. Collective
    over the ranks of each replica.

    Args:
        workspace: of attention, from `measure_buffers`.
        stream: on which graphs are captured for good.
    """
    sizes = []
    with (
        capture_on(stream),
        capture_without_ipc(),
        _kept_graph_pool(stream),
        use_attention_workspace(workspace),
    ):
        for runtime in runtimes:
            enter(runtime)
            captures = runtime.config.compilation_config.cudagraph_mode != CUDAGraphMode.NONE
            sizes.append(runtime.runner.profile_cudagraph_memory() if captures else 0)
    return sizes


def staged_by_switches(runtimes: Mapping[Layout, LayoutRuntime]) -> float:
    """Share of the KV cache that a switch that carries KV stages in the worst case."""
    base = next(iter(runtimes.values()))
    of_kinds = Counter(base.runner.get_kv_cache_spec().values())
    named = base.config.model_config.get_total_num_kv_heads()
    kv_heads = fewest_heads(of_kinds, named, base.layout.tp)
    return staged_share(list(runtimes), kv_heads, num_regions(of_kinds.values()))


def check_room(base: LayoutRuntime, available: int, more_room: str) -> None:
    """Check that the KV cache holds a request of `max_model_len`.

    vLLM would check it later, and advise a shorter context only.

    Args:
        more_room: options that help (`Choice.more_room`).

    Raises:
        ValueError: it does not; names `base_tp`.
    """
    model = base.config.model_config
    if model.original_max_model_len == -1:  # vLLM takes the longest that fits
        return
    specs = base.runner.get_kv_cache_spec().values()
    needed = sum(spec.max_memory_usage_bytes(base.config) for spec in specs)
    if available < needed:
        raise ValueError(
            f"pat.base_tp={base.layout.tp} leaves {max(0, available) / GiB:.2f} GiB of a device "
            f"for KV, and a request of max_model_len={model.max_model_len} needs "
            f"{needed / GiB:.2f} GiB there: a rank holds the base layout's weights in every "
            f"layout. For more room {more_room}."
        )


@contextmanager
def _kept_graph_pool(stream: torch.cuda.Stream) -> Iterator[None]:
    """Inside, graphs are captured in a pool that keeps its memory when they are gone."""
    pool = torch.cuda.graph_pool_handle()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=stream):
        torch.zeros(1, device="cuda")
    try:
        with one_graph_pool(pool):
            yield
    finally:
        graph.reset()
        torch.accelerator.empty_cache()


def _start_smallest_kv_cache(runner: ModelRunner) -> None:
    if is_v2(runner):
        from vllm.v1.worker.gpu.cudagraph_utils import _init_minimal_kv_cache_for_profiling

        _init_minimal_kv_cache_for_profiling(cast("RunnerV2", runner))
    else:
        runner._init_minimal_kv_cache_for_profiling()


def _end_smallest_kv_cache(runner: ModelRunner) -> None:
    if is_v2(runner):
        from vllm.v1.worker.gpu.cudagraph_utils import _teardown_profiling_state

        _teardown_profiling_state(cast("RunnerV2", runner))
    else:
        runner._cleanup_profiling_kv_cache()


def _free_bytes() -> int:
    gc.collect()
    torch.accelerator.synchronize()
    torch.accelerator.empty_cache()
    free: int = torch.accelerator.get_memory_info()[0]
    return free
