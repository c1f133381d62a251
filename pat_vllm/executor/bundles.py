"""On which bundles of a Ray placement group an engine's ranks run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

WAY_OUT = (
    "PAT's layouts never span nodes: use one engine per node, with tensor_parallel_size at most "
    "the node's devices, and more engines for more nodes"
)


def choose_bundles(
    nodes: Mapping[int, str],
    ranks: int,
    wanted: Sequence[int] | None = None,
    engine_node: str | None = None,
) -> list[int]:
    """The bundle of each rank, all on one node.

    Args:
        nodes: node of each bundle that has a device.
        ranks: how many are needed.
        wanted: `VLLM_RAY_BUNDLE_INDICES`, if set; None: the first bundles of a node that has
            enough, preferably of `engine_node`.

    Raises:
        ValueError: the bundles do not exist, are too few, or lie on several nodes.
    """
    if wanted is not None:
        return _checked(list(wanted), nodes, ranks)
    if len(nodes) < ranks:
        raise ValueError(
            f"tensor_parallel_size={ranks}, but the placement group has {len(nodes)} bundles with "
            "a device; make it larger, or set pat.launcher='mp' to start workers outside of it"
        )
    by_node: dict[str, list[int]] = {}
    for bundle, node in sorted(nodes.items()):
        by_node.setdefault(node, []).append(bundle)
    enough = [node for node, bundles in by_node.items() if len(bundles) >= ranks]
    if not enough:
        raise ValueError(
            f"tensor_parallel_size={ranks}, but the placement group has at most "
            f"{max(map(len, by_node.values()))} bundles on one node ({_spread(by_node)}). {WAY_OUT}"
        )
    node = engine_node if engine_node in enough else enough[0]
    return by_node[node][:ranks]


def _checked(wanted: list[int], nodes: Mapping[int, str], ranks: int) -> list[int]:
    if len(wanted) != ranks or len(set(wanted)) != ranks:
        raise ValueError(
            f"VLLM_RAY_BUNDLE_INDICES={_listed(wanted)} must name {ranks} different bundles, one "
            f"for each rank of tensor_parallel_size={ranks}"
        )
    if unknown := [bundle for bundle in wanted if bundle not in nodes]:
        raise ValueError(
            f"VLLM_RAY_BUNDLE_INDICES={_listed(wanted)} names {unknown}; the placement group's "
            f"bundles with a device are {sorted(nodes)}"
        )
    by_node: dict[str, list[int]] = {}
    for bundle in wanted:
        by_node.setdefault(nodes[bundle], []).append(bundle)
    if len(by_node) > 1:
        raise ValueError(
            f"VLLM_RAY_BUNDLE_INDICES={_listed(wanted)} names bundles on several nodes "
            f"({_spread(by_node)}). {WAY_OUT}"
        )
    return wanted


def _listed(bundles: Sequence[int]) -> str:
    return ",".join(map(str, bundles))


def _spread(by_node: Mapping[str, Sequence[int]]) -> str:
    return "; ".join(f"node {node}: {list(bundles)}" for node, bundles in by_node.items())
