"""Layouts and their arithmetic. Pure: imports neither torch nor vLLM."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias

Experts: TypeAlias = Literal["tp", "ep"]
"""How an engine's experts lie in a group: each is cut over its ranks, as attention is ("tp"), or
each rank has some of them whole ("ep"). The same in all of its layouts."""

_NAME = re.compile(r"tp(\d+)dp(\d+)", re.ASCII)


@dataclass(frozen=True)
class Place:
    """A rank's place in a group, by which its weights are cut."""

    tp: int
    tp_rank: int
    experts: Experts = "tp"


@dataclass(frozen=True, order=True)
class Layout:
    """How the ranks are grouped: `replicas` tensor-parallel groups of `tp` ranks each.

    Replica `i` owns every `replicas`-th global rank from rank `i` on. Layouts nest so: where `tp`
    divides the tp of a wider layout, a group lies within one of the wider groups, and the shard of
    a rank in the wider layout within its shard in this one. What a rank holds of its own requests'
    KV and of the weights is all that it needs in a wider layout.
    """

    tp: int
    replicas: int

    def __post_init__(self) -> None:
        if self.tp < 1 or self.replicas < 1:
            raise ValueError(f"a layout needs tp >= 1 and replicas >= 1, got {self}")

    @classmethod
    def of(cls, tp: int, world_size: int) -> Layout:
        """The layout of `world_size` ranks with tensor parallelism `tp`.

        Raises:
            ValueError: `tp` does not divide `world_size`.
        """
        if tp < 1 or world_size % tp:
            raise ValueError(f"tp={tp} does not divide the {world_size} ranks of this engine")
        return cls(tp, world_size // tp)

    @classmethod
    def parse(cls, name: str) -> Layout:
        """The layout that `str` gives this name, such as "tp1dp4".

        Raises:
            ValueError: it is not the name of a layout.
        """
        match = _NAME.fullmatch(name)
        if match is None:
            raise ValueError(f"expected the name of a layout, such as 'tp1dp4', got {name!r}")
        return cls(int(match[1]), int(match[2]))

    def __str__(self) -> str:
        return f"tp{self.tp}dp{self.replicas}"

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return self.tp * self.replicas

    def replica_of(self, rank: int) -> int:
        """Replica that the global rank belongs to."""
        return rank % self.replicas

    def tp_rank_of(self, rank: int) -> int:
        """Position of the global rank within its tensor-parallel group."""
        return rank // self.replicas

    def place_of(self, rank: int, experts: Experts = "tp") -> Place:
        """The global rank's place, by which its weights are cut."""
        return Place(self.tp, self.tp_rank_of(rank), experts)

    def ranks_of(self, replica: int) -> range:
        """Global ranks of a replica, in tensor-parallel order."""
        return range(replica, self.world_size, self.replicas)

    def leader_of(self, replica: int) -> int:
        """Global rank whose output stands for the whole replica."""
        return self.ranks_of(replica)[0]

    def kv_heads_per_rank(self, num_kv_heads: int) -> int:
        """KV heads that one rank stores; at least one, then heads are replicated.

        Raises:
            ValueError: the heads can be neither split nor replicated evenly.
        """
        if num_kv_heads >= self.tp:
            if num_kv_heads % self.tp:
                raise ValueError(f"{num_kv_heads} KV heads cannot be split over tp={self.tp}")
            return num_kv_heads // self.tp
        if self.tp % num_kv_heads:
            raise ValueError(f"{num_kv_heads} KV heads cannot be replicated over tp={self.tp}")
        return 1

    def kv_heads_of(self, tp_rank: int, num_kv_heads: int) -> range:
        """Global KV heads that tensor-parallel rank `tp_rank` stores, in its storage order."""
        per_rank = self.kv_heads_per_rank(num_kv_heads)
        if num_kv_heads >= self.tp:
            start = tp_rank * per_rank
        else:
            start = tp_rank // (self.tp // num_kv_heads)
        return range(start, start + per_rank)


def device_of(rank: int, world_size: int) -> int:
    """Index of the device that a global rank runs on, among the `world_size` of its node.

    The ranks of a group are far apart (see `Layout`); their devices are neighbours, which may have
    a link of their own. The digits of a rank are those of its device reversed, in the number system
    of the prime factors of `world_size`: of 8 ranks, rank 1 = 001 has device 4 = 100.
    """
    device, place, block, factor = 0, 1, world_size, 2
    # `block` goes down by one prime factor a round, `place`, the value of a device's digit, up.
    while block > 1:
        if block % factor:
            factor += 1
            continue
        block //= factor
        device += rank // block % factor * place
        place *= factor
    return device
