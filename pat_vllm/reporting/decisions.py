"""The record of decisions, with what really happened after each. Pure."""

from __future__ import annotations

import logging
import statistics
from collections import deque
from dataclasses import replace
from typing import Any

from pat_vllm.reporting.history import RingBuffer
from pat_vllm.reporting.values import DecisionReport, SwitchReport

logger = logging.getLogger(__name__)

MAX_DECISIONS = 2_000
"""Decisions that are kept; the oldest are forgotten first."""
_STEPS = 16
"""Steps before a switch, and as many after it, whose median is reported."""
_REPEAT_SECONDS = 1.0
"""A switch that is not made, again and again for the same reason, is noted this often."""


class Decisions:
    """Bounded record of decisions; step times that follow a switch complete its entry.

    The engine's thread writes. `records` may be read by every thread.
    """

    def __init__(self) -> None:
        self.records: RingBuffer[DecisionReport] = RingBuffer(MAX_DECISIONS)
        self._before: deque[float] = deque(maxlen=_STEPS)
        self._after: list[float] | None = None
        """Steps since the last decision that fired, until there are enough; seconds."""
        self._since_fired = 0
        """Records from the last decision that fired on."""

    def add(self, decision: DecisionReport) -> None:
        last = self.records.last()
        if decision.fired:
            self._close()
            before = statistics.median(self._before) if self._before else None
            decision = replace(decision, real_before=before)
            self._since_fired, self._after = 0, []
            logger.info(
                "PAT decides for %s -> %s (%s) with %d live requests: %.2f s to the end as it is, "
                "%.2f s with the switch, which costs %.3f s",
                decision.layout,
                decision.target,
                decision.why,
                decision.num_seqs,
                decision.no_switch,
                decision.switch_now,
                decision.cost,
            )
        elif last is not None and decision.at - last.at < _REPEAT_SECONDS:
            now = (decision.layout, decision.target, decision.why)
            if now == (last.layout, last.target, last.why):
                return
        self.records.append(decision)
        self._since_fired += 1

    def switched(self, report: SwitchReport) -> None:
        self._before.clear()
        if self._after is not None:
            self._amend(real_cost=report.seconds - report.quiesce)

    def stepped(self, seconds: float) -> None:
        self._before.append(seconds)
        if self._after is not None:
            self._after.append(seconds)
            if len(self._after) == _STEPS:
                self._close()

    def idle(self) -> None:
        """No more steps will follow."""
        self._close()
        self._before.clear()

    def _close(self) -> None:
        if self._after:
            self._amend(real_after=statistics.median(self._after))
        self._after = None

    def _amend(self, **changes: Any) -> None:
        fired = self.records.last(self._since_fired)
        if fired is not None:
            self.records.replace_last(replace(fired, **changes), self._since_fired)
