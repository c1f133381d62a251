"""What the engine core and the workers say to each other at a switch. Pure values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pat_vllm.kv_transfer.plan import BlockMove
from pat_vllm.layout import Layout


@dataclass(frozen=True)
class SwitchOrder:
    """A switch, as the workers carry it out.

    Attributes:
        epoch: number of this switch; together with the replica it seeds unseeded sampling.
        source, target: the layouts.
        moves: KV block moves; empty when nothing migrates.
        placement: target replica of each request whose runner state is carried.
    """

    epoch: int
    source: Layout
    target: Layout
    moves: tuple[BlockMove, ...] = ()
    placement: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SwitchTimes:
    """Seconds that one rank spent on the parts of a switch, and the bytes that it moved."""

    states: float
    kv: float
    weights: float
    activate: float
    kv_bytes: int
    weight_bytes: int = 0


@dataclass(frozen=True)
class TransferRates:
    """Measured at start: KV exchange bandwidth (bytes/s) and prefill rate (tokens/s) by tp."""

    bandwidth: float
    prefill_rate: Mapping[int, float]


@dataclass(frozen=True)
class CallFailed:
    """A worker's reply to a call that failed, for a reason that is not PAT's."""

    error: str
