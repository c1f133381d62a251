"""All policies on the same batches: static layouts, the paper's, this one and an oracle. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.paper.oracle import oracle
from benchmarks.paper.policy import SWITCH_SECONDS, LimitedPolicy, PaperPolicy
from pat_vllm.layout import Layout
from pat_vllm.predictor.adaptive import AdaptivePolicy, Tuning
from pat_vllm.predictor.policy import Policy, StayPolicy
from pat_vllm.predictor.step_time import StepTimeModel
from pat_vllm.profiling.profile import Profile, SwitchSample
from pat_vllm.simulator.engine import Limits
from pat_vllm.simulator.replay import simulate_batches
from pat_vllm.simulator.run import SimulatedRun
from pat_vllm.simulator.traces import LengthTrace
from pat_vllm.simulator.truth import FixedSwitches, ProfileTruth, Truth

OURS = "pat-vllm: several cheap switches"
ONE_CHEAP = "pat-vllm: one cheap switch"
ORACLE = "oracle"
ORACLE_ONE = "oracle: one switch"


@dataclass(frozen=True)
class Row:
    """One policy over the batches of a comparison."""

    label: str
    runs: tuple[SimulatedRun, ...]

    @property
    def seconds(self) -> float:
        """Of all batches."""
        return sum(run.seconds for run in self.runs)

    @property
    def tokens_per_second(self) -> float:
        """Of all batches."""
        return sum(run.tokens for run in self.runs) / self.seconds

    @property
    def switches(self) -> float:
        """Per batch, the way home not counted."""
        return statistics.mean(len(run.switches_on_the_way) for run in self.runs)


@dataclass(frozen=True)
class Comparison:
    """All policies on the same batches.

    Attributes:
        title: profile and workload.
        modelled: whether step and switch times were modelled rather than measured.
        static: rows of the static layouts, by layout.
        others: the other rows, the oracle last.
    """

    title: str
    modelled: bool
    static: dict[Layout, Row]
    others: tuple[Row, ...]

    @property
    def rows(self) -> tuple[Row, ...]:
        """All of them."""
        return (*self.static.values(), *self.others)

    @property
    def best_static(self) -> Row:
        """The layout that is fastest over all batches."""
        return min(self.static.values(), key=lambda row: row.seconds)

    def row(self, label: str) -> Row:
        """The row of a policy."""
        return next(row for row in self.rows if row.label == label)

    def saving(self, label: str, over: Row | None = None) -> tuple[float, float, float]:
        """Time saved over another row (the best static layout), as a fraction: median, least and
        most over batches."""
        over = over or self.best_static
        pairs = zip(self.row(label).runs, over.runs, strict=True)
        saved = [1 - ours.seconds / theirs.seconds for ours, theirs in pairs]
        return statistics.median(saved), min(saved), max(saved)

    def regret(self, row: Row) -> float:
        """Time beyond the oracle's, as a fraction of it."""
        return row.seconds / self.row(ORACLE).seconds - 1

    def to_json(self, timelines: bool = True) -> dict[str, Any]:
        """Plain values; `timelines` of live requests are the larger part."""
        rows = []
        for row in self.rows:
            runs = [run.to_json() for run in row.runs]
            if not timelines:
                for run in runs:
                    del run["timeline"]
            rows.append(
                {
                    "policy": row.label,
                    "seconds": row.seconds,
                    "tokens_per_second": row.tokens_per_second,
                    "switches_per_batch": row.switches,
                    "saving_over_best_static": self.saving(row.label),
                    "saving_over": {
                        str(layout): self.saving(row.label, static)
                        for layout, static in self.static.items()
                    },
                    "regret": self.regret(row),
                    "batches": runs,
                }
            )
        best = self.best_static.label
        return {
            "title": self.title,
            "modelled": self.modelled,
            "best_static": best,
            "policies": rows,
        }


def compare(
    profile: Profile,
    batches: Sequence[LengthTrace],
    *,
    title: str,
    lengths: Sequence[int],
    expensive: float = SWITCH_SECONDS,
    paper_home: Layout | None = None,
    warm_up: Sequence[LengthTrace] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> Comparison:
    """Replay batches under every policy.

    Args:
        lengths: a large sample of the workload's lengths, which the paper's policy may know.
        expensive: seconds of a switch for the rows that show what cheap ones are worth.
        paper_home: layout in which the paper's policy begins; None: it chooses.
        warm_up: batches before, from which policies learn and which are not reported.
    """
    layouts, limits = profile.all_layouts, Limits.of(profile)
    cheap = ProfileTruth(profile)
    costly = FixedSwitches(cheap, expensive)
    costly_profile = with_switch_cost(profile, expensive)
    bound = max(batch.bound for batch in batches)
    prompt = int(statistics.mean(tokens for batch in batches for tokens in batch.prompts))

    def replay(label: str, policy: Policy, truth: Truth) -> Row:
        progress(label)
        runs = simulate_batches((*warm_up, *batches), policy, truth, limits)
        return Row(label, tuple(runs[len(warm_up) :]))

    def adaptive(of: Profile, probes: bool = True) -> AdaptivePolicy:
        # A policy with one switch must not spend it on a probe.
        tuning = Tuning() if probes else Tuning(probe_saving=math.inf)
        # The time that planning takes here is not the simulated engine's.
        return AdaptivePolicy.of(of, bound=bound, tuning=tuning, timer=lambda: 0.0)

    static = {layout: replay(f"static {layout}", StayPolicy(layout), cheap) for layout in layouts}
    paper = PaperPolicy(
        layouts,
        StepTimeModel.fit(profile).step,
        lengths,
        requests=max(len(batch) for batch in batches),
        prompt=prompt,
        cost=expensive,
        home=paper_home,
    )
    others = [
        replay(paper_label(paper.home, expensive), paper, costly),
        replay(ONE_CHEAP, LimitedPolicy(adaptive(profile, probes=False)), cheap),
        replay(several_label(expensive), adaptive(costly_profile), costly),
        replay(OURS, adaptive(profile), cheap),
    ]
    for label, most in ((ORACLE_ONE, 1), (ORACLE, None)):
        progress(label)
        found = [oracle(batch, layouts, cheap, limits, most_switches=most)[1] for batch in batches]
        others.append(Row(label, tuple(found)))
    # The oracle's search is not exhaustive: whatever did better under the same truth is taken.
    under_it = [row for row in (*static.values(), *others) if row.label != others[0].label]
    best = tuple(
        min((row.runs[i] for row in under_it), key=lambda run: run.seconds)
        for i in range(len(batches))
    )
    others[-1] = Row(ORACLE, best)
    return Comparison(title, profile.kind == "modelled", static, tuple(others))


def paper_label(home: Layout, seconds: float) -> str:
    """The row of the paper's policy."""
    return f"paper's: from {home}, one switch of {seconds:g} s"


def several_label(seconds: float) -> str:
    """The row of our policy with expensive switches."""
    return f"pat-vllm: several switches of {seconds:g} s"


def with_switch_cost(profile: Profile, seconds: float) -> Profile:
    """A profile in which every switch takes `seconds`."""
    switches = tuple(
        SwitchSample(
            source=source,
            target=target,
            live=1,
            tokens=0,
            kv_bytes=0,
            seconds=seconds,
            kv=0.0,
            weights=0.0,
        )
        for source in profile.layouts
        for target in profile.layouts
        if source != target
    )
    return profile.model_copy(update={"switches": switches})
