"""The GPUs that Ray gave to an engine whose workers are not Ray's. Real Ray, two nodes."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("openrlhf", reason="make test-openrlhf")
ray = pytest.importorskip("ray")
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes with three GPUs each, in Ray's books only."""
    from ray.cluster_utils import Cluster

    # Ray's sockets lie in it, and their paths must be short.
    with (
        tempfile.TemporaryDirectory(
            prefix="pat-", dir="/tmp", ignore_cleanup_errors=True
        ) as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Where `Cluster` writes down its address. In Ray's default folder, other programs of this
        # user would read it, and that folder exists only where Ray ran before.
        patch.setenv("RAY_TMPDIR", folder)
        options = {"num_cpus": 8, "num_gpus": 3, "include_dashboard": False}
        nodes = Cluster(initialize_head=True, head_node_args=options)
        try:
            nodes.add_node(num_cpus=8, num_gpus=3)
            ray.init(address=nodes.address)
            yield
        finally:
            ray.shutdown()
            nodes.shutdown()


def gpus(strategy: str, bundles: list[int], share: float) -> tuple[list[str], list[str]]:
    """What an actor in the first bundle finds, and what Ray says in each bundle by itself."""
    from pat_openrlhf.placement import gpus_of_bundles
    from ray.util.placement_group import placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    class Engine:
        async def gpus(self) -> list[str]:
            return await gpus_of_bundles(bundles, share)

    @ray.remote(num_cpus=0)
    def own_gpu() -> str:
        return str(ray.get_gpu_ids()[0])

    group = placement_group([{"GPU": 1, "CPU": 1}] * 3, strategy=strategy)
    ray.get(group.ready())
    try:

        def in_bundle(index: int) -> Any:
            return PlacementGroupSchedulingStrategy(
                group,
                placement_group_bundle_index=index,
                placement_group_capture_child_tasks=True,
            )

        actor: Any = ray.remote(num_cpus=0)(Engine)
        engine = actor.options(scheduling_strategy=in_bundle(bundles[0])).remote()
        found = ray.get(engine.gpus.remote())
        said = [
            own_gpu.options(num_gpus=share, scheduling_strategy=in_bundle(bundle)).remote()
            for bundle in bundles
        ]
        return found, ray.get(said)
    finally:
        ray.util.remove_placement_group(group)


@pytest.mark.parametrize("share", [1, 0.2])
def test_gpus_of_bundles(cluster, share):
    found, said = gpus("STRICT_PACK", [2, 0], share)
    assert found == said and len(set(found)) == 2


def test_bundles_on_several_nodes(cluster):
    with pytest.raises(ValueError, match=r'--vllm\.pat \'{"launcher": "mp"}\'.*several'):
        gpus("SPREAD", [0, 1, 2], 1)
