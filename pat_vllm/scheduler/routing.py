"""Which replica a request goes to. Pure."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

AFFINITY_SLACK = 4
"""A replica that holds a request's prefix is preferred while it has at most this many live
requests more than the least loaded one, and one more for each `TOKENS_OF_A_REQUEST` that are in its
cache and not in that one's."""
TOKENS_OF_A_REQUEST = 256
"""Tokens to compute again that are as bad as a request more. By simulated agents; half and twice as
many are as good."""

REMEMBERED_PREFIXES = 65_536
"""Prefixes whose replica is remembered; the least recently used are forgotten first."""


class Router:
    """Prefix affinity first, then least load.

    Samples of one prompt and prompts with a common prefix meet in one replica, where its prefix
    cache serves them, unless that replica has too many more requests than another. Caches say where
    a prefix is that has been computed; where others will be, is remembered.
    """

    def __init__(self, block_size: int) -> None:
        """`block_size`: tokens of a block."""
        self._block_size = block_size
        self._replica_of: OrderedDict[Hashable, int] = OrderedDict()

    def route(
        self, prefixes: Sequence[Hashable], loads: Sequence[int], cached: Sequence[int] = ()
    ) -> int:
        """Choose a replica.

        Args:
            prefixes: keys of the request's prefixes, longest first (whole prompt, then blocks).
                They are kept, so hashes rather than tokens.
            loads: live requests of each replica.
            cached: how many of the blocks, from the first on, each replica has in its cache. That
                counts where it is more than any prefix that is remembered.

        Returns:
            Index of the replica.
        """
        least = min(range(len(loads)), key=loads.__getitem__)
        known, length = least, 0
        for i, prefix in enumerate(prefixes):
            if (replica := self._replica_of.get(prefix)) is not None:
                known, length = replica, len(prefixes) - i
                break
        if (longest := max(cached, default=0)) > length:
            holders = [replica for replica, blocks in enumerate(cached) if blocks == longest]
            known = min(holders, key=loads.__getitem__)
        slack = AFFINITY_SLACK
        if cached:
            saved = (cached[known] - cached[least]) * self._block_size
            slack += max(0, saved) // TOKENS_OF_A_REQUEST
        chosen = known if loads[known] - loads[least] <= slack else least
        for prefix in prefixes:
            self._replica_of[prefix] = chosen
            self._replica_of.move_to_end(prefix)
        while len(self._replica_of) > REMEMBERED_PREFIXES:
            self._replica_of.popitem(last=False)
        return chosen

    def forget(self) -> None:
        """Forget every prefix: the replicas changed, or their caches were reset.

        What the caches of the new replicas hold is found there.
        """
        self._replica_of.clear()
