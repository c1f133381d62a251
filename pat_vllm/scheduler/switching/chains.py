"""Prefixes that ended requests left in prefix caches, and which of them a switch carries. Pure.

A chain is the hashes of a request's full blocks, the first block first. A hash stands for all
tokens up to the end of its block, so that equal hashes mean equal KV, and what two chains have in
common is a prefix of both.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from pat_vllm.models.kinds import Kinds, longest_hit

Chain: TypeAlias = Sequence[bytes]
Block = TypeVar("Block")

REMEMBERED_BLOCKS = 1 << 20
"""Most blocks of all remembered chains together; the chains that ended first are forgotten first.
A bound on memory: so many of vLLM's SHA-256 hashes take less than 100 MB."""


class Chains:
    """The chains of ended requests, of which `ReplicaSet` tells.

    A request that continues a chain, such as the next turn of a conversation, removes it when it
    arrives, and adds its own when it ends.
    """

    def __init__(self) -> None:
        # Chains by their last hashes; the chain that ended first comes first.
        self._by_end: dict[bytes, Chain] = {}
        self._blocks = 0

    def arrived(self, chain: Chain) -> None:
        """A request has arrived, with the chain of its prompt."""
        for end in self._by_end.keys() & chain:  # a chain that ends here is a prefix of this one
            self._drop(end)

    def ended(self, chain: Chain) -> None:
        """A request has ended, with the chain of its prompt and its response."""
        self.arrived(chain)
        if chain:
            self._by_end[chain[-1]] = chain
            self._blocks += len(chain)
        while self._blocks > REMEMBERED_BLOCKS:
            self._drop(next(iter(self._by_end)))

    def latest(self) -> list[Chain]:
        """The chains, the last ended one first."""
        return [*reversed(self._by_end.values())]

    def forget(self) -> None:
        """Forget all chains: caches were reset."""
        self._by_end.clear()
        self._blocks = 0

    def _drop(self, end: bytes) -> None:
        self._blocks -= len(self._by_end.pop(end))


class PlacedChain(NamedTuple):
    """A chain at a switch: the replica that has it, and the one that is to have it."""

    hashes: Chain
    source_replica: int
    target_replica: int


class Run(NamedTuple, Generic[Block]):
    """Blocks of a chain, in its order, that one source replica has in KV cache group `group`."""

    source_replica: int
    blocks: Sequence[Block]
    group: int = 0


def fill(
    chains: Iterable[PlacedChain],
    find: Callable[[int, Chain, int], Sequence[Block | None]],
    kinds: Kinds,
    held: Sequence[Sequence[set[bytes]]],
    room: Sequence[int],
) -> list[list[Run[Block]]]:
    """Choose the cached blocks that each target replica gets, as far as it has room.

    A replica gets those blocks of a chain that vLLM needs, in each KV cache group, to find the
    chain as a prefix.

    Args:
        chains: the most wanted one first. A source may lack some of a chain's blocks.
        find: takes a source replica, hashes and a group; returns its cached block for each hash,
            or None.
        kinds: how each KV cache group attends (full attention, a sliding window, ...).
        held: for each target replica and group, the hashes of blocks that it gets in any case.
            The hashes of chosen blocks are added to these sets.
        room: number of blocks for which each target replica has room.

    Returns:
        For each target replica its blocks, the most wanted ones first. No block comes twice, and
        none that a later request could not find.
    """
    chosen: list[list[Run[Block]]] = [[] for _ in room]
    left = list(room)
    for hashes, source, target in chains:
        if not left[target]:
            continue
        lacking = _longest_prefix(partial(find, source), kinds, hashes, held[target], left[target])
        for group, found in enumerate(lacking):
            if found:
                chosen[target].append(Run(source, [*found.values()], group))
                held[target][group].update(found)
                left[target] -= len(found)
    return chosen


def _longest_prefix(
    find: Callable[[Chain, int], Sequence[Block | None]],
    kinds: Kinds,
    chain: Chain,
    held: Sequence[set[bytes]],
    room: int,
) -> list[dict[bytes, Block]]:
    """Find the longest prefix of a chain that the source has cached and the target has room for.

    The search begins with the whole chain, and shortens it until both is true.

    Returns:
        For each group, the blocks of that prefix that the target lacks, by their hashes, in the
        order of the chain; an empty list if there is no such prefix.
    """

    def is_held(group: int) -> Callable[[int], bool]:
        return lambda place: chain[place] in held[group]

    def is_cached(group: int, place: int) -> bool:
        return find([chain[place]], group)[0] is not None

    length = len(chain)
    while length:
        places = [kind.missing(length, is_held(group)) for group, kind in enumerate(kinds)]
        excess = sum(map(len, places)) - room
        if excess > 0:
            # A prefix that is a block shorter needs at most one block less in each group.
            length = max(0, length - math.ceil(excess / len(kinds)))
            continue
        hashes = [[chain[place] for place in of_group] for of_group in places]
        blocks = [find(of_group, group) for group, of_group in enumerate(hashes)]
        gaps = any(block is None for found in blocks for block in found)
        if not gaps:
            return [
                dict(zip(of_group, found, strict=True))  # type: ignore[arg-type]
                for of_group, found in zip(hashes, blocks, strict=True)
            ]
        length = longest_hit(kinds, length - 1, is_cached)
    return []
