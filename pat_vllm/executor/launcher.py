"""Which executor starts an engine's workers: processes of this host, or actors of a Ray cluster.

At a start, `plugin.py` asks for the class, and then has `prepare_launch` check what it needs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pat_vllm.patches.front_end import note_ray_address
from pat_vllm.start.setup import layout_name, options_of

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig
    from vllm.v1.executor.abstract import Executor


def executor_class(vllm_config: VllmConfig) -> type:
    """The executor that `distributed_executor_backend="pat"` stands for.

    Raises:
        ValueError: Ray is asked for and cannot be used here.
    """
    # vLLM asks for the class of a layout's copy of a config, too, but starts nothing with it.
    launches_nothing = layout_name(vllm_config) is not None
    launcher = "mp" if launches_nothing else options_of(vllm_config).launcher
    if launcher == "auto":
        launcher = "ray" if _in_placement_group(vllm_config.parallel_config) else "mp"
    if launcher == "ray":
        _check_ray()
        from pat_vllm.executor.ray import PATRayExecutor

        return PATRayExecutor
    from pat_vllm.executor.executor import PATExecutor

    return PATExecutor


def stock_backend(parallel: ParallelConfig) -> str:
    """The `distributed_executor_backend` that vLLM would choose without PAT, if none is named."""
    if parallel.world_size_across_dp == 1:
        # vLLM's CPU workers are processes of their own.
        return "uni" if _ray_device_key() else "mp"
    return "ray" if _in_placement_group(parallel) else "mp"


def prepare_launch(
    parallel: ParallelConfig, launcher: Literal["auto", "mp", "ray"], executor: type[Executor]
) -> None:
    """Check an engine's executor class against its `launcher`, and note what it needs to start.

    Args:
        parallel: the engine's; Ray's address and placement group are noted in it.
        launcher: PAT's option.
        executor: PAT's class for `launcher`, or the one of the two that the user has named himself.

    Raises:
        ValueError: `launcher` names the other executor, or the placement group does not suit.
    """
    group = parallel.placement_group
    if isinstance(group, list):
        raise ValueError(
            f"placement_group is a list of {len(group)}, as ROLL gives it to an executor of its "
            "own; PAT's ranks are placed in a PlacementGroup of Ray's, or with "
            "pat.launcher='mp' and none"
        )
    own = "ray" if executor.uses_ray else "mp"
    if launcher not in ("auto", own):
        raise ValueError(
            f"pat.launcher={launcher!r}, but distributed_executor_backend={executor.__name__} is "
            f'the executor of launcher={own!r}; use distributed_executor_backend="pat", or leave '
            "pat.launcher at 'auto'"
        )
    if own == "ray":
        _check_ray()
        _prepare_ray(parallel)


def _prepare_ray(parallel: ParallelConfig) -> None:
    """Note the Ray cluster and placement group of this process in a config, and check them.

    The engine core may be another process, in which Ray is not initialized. It finds both in the
    config.
    """
    import ray

    if not ray.is_initialized():
        return
    if parallel.placement_group is None:
        parallel.placement_group = ray.util.get_current_placement_group()
    note_ray_address(parallel, ray.get_runtime_context().gcs_address)
    group = parallel.placement_group
    if group is not None and ray.util.placement_group_table(group)["state"] == "CREATED":
        from pat_vllm.executor.ray import place_ranks

        # The executor checks again. Here a mistake is an error in the caller's process, at once.
        place_ranks(parallel)


def _in_placement_group(parallel: ParallelConfig) -> bool:
    """Whether vLLM would choose Ray: there is a placement group, given or around this process."""
    from vllm.ray.lazy_utils import is_ray_initialized

    if not _ray_device_key():
        return False
    if parallel.placement_group is not None:
        return True
    if not is_ray_initialized():
        return False
    from ray.util import get_current_placement_group

    return get_current_placement_group() is not None


def _check_ray() -> None:
    """Raise ValueError if Ray is not installed, or vLLM cannot use it on this platform."""
    from vllm.platforms import current_platform
    from vllm.v1.executor.ray_utils import ray_is_available

    if not ray_is_available():
        raise ValueError(
            "pat.launcher='ray' needs Ray, which is not installed: install it (pip install ray), "
            "or set pat.launcher='mp'"
        )
    if not _ray_device_key():
        raise ValueError(
            f"pat.launcher='ray' runs on CUDA and ROCm, but vLLM's platform here is "
            f"{current_platform.device_name!r}; set pat.launcher='mp'"
        )


def _ray_device_key() -> str:
    """Ray's name for this platform's devices; empty where vLLM cannot use Ray."""
    from vllm.platforms import current_platform

    return current_platform.ray_device_key
