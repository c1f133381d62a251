"""Keeps what the report shows, at microseconds per step. Pure."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

from pat_vllm.layout import Layout
from pat_vllm.reporting import LayoutSteps, LiveSample, RefusedSwitch, Report, SwitchReport

MAX_RECORDS = 10_000
_MAX_STEP_TIMES = 1_000


class History:
    """Bounded records of switches, steps and live requests."""

    def __init__(self) -> None:
        self._switches: deque[SwitchReport] = deque(maxlen=MAX_RECORDS)
        self._refused: deque[RefusedSwitch] = deque(maxlen=MAX_RECORDS)
        self._timeline: deque[LiveSample] = deque(maxlen=MAX_RECORDS)
        self._count: dict[Layout, int] = {}
        self._seconds: dict[Layout, float] = {}
        self._recent: dict[Layout, deque[float]] = {}
        self._now: tuple[Layout, int] | None = None

    def live(self, layout: Layout, live: int) -> None:
        """Note the number of live requests; called before each step."""
        if self._now != (layout, live):
            self._now = (layout, live)
            self._timeline.append(LiveSample(time.monotonic(), layout, live))

    def step(self, layout: Layout, seconds: float) -> None:
        """Note a finished step."""
        if layout not in self._count:
            self._count[layout] = 0
            self._seconds[layout] = 0.0
            self._recent[layout] = deque(maxlen=_MAX_STEP_TIMES)
        self._count[layout] += 1
        self._seconds[layout] += seconds
        self._recent[layout].append(seconds)
        if self._switches and self._switches[-1].first_step is None:
            self._switches[-1] = replace(self._switches[-1], first_step=seconds)

    def switch(self, switch: SwitchReport) -> None:
        """Note a switch."""
        self._switches.append(switch)

    def refused(self, refused: RefusedSwitch) -> None:
        """Note a switch that was not made."""
        self._refused.append(refused)

    def report(self, layout: Layout, layouts: Sequence[Layout]) -> Report:
        """All of it."""
        return Report(
            layout=layout,
            layouts=tuple(layouts),
            switches=tuple(self._switches),
            refused=tuple(self._refused),
            timeline=tuple(self._timeline),
            steps={
                one: LayoutSteps(count, self._seconds[one], statistics.median(self._recent[one]))
                for one, count in self._count.items()
            },
        )
