"""Who decides on a switch: sees the live state, answers with a layout. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from pat_vllm.config import PATConfig, SchedulePolicyConfig, StaticPolicyConfig
from pat_vllm.layout import Layout

SETTLE_SECONDS = 0.05
"""A batch arrives request by request. Before this long without an arrival its size is not known,
and a decision would take its first requests for its tail."""


@dataclass(frozen=True)
class LiveState:
    """What a policy may look at before a step.

    Attributes:
        layout: the active layout.
        live: unfinished requests, running and waiting.
        quiet: seconds since a request arrived last.
    """

    layout: Layout
    live: int
    quiet: float


class Policy(Protocol):
    """Chooses the layout. Asked before each step, so it must be quick (microseconds)."""

    @property
    def home(self) -> Layout:
        """The layout in which the engine starts and to which it returns when idle."""
        ...

    def choose(self, state: LiveState) -> Layout:
        """The layout to be in for the next step."""
        ...


@dataclass(frozen=True)
class StayPolicy:
    """Changes layout only on request, and goes home when idle."""

    home: Layout

    def choose(self, state: LiveState) -> Layout:
        return state.layout


@dataclass(frozen=True)
class SchedulePolicy:
    """A fixed table from live requests to layouts.

    `table` lists (K, layout) in ascending K: with at most K live requests be in that layout;
    with more than the last K be at home.
    """

    home: Layout
    table: tuple[tuple[int, Layout], ...]

    def choose(self, state: LiveState) -> Layout:
        if state.quiet < SETTLE_SECONDS:
            return state.layout
        for limit, layout in self.table:
            if state.live <= limit:
                return layout
        return self.home


def make_policy(config: PATConfig, layouts: Sequence[Layout]) -> Policy:
    """The policy that the user asked for, over the engine's layouts (base first)."""
    by_tp = {layout.tp: layout for layout in layouts}
    match config.policy:
        case StaticPolicyConfig(tp=tp):
            return StayPolicy(home=by_tp[tp])
        case SchedulePolicyConfig(switch_at=switch_at):
            return SchedulePolicy(
                home=layouts[0],
                table=tuple((live, by_tp[tp]) for live, tp in sorted(switch_at.items())),
            )
        case _:
            return StayPolicy(home=layouts[0])
