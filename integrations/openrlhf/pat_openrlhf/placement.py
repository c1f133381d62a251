"""Which GPUs Ray gave to an engine whose workers are not Ray's."""

from __future__ import annotations

from typing import Any

import ray
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


async def gpus_of_bundles(bundles: list[int], share: float) -> list[str]:
    """Ids of the GPUs in these bundles of the current placement group, in their order.

    Args:
        bundles: their indices; they must be on this node.
        share: of each GPU that the engine may use.

    Raises:
        ValueError: a bundle is on another node.
    """
    group: Any = ray.util.get_current_placement_group()

    def strategy(bundle: int) -> PlacementGroupSchedulingStrategy:
        return PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)

    places = [
        _place.options(num_cpus=0, num_gpus=share, scheduling_strategy=strategy(bundle)).remote()
        for bundle in bundles
    ]
    here = ray.get_runtime_context().get_node_id()
    gpus = []
    for place in places:
        node, ids = await place
        if node != here:
            raise ValueError(
                '--vllm.pat \'{"launcher": "mp"}\' starts all workers on one node, but Ray put '
                'the engine\'s GPUs on several; use the launcher "ray", or narrower engines'
            )
        gpus += ids
    return gpus


@ray.remote
def _place() -> tuple[str, list[str]]:
    ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return ray.get_runtime_context().get_node_id(), ids
