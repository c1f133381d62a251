"""Whether PAT would pay for given batches: a table by the engine's own planner. Pure."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from pat_vllm.advice.engines import Engines
from pat_vllm.layout import Layout
from pat_vllm.predictor.draft_schedule import Schedule
from pat_vllm.predictor.whole_batch import Batch, BatchPlan, StaticEngines, best_plan

TABLE = "k by batch size"
"""vLLM's `num_speculative_tokens_per_batch_size`, made by somebody who knows steps and drafts."""
OWN_WORK = 0.005
"""Share of a step that PAT's own work takes, which the planner leaves out: 47 microseconds of one
of 10 ms on a CPU (docs/results.md)."""
_CONFIDENCE = 0.95


class Static(NamedTuple):
    """Static engines of a layout, and their draft lengths: "k = 4" or `TABLE`."""

    layout: Layout
    drafts: str

    def __str__(self) -> str:
        return f"{self.layout} (tp={self.layout.tp}), {self.drafts}"


@dataclass(frozen=True)
class Gain:
    """Time that one way to serve batches saves over another, as a fraction of the other's.

    Attributes:
        mean: by the geometric mean of the batches' ratios.
        low, high: its 95% interval (Student's t over the logarithms of the ratios).
        least, most: of single batches.
    """

    mean: float
    low: float
    high: float
    least: float
    most: float

    @classmethod
    def of(cls, ours: Sequence[float], theirs: Sequence[float]) -> Gain:
        """What `ours` save over `theirs`: seconds of the same batches, two at least."""
        from scipy.special import stdtrit  # `scipy.stats` takes half a second to import

        logs = np.log(np.array(ours) / np.array(theirs))
        mean, count = float(logs.mean()), len(logs)
        half = float(stdtrit(count - 1, (1 + _CONFIDENCE) / 2) * logs.std(ddof=1))
        half /= math.sqrt(count)
        shown = (mean, mean + half, mean - half, float(logs.max()), float(logs.min()))
        return cls(*(-math.expm1(log) + 0.0 for log in shown))


@dataclass(frozen=True)
class Advice:
    """What is said to the user.

    Attributes:
        static: seconds of each batch in static engines.
        schedules: draft lengths of the static engines, by the requests in a step.
        plans: of PAT, of each batch.
    """

    engines: Engines
    static: Mapping[Static, tuple[float, ...]]
    schedules: Mapping[Static, Schedule]
    plans: tuple[BatchPlan, ...]

    @cached_property
    def best(self) -> Static:
        """The fastest static engines."""
        return min(self.static, key=lambda each: sum(self.static[each]))

    @cached_property
    def pat(self) -> tuple[float, ...]:
        """Seconds of each batch with PAT."""
        return tuple(plan.planned for plan in self.plans)

    @cached_property
    def gain(self) -> Gain:
        """What PAT saves over the best static engines."""
        return Gain.of(self.pat, self.static[self.best])

    @property
    def pays(self) -> bool:
        """Whether PAT surely saves more than its own work takes, rounded as it is shown."""
        return round(self.gain.low, 3) > OWN_WORK

    @property
    def path(self) -> str:
        """PAT's layouts in the first batch, and the live requests at which it goes there."""
        (begin, _), *switches = self.plans[0].path
        if not switches:
            return f"begins in {begin} and stays there"
        went = (f"{layout} at {live}" for layout, live in switches)
        return f"begins in {begin}, switches to {', '.join(went)} live requests"

    def to_json(self) -> dict[str, Any]:
        """Plain values; times in seconds of each batch, gains as fractions."""
        return {
            "step_and_switch_times": "modelled" if self.engines.modelled else "measured",
            "engines": self.engines.title,
            "warning": self.engines.warning,
            "pays": self.pays,
            "gain_over_best_static": asdict(self.gain),
            "best_static": str(self.best),
            "static_seconds": {str(each): seconds for each, seconds in self.static.items()},
            "pat": {"seconds": self.pat, "options": self.engines.options, "path": self.path},
        }


def advise(engines: Engines, batches: Sequence[Batch]) -> Advice:
    """Plan batches with every engine."""
    schedules = {
        Static(each.layout, drafts): (each, schedule)
        for each in engines.static
        for drafts, schedule in _schedules(engines, each, batches[0])
    }
    static = {
        key: tuple(each.seconds(batch, schedule) for batch in batches)
        for key, (each, schedule) in schedules.items()
    }
    plans = [best_plan(engines.planner, batch, engines.draft_lengths) for batch in batches]
    return Advice(
        engines, static, {key: schedule for key, (_, schedule) in schedules.items()}, tuple(plans)
    )


def _schedules(engines: Engines, static: StaticEngines, batch: Batch) -> list[tuple[str, Schedule]]:
    """Draft lengths with which static engines are compared."""
    lengths = engines.draft_lengths
    each: list[tuple[str, Schedule]] = [
        (f"k = {k}", ((1, static.max_num_seqs, k),)) for k in lengths
    ]
    if len(lengths) > 1:
        each.append((TABLE, static.tuned_schedule(batch, lengths)))
    return each
