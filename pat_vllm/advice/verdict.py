"""What the sides say: whether PAT pays, how sure that is, and where it comes from. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from pat_vllm.advice.sides import Replayed, Rollouts, Sides

_CONFIDENCE = 0.95

OWN_WORK = 0.005
"""Part of a step that PAT's own work takes, which the simulator leaves out: 47 microseconds of one
of 10 ms on a CPU (docs/results.md)."""


@dataclass(frozen=True)
class Gain:
    """Time that one side saves over another, as a fraction of the other's.

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
        """Of seconds of the same batches, at least two."""
        from scipy.special import stdtrit

        logs = np.log(np.array(ours) / np.array(theirs))
        mean, count = float(logs.mean()), len(logs)
        t = float(stdtrit(count - 1, (1 + _CONFIDENCE) / 2))
        half = t * float(logs.std(ddof=1)) / math.sqrt(count)
        shown = (mean, mean + half, mean - half, float(logs.max()), float(logs.min()))
        return cls(*(-math.expm1(log) + 0.0 for log in shown))

    @property
    def reaches(self) -> float | None:
        """0 or `OWN_WORK` where the interval reaches it, so that nothing may be left of the gain;
        else None. Rounded as it is shown, to a tenth of a percent."""
        low = round(self.low, 3)
        return next((bar for bar in (0.0, OWN_WORK) if low <= bar), None)


@dataclass(frozen=True)
class Source:
    """A part of what PAT saves.

    Attributes:
        name: "concurrency", "layout" or "draft length".
        gain: of this part alone.
        meaning: which two sides are compared.
    """

    name: str
    gain: Gain
    meaning: str


@dataclass(frozen=True)
class Advice:
    """What is said to the user.

    Attributes:
        gain: of PAT over the best static layout with its best draft length, at equal concurrency.
        sources: of all that PAT saves over the best static layout without drafts and with vLLM's
            own limits.
        drafts: whether drafts make PAT faster.
    """

    rollouts: Rollouts
    sides: Sides
    gain: Gain
    sources: tuple[Source, ...]
    drafts: bool

    @property
    def pays(self) -> bool:
        """Whether there is something to gain; see `Gain.reaches`."""
        return self.gain.reaches is None

    @property
    def modelled(self) -> bool:
        """Whether step and switch times were modelled rather than measured."""
        return self.rollouts.profile.kind == "modelled"

    @property
    def ours(self) -> Replayed:
        """PAT as advised, with drafts or without."""
        return self.sides.pat if self.drafts else self.sides.pat_plain

    @property
    def path(self) -> str:
        """PAT's layouts in the last batch, and the live requests at which it went there."""
        run = self.ours.runs[-1]
        went = (f"{one.target} at {one.num_seqs}" for one in run.switches_on_the_way)
        return ", ".join((f"begins in {run.timeline[0].layout}", *went))

    def to_json(self) -> dict[str, Any]:
        """Plain values; times in seconds of each reported batch, gains as fractions."""
        profile, batches, sides = self.rollouts.profile, self.rollouts.batches, self.sides
        return {
            "simulated": True,
            "step_and_switch_times": profile.kind,
            "profile": {
                "title": profile.title,
                "note": profile.note,
                "kv_tokens": profile.kv_tokens,
            },
            "responses": len(batches[0]),
            "max_tokens": batches[0].max_tokens,
            "lengths": batches[0].name,
            "acceptance": batches[0].acceptance,
            "pays": self.pays,
            "gain_over_best_static": asdict(self.gain),
            "best_static": _to_json(sides.static),
            "pat": {
                **_to_json(self.ours),
                "switches_per_batch": statistics.mean(
                    len(run.switches_on_the_way) for run in self.ours.runs
                ),
                "last_batch": self.path,
            },
            "comes_from": {
                one.name: {**asdict(one.gain), "meaning": one.meaning} for one in self.sources
            },
            "sides": {
                "best_static_plain_vllm_limits": _to_json(sides.own),
                "best_static_plain": _to_json(sides.plain),
                "pat_plain": _to_json(sides.pat_plain),
                "pat": _to_json(sides.pat),
            },
        }


def _to_json(one: Replayed) -> dict[str, Any]:
    layout = one.side.layout
    static = {} if layout is None else {"layout": str(layout), "tensor_parallel_size": layout.tp}
    return {**static, "drafts": one.side.drafts, "seconds": one.seconds}


def advise(rollouts: Rollouts, sides: Sides) -> Advice:
    """What the replayed sides say."""
    pat, plain = sides.pat.seconds, sides.pat_plain.seconds
    drafted = len(rollouts.draft_lengths) > 1
    drafts = drafted and sum(pat) < sum(plain)
    sources = [
        Source(
            "concurrency",
            Gain.of(sides.plain.seconds, sides.own.seconds),
            "static, k = 0: wide replicas run as many requests per GPU as narrow ones, against "
            "vLLM's own limits",
        ),
        Source(
            "layout",
            Gain.of(plain, sides.plain.seconds),
            "k = 0: PAT against the best static layout",
        ),
    ]
    if drafted:
        fixed = Gain.of(sides.static.seconds, sides.plain.seconds)
        sources.append(
            Source(
                "draft length",
                Gain.of(pat, plain),
                f"PAT with drafts against PAT without; the best static layout's "
                f"({sides.static.side.drafts}) save it {max(0.0, fixed.mean):.1%}",
            )
        )
    gain = Gain.of(pat if drafts else plain, sides.static.seconds)
    return Advice(rollouts, sides, gain, tuple(sources), drafts)
