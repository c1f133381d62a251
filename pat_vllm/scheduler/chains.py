"""Prefixes that ended requests left in prefix caches, and which of them a switch carries. Pure.

A chain is the hashes of a request's full blocks, the first block first. A hash stands for all
tokens up to the end of its block, so that equal hashes mean equal KV, and what two chains have in
common is a prefix of both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, Generic, NamedTuple, TypeAlias, TypeVar

from pat_vllm.models.kinds import Kinds, longest_hit

Chain: TypeAlias = Sequence[bytes]
Block = TypeVar("Block")

REMEMBERED_BLOCKS = 1 << 20
"""Blocks of all remembered chains together; the chains that ended first are forgotten first."""
_WINDOW = 1024
"""Requests over which the chance is learned; earlier ones count half, a quarter and so on."""


class Chains:
    """The chains of ended requests, and the chance that they are asked for again.

    A request that continues a chain, such as the next turn of a conversation, removes it when it
    arrives, and adds its own when it ends.
    """

    def __init__(self) -> None:
        # With their `unused`, by last hash; the one that ended first comes first.
        self._by_end: dict[bytes, tuple[Chain, int]] = {}
        self._blocks = 0
        self._requests = self._blocks_left = self._blocks_reused = 0.0

    @property
    def chance(self) -> float:
        """Share of the blocks left by ended requests that later ones ask for.

        It begins with a half, which weighs as much as one request.
        """
        left, reused = self._blocks_left, self._blocks_reused
        share = min(1.0, reused / left) if left else 0.0
        return (self._requests * share + 0.5) / (self._requests + 1)

    def arrived(self, chain: Chain, unused: int | None) -> None:
        """A request has arrived.

        Args:
            chain: of its prompt.
            unused: leading blocks of it that are cached and that no request uses; None for another
                sample of the same prompt (GRPO), which tells nothing of the chance.
        """
        if unused is not None:
            # A switch may have left blocks behind, which `unused` lacks. They count all the same:
            # else the chance would stay low, and no later switch would carry any.
            continued = [self._by_end[end][1] for end in self._by_end.keys() & chain]
            self._blocks_reused += max(unused, *continued, 0)
        self._forget_continued(chain)

    def ended(self, chain: Chain, unused: int) -> None:
        """A request has ended.

        Args:
            chain: of its prompt and its response.
            unused: leading blocks of it that are cached and that no request uses any more.
        """
        self._requests += unused > 0
        self._blocks_left += unused
        if self._requests > _WINDOW:
            self._requests, self._blocks_left, self._blocks_reused = (
                value / 2 for value in (self._requests, self._blocks_left, self._blocks_reused)
            )
        self._forget_continued(chain)
        if chain:
            self._by_end[chain[-1]] = chain, unused
            self._blocks += len(chain)
        while self._blocks > REMEMBERED_BLOCKS:
            self._drop(next(iter(self._by_end)))

    def latest(self) -> list[Chain]:
        """The chains, the last ended one first."""
        return [chain for chain, _ in reversed(self._by_end.values())]

    def forget(self) -> None:
        """Forget all chains: caches were reset. The chance remains."""
        self._by_end.clear()
        self._blocks = 0

    def _forget_continued(self, chain: Chain) -> None:
        """Forget the chains that this one continues."""
        for end in self._by_end.keys() & chain:
            self._drop(end)

    def _drop(self, end: bytes) -> None:
        chain, _ = self._by_end.pop(end)
        self._blocks -= len(chain)


class PlacedChain(NamedTuple):
    """A chain at a switch: the replica that has it, and the one that is to have it."""

    hashes: Chain
    source_replica: int
    target_replica: int


class Run(NamedTuple, Generic[Block]):
    """Blocks of a chain, in its order: of one source replica, in its KV cache `group`."""

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

    Of a chain it gets the blocks that vLLM needs, in each KV cache group, to find it as a prefix.

    Args:
        chains: the most wanted one first. A source may lack some of a chain's blocks.
        find: by source replica, hashes and group: the blocks; None for one that is not cached.
        kinds: how each KV cache group attends (full attention, a sliding window, ...).
        held: hashes that each target replica has in any case, by group. What is chosen is added.
        room: blocks for which each target replica has room.

    Returns:
        For each target replica its blocks, the most wanted ones first. No block comes twice, and
        none that a later request could not find.
    """
    chosen: list[list[Run[Block]]] = [[] for _ in room]
    left = list(room)
    for hashes, source, target in chains:
        fits = _what_fits(partial(find, source), kinds, hashes, held[target], left[target])
        for group, (names, blocks) in enumerate(fits):
            if blocks:
                chosen[target].append(Run(source, blocks, group))
                held[target][group].update(names)
                left[target] -= len(blocks)
    return chosen


def _what_fits(
    find: Callable[[Chain, int], Sequence[Block | None]],
    kinds: Kinds,
    chain: Chain,
    held: Sequence[set[bytes]],
    room: int,
) -> list[tuple[list[bytes], list[Block]]]:
    """What a target still needs for a hit of the longest prefix that is cached and has room.

    Returns:
        Hashes and their blocks, by group; nothing where nothing is cached or has room.
    """
    length = len(chain) if room else 0  # of the longest prefix that is cached and has room
    while length:
        places = [
            kind.missing(length, lambda place, hashes=hashes: chain[place] in hashes)  # type: ignore[misc]
            for kind, hashes in zip(kinds, held, strict=True)
        ]
        too_many = sum(map(len, places)) - room
        if too_many > 0:
            # A block less of the prefix frees at most one in each group.
            length -= min(length, -(-too_many // len(kinds)))
            continue
        names = [[chain[place] for place in of_group] for of_group in places]
        blocks: Any = [find(wanted, group) for group, wanted in enumerate(names)]
        if all(map(all, blocks)):
            return list(zip(names, blocks, strict=True))
        # What is cached ends at the first gap; vLLM finds it up to the last hit before that.
        gap = min(
            of_group[hits.index(None)]
            for of_group, hits in zip(places, blocks, strict=True)
            if not all(hits)
        )
        length = longest_hit(kinds, gap, lambda group, at: find([chain[at]], group)[0] is not None)
    return []
