"""How careful the policy is that predicts. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tuning:
    """How careful the policy is.

    Attributes:
        dwell: a switch holds for this many times its cost before the next one may be made.
        probe_factor: a layout without real steps is taken to be at most this many times faster
            than predicted.
        probe_saving: a probe must promise this share of the remaining time, were the layout so
            much faster.
        probe_budget: all probes together may lose this share of the time that the engine has
            worked, if the predictions are right.
        probe_steps: steps of a probe.
        planning_share: share of the time that may go into planning.
        observing_share: share of the time that may go into learning from steps.
    """

    dwell: float = 5.0
    probe_factor: float = 2.0
    probe_saving: float = 0.10
    probe_budget: float = 0.015
    probe_steps: int = 4
    planning_share: float = 0.004
    observing_share: float = 0.002
