"""The executor whose workers are actors of a Ray cluster."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

try:
    import ray
except ImportError:
    raise ImportError(
        "PATRayExecutor needs Ray, which is not installed: install it (pip install ray), or use "
        'distributed_executor_backend="pat" with pat.launcher="mp"'
    ) from None

import vllm.envs as envs
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.executor.ray_executor_v2 import RayExecutorV2
from vllm.v1.executor.ray_utils import PG_WAIT_TIMEOUT

from pat_vllm.executor.bundles import WAY_OUT, choose_bundles
from pat_vllm.executor.executor import PATExecutorMixin
from pat_vllm.executor.lanes import Network
from pat_vllm.executor.readers import reader_of
from pat_vllm.patches.front_end import noted_ray_address

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

logger = init_logger(__name__)

_BUNDLE_INDICES = "VLLM_RAY_BUNDLE_INDICES"
_WAIT_LOG_SECONDS = 10


class PATRayExecutor(PATExecutorMixin, RayExecutorV2):
    """Adaptive tensor parallelism over Ray actors, all on one node, not necessarily this one."""

    supports_pp = False
    response_mqs: list[Any]

    def _init_executor(self) -> None:
        """Place the ranks on one node, then start them as vLLM does."""
        self._own_group: PlacementGroup | None = None
        # An engine in this process before this one has frozen vLLM's view of the environment.
        envs.disable_envs_cache()
        try:
            self._join_cluster()
            bundles = place_ranks(self.parallel_config)
            self._network = self._network_to(bundles[0])
            # vLLM would take the first bundles, which may be on several nodes.
            with _environment(_BUNDLE_INDICES, ",".join(map(str, bundles))):
                super()._init_executor()
        except BaseException:
            # Actors that have started would keep their devices as long as this process lives.
            self.shutdown()
            raise

    def _join_cluster(self) -> None:
        """Be in the Ray cluster, and have a placement group."""
        parallel = self.parallel_config
        if not ray.is_initialized():
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # as vLLM does
            ray.init(address=noted_ray_address(parallel), runtime_env=parallel.ray_runtime_env)
        group = parallel.placement_group or ray.util.get_current_placement_group()
        if group is None:
            # vLLM would make one, which may span nodes.
            group = self._own_group = _group_on_one_node(parallel.world_size)
        _wait_until_ready(group)
        parallel.placement_group = group

    def _network_to(self, bundle: int) -> Network:
        """How to reach the ranks, which are all on the node of a bundle."""
        node = placement_group_table(self.parallel_config.placement_group)["bundles_to_node_id"][
            bundle
        ]
        if node == ray.get_runtime_context().get_node_id():
            return Network()
        address = next(info["NodeManagerAddress"] for info in ray.nodes() if info["NodeID"] == node)
        ranks = range(self.parallel_config.world_size)
        return Network(ray.util.get_node_ip_address(), dict.fromkeys(ranks, address))

    def _post_init_executor(self) -> None:
        super()._post_init_executor()
        # When a worker has died, replies to control RPCs must be cancelled, too.
        self.response_mqs = [reader_of(mq) for mq in self.response_mqs]

    def shutdown(self) -> None:
        """End the actors, and give back the placement group unless it is the caller's."""
        super().shutdown()
        group, self._own_group = self._own_group, None
        if group is not None:
            self.parallel_config.placement_group = None
            if ray.is_initialized():
                remove_placement_group(group)

    def _ended_workers(self) -> list[str]:
        workers = getattr(self, "ray_worker_handles", ())
        running = {worker.run_ref: worker.rank for worker in workers if worker.run_ref is not None}
        if not running or not ray.is_initialized():
            return []
        ended, _ = ray.wait(list(running), num_returns=len(running), timeout=0)
        return [f"worker {running[ref]}, a Ray actor, died" for ref in ended]


def place_ranks(parallel: ParallelConfig) -> list[int]:
    """The bundle of each rank, in the placement group of a config.

    Raises:
        ValueError: see `choose_bundles`.
    """
    group = parallel.placement_group
    assert group is not None
    node_of_bundle = placement_group_table(group)["bundles_to_node_id"]
    nodes = {
        bundle: node_of_bundle[bundle]
        for bundle, resources in enumerate(group.bundle_specs)
        if resources.get(current_platform.ray_device_key)
    }
    wanted = os.environ.get(_BUNDLE_INDICES)
    return choose_bundles(
        nodes,
        parallel.world_size,
        _parse_indices(wanted) if wanted else None,
        ray.get_runtime_context().get_node_id(),
    )


def _group_on_one_node(ranks: int) -> PlacementGroup:
    """A new placement group with a device for each rank, all on one node."""
    device = current_platform.ray_device_key
    most = max(int(node["Resources"].get(device, 0)) for node in ray.nodes() if node["Alive"])
    if most < ranks:
        raise ValueError(
            f"tensor_parallel_size={ranks}, but no node of the Ray cluster has more than {most} "
            f"{device}s. {WAY_OUT}"
        )
    return placement_group(
        [{device: 1.0}] * ranks,
        strategy="STRICT_PACK",
        # Preferably this one, whose memory the ranks then share.
        _soft_target_node_id=ray.get_runtime_context().get_node_id(),
    )


def _wait_until_ready(group: PlacementGroup) -> None:
    """Wait for a placement group's resources, as long as vLLM does.

    Raises:
        ValueError: they did not become free.
    """
    give_up = time.monotonic() + PG_WAIT_TIMEOUT
    while not group.wait(_WAIT_LOG_SECONDS):
        if time.monotonic() > give_up:
            raise ValueError(
                f"the placement group {group.bundle_specs} was not ready within {PG_WAIT_TIMEOUT} "
                "seconds; see `ray status` for what holds the devices"
            )
        logger.info("waiting for the placement group %s; see `ray status`", group.bundle_specs)


def _parse_indices(value: str) -> list[int]:
    try:
        return [int(index) for index in value.split(",")]
    except ValueError:
        raise ValueError(
            f"{_BUNDLE_INDICES}={value!r} must be bundle indices separated by commas"
        ) from None


@contextlib.contextmanager
def _environment(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
