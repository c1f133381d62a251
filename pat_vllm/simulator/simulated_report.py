"""What became of a replayed trace: the report of its engine."""

from __future__ import annotations

from dataclasses import dataclass

from pat_vllm.reporting import Report, SwitchReport


@dataclass(frozen=True, kw_only=True, repr=False)
class SimulatedReport(Report):
    """The report of a simulated engine for one trace, with what no engine knows.

    Times are in seconds on the simulator's clock. `layouts` are those that the engine was in, the
    first one first. `predictor` holds the decisions of this trace only. Steps and
    drafts are left out.

    Attributes:
        began: when the trace began.
        back: when the engine was in its default layout again, ready for its next batch.
        tokens: generated.
        finished: when each response ended, in the trace's order.
        prefilled: prompt tokens computed, those computed again included.
        preempted: how often a request lost its KV for want of memory.
    """

    began: float
    back: float
    tokens: int
    finished: tuple[float, ...]
    prefilled: int
    preempted: int

    @property
    def seconds(self) -> float:
        """From the first arrival until the engine is ready for its next batch."""
        return self.back - self.began

    @property
    def generation_seconds(self) -> float:
        """From the first arrival to the last response."""
        return max(self.finished) - self.began

    @property
    def switches_on_the_way(self) -> tuple[SwitchReport, ...]:
        """The switches that carried requests."""
        return tuple(switch for switch in self.switches if switch.reason != "idle")
