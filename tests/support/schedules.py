"""Switches at given moments, for tests of the simulator."""

from dataclasses import dataclass

from pat_vllm.layout import Layout
from pat_vllm.predictor.policy import Policy
from pat_vllm.predictor.state import LiveState
from pat_vllm.reporting import BatchReport


@dataclass(frozen=True)
class LayoutSchedule:
    """Begin in `start`, and be in `layout` once `ended` responses have ended, for each of
    `switches` = ((ended, layout), ...), ascending."""

    start: Layout
    switches: tuple[tuple[int, Layout], ...] = ()


class FollowSchedule(Policy):
    """Follows a given schedule, batch after batch."""

    def __init__(self, schedule: LayoutSchedule) -> None:
        self.default_layout = schedule.start
        self._schedule = schedule
        self._ended = 0

    def choose(self, state: LiveState) -> Layout:
        target = self._schedule.start
        for ended, layout in self._schedule.switches:
            if self._ended >= ended:
                target = layout
        return target

    def ended(self, now: float, num_output_tokens: int, complete: bool | None) -> None:
        self._ended += 1

    def batch_over(self, now: float, batch: BatchReport | None = None) -> None:
        self._ended = 0
