"""Prefixes that ended requests left in prefix caches, and which of them a switch carries. Pure.

A chain is the hashes of a request's full blocks, the first block first. A hash stands for all
tokens up to the end of its block, so that equal hashes mean equal KV, and what two chains have in
common is a prefix of both.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar

Chain: TypeAlias = Sequence[Hashable]
Block = TypeVar("Block")

REMEMBERED_BLOCKS = 1 << 20
"""Blocks of all remembered chains together; the least recently used chains are forgotten first."""
_PRIOR_BLOCKS = 256
"""Blocks that count as seen before any were, half of them asked for again."""
_WINDOW_BLOCKS = 1 << 16
"""Blocks over which the chance is learned; older ones count half, a quarter and so on."""


class Chains:
    """The chains of ended requests, and the chance that they are asked for again.

    A request that continues a chain, such as the next turn of a conversation, takes its place.
    """

    def __init__(self) -> None:
        self._by_end: dict[Hashable, Chain] = {}
        self._blocks = 0
        self._left = float(_PRIOR_BLOCKS)
        self._asked = _PRIOR_BLOCKS / 2

    @property
    def chance(self) -> float:
        """Share of the blocks left by ended requests that later ones ask for."""
        return min(1.0, self._asked / self._left)

    def arrived(self, chain: Chain, unused: int) -> None:
        """A request has arrived.

        Args:
            chain: of its prompt.
            unused: leading blocks of it that are cached and that no request uses.
        """
        self._asked += unused
        self._replace(chain)

    def ended(self, chain: Chain, unused: int) -> None:
        """A request has ended.

        Args:
            chain: of its prompt and its response.
            unused: leading blocks of it that are cached and that no request uses any more.
        """
        self._left += unused
        if self._left > _WINDOW_BLOCKS:
            self._left, self._asked = self._left / 2, self._asked / 2
        self._replace(chain)
        if chain:
            self._by_end[chain[-1]] = chain
            self._blocks += len(chain)
        while self._blocks > REMEMBERED_BLOCKS:
            self._drop(next(iter(self._by_end)))

    def latest(self) -> list[Chain]:
        """The chains, the last used one first."""
        return list(reversed(self._by_end.values()))

    def forget(self) -> None:
        """Forget all chains: caches were reset. The chance remains."""
        self._by_end.clear()
        self._blocks = 0

    def _replace(self, chain: Chain) -> None:
        """Forget the chains that this one continues."""
        for end in self._by_end.keys() & chain:
            self._drop(end)

    def _drop(self, end: Hashable) -> None:
        self._blocks -= len(self._by_end.pop(end))


@dataclass(frozen=True)
class PlacedChain:
    """A chain at a switch: the replicas that have it, and will have it."""

    hashes: Chain
    source_replica: int
    target_replica: int


@dataclass(frozen=True)
class CachedBlock(Generic[Block]):
    """A block of a source replica's cache that a switch carries."""

    source_replica: int
    block: Block


def fill(
    chains: Iterable[PlacedChain],
    find: Callable[[int, Hashable], Block | None],
    held: Sequence[set[Hashable]],
    room: Sequence[int],
) -> list[list[CachedBlock[Block]]]:
    """Choose the cached blocks that each target replica gets, as far as it has room.

    Args:
        chains: the most wanted one first.
        find: the block of a source replica with this hash; None where it has none.
        held: hashes that each target replica has in any case. With a block it has all before it.
            What is chosen is added.
        room: blocks for which each target replica has room.

    Returns:
        For each target replica its blocks, the most wanted one first. No hash comes twice, and none
        comes before its predecessor in a chain: without it, it could not be found.
    """
    chosen: list[list[CachedBlock[Block]]] = [[] for _ in room]
    for chain in chains:
        blocks, has = chosen[chain.target_replica], held[chain.target_replica]
        first = bisect_left(chain.hashes, True, key=lambda one: one not in has)
        for one in chain.hashes[first:]:
            if len(blocks) == room[chain.target_replica]:
                break
            block = find(chain.source_replica, one)
            if block is None:
                break
            blocks.append(CachedBlock(chain.source_replica, block))
            has.add(one)
    return chosen
