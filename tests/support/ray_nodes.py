"""A Ray cluster of several nodes, all of them on this machine."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import psutil
import pytest

from tests.support import patient_ray
from tests.support.engines import engine_processes

GONE_WITHIN = 150.0
"""Seconds from an engine's end until its last process is gone, on a busy machine."""


@contextlib.contextmanager
def ray_nodes(
    *gpus: int,
    cpus: int = 16,
    object_store: int = 200 << 20,
    log_to_driver: bool = True,
    **environment: str,
) -> Iterator[str]:
    """Start a node for each number of GPUs, which exist in Ray's books only; this process joins.

    Yields the cluster's address. What Ray starts has this process's environment and `environment`.

    Args:
        cpus: of each node.
        object_store: bytes of each node.
        log_to_driver: whether this process prints what Ray's processes print.
    """
    import ray
    from ray._private import services
    from ray.cluster_utils import Cluster

    # Ray's sockets lie in it, and their paths must be short.
    with (
        tempfile.TemporaryDirectory(
            prefix="pat-", dir="/tmp", ignore_cleanup_errors=True
        ) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patient_ray.patch(services, patch.setattr)
        # Ray would end workers when other programs use up the memory.
        ours = {"RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0"}
        for name, value in (ours | patient_ray.ENVIRONMENT | environment).items():
            patch.setenv(name, value)
        for name in ("RAY_ADDRESS", "VLLM_RAY_BUNDLE_INDICES", "VLLM_RAY_PER_WORKER_GPUS"):
            patch.delenv(name, raising=False)
        # There `Cluster` writes down its address for every Ray program of this user. Here it is
        # hidden from others, and from engines, which have to know it by themselves.
        hidden = {"RAY_TMPDIR": folder}
        node: dict[str, Any] = {
            "num_cpus": cpus,
            "include_dashboard": False,
            "object_store_memory": object_store,
        }
        first, *others = gpus
        with variables(hidden):
            cluster = Cluster(initialize_head=True, head_node_args={**node, "num_gpus": first})
        try:
            with variables(hidden):
                for number in others:
                    cluster.add_node(**node, num_gpus=number)
            ray.init(address=cluster.address, log_to_driver=log_to_driver)
            yield cluster.address
        finally:
            ray.shutdown()
            with variables(hidden):
                cluster.shutdown()


@contextlib.contextmanager
def variables(values: Mapping[str, str]) -> Iterator[None]:
    """Inside, environment variables have these values."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in values.items():
            patch.setenv(name, value)
        yield


def until(condition: Callable[[], bool]) -> bool:
    """Whether a condition comes to hold in good time."""
    give_up = time.monotonic() + GONE_WITHIN
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.2)
    return True


def assert_gone(before: list[psutil.Process]) -> None:
    """No process of an engine is left on any node, but for those that were there `before`."""
    assert until(lambda: not engine_processes(before)), engine_processes(before)
