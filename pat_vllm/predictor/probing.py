"""A few steps in a layout that was never tried. Pure.

A profile may be wrong about a layout, and only real steps in it can tell.
"""

from __future__ import annotations

from collections.abc import Mapping

from pat_vllm.layout import Layout
from pat_vllm.predictor.planner import Plan

_STEPS = 4
_MOST_PROBES = 2
"""Probes of one layout."""
_FACTOR = 2.0
"""A layout without real steps is taken to be at most this many times faster than predicted."""
_SAVING = 0.10
"""A probe must promise this share of the remaining time, were the layout so much faster."""
_BUDGET = 0.015
"""All probes together may lose this share of the time that the engine has worked, if the
predictions are right."""


class Prober:
    """Finds layouts that are worth a probe, and bounds what probes may lose."""

    def __init__(self) -> None:
        self._made: dict[Layout, int] = {}
        self._spent = 0.0
        self._steps_left = 0

    @property
    def active(self) -> bool:
        """Whether a probe has not made all of its steps yet."""
        return self._steps_left > 0

    def stepped(self) -> None:
        self._steps_left = max(0, self._steps_left - 1)

    def stop(self) -> None:
        """The probe ends early: its switch was refused, or no request is left."""
        self._steps_left = 0

    def find(
        self, num_seqs: int, plan: Plan, seen: Mapping[Layout, int], worked: float
    ) -> tuple[Layout, Plan] | None:
        """Begin a probe if much may be gained by one and little lost.

        Args:
            num_seqs: live requests.
            seen: steps that were compared with their prediction, by layout.
            worked: seconds that the engine has worked, of which probes may lose a share.

        Returns:
            The layout, and the plan in which it is as fast as one may hope; None for no probe.
        """
        if seen.get(plan.layout, 0) < _STEPS:
            return None
        for layout, cost in plan.cost.items():
            if self._made.get(layout, 0) >= _MOST_PROBES:
                continue
            if seen.get(layout, 0) >= 2 * _STEPS:
                continue
            slower = plan.layout_costs.step[layout] - plan.layout_costs.step[plan.layout]
            price = 2 * cost + _STEPS * max(0.0, slower)
            if price >= _BUDGET * worked - self._spent:
                continue
            optimistic = plan.layout_costs.optimistic(layout, _FACTOR).plan(plan.layout)
            gain = optimistic.no_switch - optimistic.switch_now[layout]
            if optimistic.best == layout and gain > _SAVING * optimistic.no_switch:
                self._spent += price
                self._made[layout] = self._made.get(layout, 0) + 1
                self._steps_left = (1 + _STEPS) * min(layout.replicas, num_seqs)
                return layout, optimistic
        return None
