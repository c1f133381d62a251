"""Who decides on a switch: is told what happens, and answers with a layout. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from pat_vllm.layout import Layout
from pat_vllm.predictor.draft_schedule import Schedule
from pat_vllm.predictor.state import LiveState
from pat_vllm.reporting import PredictorReport
from pat_vllm.reporting.listener import EngineListener

SETTLE_SECONDS = 0.05
"""A batch arrives request by request. Before this long without an arrival its size is not known,
and a decision would take its first requests for its tail."""


class Policy(EngineListener):
    """Chooses the layout: `choose` is asked before each step, on the engine's thread.

    After a switch that was refused the engine asks no policy again for about a second, so that none
    needs a pause of its own.
    """

    default_layout: Layout
    """The layout in which the engine awaits its next batch. `batch_over` may change it."""
    control: bool = False
    """Whether the batch that runs, or comes next, stays in one layout for others to be compared
    with it. `batch_over` may change it."""
    drafts: Mapping[Layout, Schedule] = MappingProxyType({})
    """Draft lengths by the number of requests in a replica's step; a layout that is not here drafts
    as the engine's configuration says."""

    def choose(self, state: LiveState) -> Layout:
        """The layout to be in for the next step."""
        raise NotImplementedError

    def report(self, since: float = -math.inf) -> PredictorReport:
        """What was decided, or almost was, and how the predictions do.

        It may be called from every thread, beside the engine's. So it only reads.

        Args:
            since: decisions before this time are left out.
        """
        return PredictorReport()


@dataclass(frozen=True)
class StayPolicy(Policy):
    """Changes layout only on request, and returns to its default when a batch is over."""

    default_layout: Layout

    def choose(self, state: LiveState) -> Layout:
        return state.layout


@dataclass(frozen=True)
class SchedulePolicy(Policy):
    """A fixed table from live requests to layouts.

    `table` lists (K, layout) in ascending K: with at most K live requests be in that layout;
    with more than the last K be in the default one.
    """

    default_layout: Layout
    table: tuple[tuple[int, Layout], ...]
    drafts: Mapping[Layout, Schedule] = field(default_factory=dict)

    def choose(self, state: LiveState) -> Layout:
        if state.quiet < SETTLE_SECONDS:
            return state.layout
        for limit, layout in self.table:
            if state.num_seqs <= limit:
                return layout
        return self.default_layout
