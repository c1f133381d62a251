"""Checks on which nodes Ray has put engines, and finds out on which GPUs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import ray
from ray.util.placement_group import placement_group_table
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy


def check_nodes(group: Any, engines: Sequence[Sequence[int]]) -> None:
    """Refuse engines that a placement group has on several nodes.

    Args:
        group: the placement group, which is ready.
        engines: the bundles of each engine.

    Raises:
        ValueError: names the engine and the nodes.
    """
    node_of = placement_group_table(group)["bundles_to_node_id"]
    addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    for number, bundles in enumerate(engines):
        nodes = Counter(node_of[bundle] for bundle in bundles)
        if len(nodes) == 1:
            continue
        where = ", ".join(f"{count} on {addresses[node]}" for node, count in nodes.items())
        raise ValueError(
            f"--vllm.tensor_parallel_size {len(bundles)}: a PAT engine does not span nodes, and of "
            f"the GPUs for engine {number} Ray has put {where}. OpenRLHF has the GPUs of all "
            "engines packed onto as few nodes as possible: use a --vllm.tensor_parallel_size that "
            "divides the free GPUs of each node, or --vllm.num_engines for fewer nodes"
        )


async def gpus_of_bundles(bundles: list[int], share: float) -> list[str]:
    """Ids of the GPUs in these bundles of the current placement group, in their order.

    The engine shows them to workers that Ray does not start. A Ray task in each bundle finds out.

    Args:
        bundles: their indices; they must be on this node.
        share: the fraction of a GPU that each task asks Ray for: what the engine may use.

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
                '--vllm.pat \'{"launcher": "mp"}\' starts all workers on the node of the engine\'s '
                'actor, but Ray put a GPU of it on another; use the launcher "ray", which needs '
                "them on one node only, or narrower engines"
            )
        gpus += ids
    return gpus


@ray.remote
def _place() -> tuple[str, list[str]]:
    ids = ray.get_runtime_context().get_accelerator_ids()["GPU"]
    return ray.get_runtime_context().get_node_id(), ids
