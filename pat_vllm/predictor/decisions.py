"""The record of decisions, with what really happened after each. Pure."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import replace
from typing import Any

from pat_vllm.reporting import DecisionReport, Records, SwitchReport

MAX_DECISIONS = 2_000
_STEPS = 16
"""Steps before and after a switch whose median is reported."""
_REPEAT_SECONDS = 1.0
"""A switch that is not made, again and again for the same reason, is noted this often."""


class Decisions:
    """Bounded record of decisions; step times that follow a switch complete its entry.

    The engine's thread writes. `since` may be called from every thread.
    """

    def __init__(self) -> None:
        self._records: Records[DecisionReport] = Records(MAX_DECISIONS)
        self._before: deque[float] = deque(maxlen=_STEPS)
        self._after: list[float] = []
        self._open = False  # the last fired decision still waits for what really happens
        self._since_fired = 0  # records from the last fired one on

    def add(self, decision: DecisionReport) -> None:
        """Note a decision."""
        last = self._records.last()
        if not decision.fired and last is not None:
            same = (last.layout, last.target, last.why) == (
                decision.layout,
                decision.target,
                decision.why,
            )
            if same and decision.at - last.at < _REPEAT_SECONDS:
                return
        if decision.fired:
            self._close()
            before = statistics.median(self._before) if self._before else None
            decision = replace(decision, real_before=before)
            self._since_fired = 0
            self._open = True
            self._after = []
        self._records.append(decision)
        self._since_fired += 1

    def switched(self, report: SwitchReport) -> None:
        """A switch was made."""
        self._before.clear()
        if self._open:
            self._amend(real_cost=report.seconds - report.quiesce)

    def stepped(self, seconds: float) -> None:
        """A step took this long."""
        self._before.append(seconds)
        if self._open:
            self._after.append(seconds)
            if len(self._after) >= _STEPS:
                self._close()

    def idle(self) -> None:
        """No more steps will follow."""
        self._close()
        self._before.clear()

    def since(self, at: float = -math.inf) -> tuple[DecisionReport, ...]:
        """The records of this time or a later one, oldest first."""
        return self._records.since(at)

    def _close(self) -> None:
        if self._open and self._after:
            self._amend(real_after=statistics.median(self._after))
        self._open = False

    def _amend(self, **changes: Any) -> None:
        fired = self._records.last(self._since_fired)
        if fired is not None:
            self._records.replace_last(replace(fired, **changes), self._since_fired)
