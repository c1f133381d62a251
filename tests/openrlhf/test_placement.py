"""The nodes and GPUs that Ray gives to engines. Real Ray, two nodes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.ray_nodes import ray_nodes

pytest.importorskip("openrlhf", reason="make test-openrlhf")
ray = pytest.importorskip("ray")


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    """Two nodes with three GPUs each."""
    with ray_nodes(3, 3):
        yield


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
        of_bundles = ray.get(engine.gpus.remote())
        own = [
            own_gpu.options(num_gpus=share, scheduling_strategy=in_bundle(bundle)).remote()
            for bundle in bundles
        ]
        return of_bundles, ray.get(own)
    finally:
        ray.util.remove_placement_group(group)


@pytest.mark.parametrize("share", [1, 0.2])
def test_gpus_of_bundles(cluster: None, share: float) -> None:
    of_bundles, own = gpus("STRICT_PACK", [2, 0], share)
    assert of_bundles == own and len(set(own)) == 2


def test_bundles_on_several_nodes(cluster: None) -> None:
    message = r'--vllm\.pat \'{"launcher": "mp"}\'.*on another; use the launcher'
    with pytest.raises(ValueError, match=message):
        gpus("SPREAD", [0, 1, 2], 1)


def test_an_engine_that_would_be_on_two_nodes(
    cluster: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenRLHF packs two engines of two GPUs: three GPUs are on one node. None is started."""
    from openrlhf.trainer.ray import vllm_engine
    from pat_openrlhf.engines import PatEngines
    from pat_openrlhf.options import EngineOptions

    engines = PatEngines(EngineOptions({}, num_engines=2))
    monkeypatch.setattr(vllm_engine, "RolloutRayActor", engines)
    monkeypatch.setattr(ray, "remote", lambda *given: pytest.fail("an engine is made"))
    message = r"tensor_parallel_size 2: .* for engine 1 Ray has put 1 on \S+, 1 on \S+\."
    with pytest.raises(ValueError, match=message):
        vllm_engine.create_vllm_engines(2, 2, "model", 0, False, False, True, 256)
