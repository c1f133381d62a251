"""Who decides on a switch: is told what happens, and answers with a layout. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from pat_vllm.layout import Layout
from pat_vllm.predictor.draft_schedule import Schedule
from pat_vllm.predictor.state import Ints, LiveState
from pat_vllm.profile import StepShape
from pat_vllm.reporting import PredictorReport, SwitchReport

SETTLE_SECONDS = 0.05
"""A batch arrives request by request. Before this long without an arrival its size is not known,
and a decision would take its first requests for its tail."""


class Policy:
    """Chooses the layout. `choose` is asked before each step; the rest tells it what happens.

    All but `report` are called on the engine's thread and must take microseconds, decisions aside.
    Times are seconds on one monotonic clock, which a simulator may make up.
    """

    default_layout: Layout
    """The layout in which the engine awaits its next batch. `batch_over` may change it."""
    learns: ClassVar[bool] = False
    """Whether `stepped` and `drafted` are of use."""
    control: bool = False
    """Whether the batch that runs, or comes next, stays in one layout for others to be compared
    with it. `idle` may change it."""
    drafts: Mapping[Layout, Schedule] = MappingProxyType({})
    """Draft lengths by the number of requests in a replica's step; a layout that is not here drafts
    as the engine's configuration says."""

    def choose(self, state: LiveState) -> Layout:
        """The layout to be in for the next step."""
        raise NotImplementedError

    def arrived(self, now: float, repeated: bool = False) -> None:
        """A request has arrived. `repeated`: there are earlier responses to draft from."""

    def finished(self, now: float, num_output_tokens: int, complete: bool) -> None:
        """A response ended. It is not `complete` when an abort or `max_tokens` cut it short.

        It is not called for responses whose length was prescribed.
        """

    def stepped(self, now: float, layout: Layout, shape: StepShape, seconds: float) -> None:
        """A replica finished a step; `seconds` since its previous one, or since it was started."""

    def drafted(
        self,
        now: float,
        length: int,
        requests: int,
        accepted: Ints,
        repeated: bool = False,
        drafted: Ints | None = None,
    ) -> None:
        """A replica finished a step that could have verified drafts; see `Acceptance.observe`.

        It is called twice for a step that had both kinds of requests: with earlier responses
        (`repeated`), and without.
        """

    def weights_changed(self) -> None:
        """The model's weights may be others than before."""

    def switched(self, report: SwitchReport) -> None:
        """The engine has switched, for whatever reason."""

    def refused(self, now: float) -> None:
        """The switch that was asked for could not be made.

        The engine asks no policy again for about a second, so that none needs a pause of its own.
        """

    def idle(self, now: float) -> None:
        """No request is left. The batch may go on: an agent's tools may be running."""

    def batch_over(self, now: float) -> None:
        """The batch is over: no request is left, and the next one begins another batch."""

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
