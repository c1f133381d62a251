"""A Ray cluster of several nodes, all of them on this machine."""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.engines import engine_processes

GONE_WITHIN = 150.0
"""Seconds from an engine's end until its last process is gone, on a busy machine."""


@contextlib.contextmanager
def ray_nodes(*gpus: int, **environment: str) -> Iterator[str]:
    """Start a node for each number of GPUs, which exist in Ray's books only; this process joins.

    Yields the cluster's address. What Ray starts has this process's environment and `environment`.
    """
    import ray
    from ray.cluster_utils import Cluster

    # Ray's sockets lie in it, and their paths must be short.
    with (
        tempfile.TemporaryDirectory(
            prefix="pat-", dir="/tmp", ignore_cleanup_errors=True
        ) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        ours = {
            "RAY_USAGE_STATS_ENABLED": "0",
            # Ray would end workers when other programs use up the memory.
            "RAY_memory_monitor_refresh_ms": "0",
            # Where `Cluster` writes down its address. In Ray's default folder, other programs of
            # this user would read it, and that folder exists only where Ray ran before.
            "RAY_TMPDIR": folder,
        }
        patch.delenv("RAY_ADDRESS", raising=False)
        for name, value in (ours | environment).items():
            patch.setenv(name, value)
        node = {"num_cpus": 16, "include_dashboard": False, "object_store_memory": 200 << 20}
        first, *others = gpus
        cluster = Cluster(initialize_head=True, head_node_args={**node, "num_gpus": first})
        try:
            for number in others:
                cluster.add_node(**node, num_gpus=number)
            ray.init(address=cluster.address)
            yield cluster.address
        finally:
            ray.shutdown()
            cluster.shutdown()


def assert_gone(before: list[psutil.Process]) -> None:
    """No process of an engine is left on any node, but for those that were there `before`."""
    give_up = time.monotonic() + GONE_WITHIN
    while left := engine_processes(before):
        assert time.monotonic() < give_up, f"still there: {left}"
        time.sleep(0.2)
