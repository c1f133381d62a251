"""All policies on the same batches: static layouts, the paper's, this one and an oracle. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.paper.hardware import measured_noise
from benchmarks.paper.oracle import oracle
from benchmarks.paper.policy import SWITCH_SECONDS, LimitedPolicy, PaperPolicy
from pat_vllm.layout import Layout
from pat_vllm.predictor.step_time import StepTimeModel
from pat_vllm.predictor.tuning import Tuning
from pat_vllm.profiling.profile import Profile, SwitchSample
from pat_vllm.simulator.compare import Comparison, PolicyResult, Replayer
from pat_vllm.simulator.replica import ReplicaCapacity
from pat_vllm.simulator.traces import LengthTrace
from pat_vllm.simulator.truth import FixedSwitches, ReplayedTruth

OURS = "pat-vllm: several cheap switches"
ONE_CHEAP = "pat-vllm: one cheap switch"
ORACLE = "oracle"
ORACLE_ONE = "oracle: one switch"


@dataclass(frozen=True)
class PaperComparison(Comparison):
    """With the paper's policy, the first of `others`, and the oracle, the last."""

    def regret(self, result: PolicyResult) -> float:
        """Time beyond the oracle's, as a fraction of it."""
        return result.seconds / self.result(ORACLE).seconds - 1

    def _policy_to_json(self, result: PolicyResult, timelines: bool) -> dict[str, Any]:
        return {
            **super()._policy_to_json(result, timelines),
            "regret": self.regret(result),
        }


def compare_with_paper(
    profile: Profile,
    batches: Sequence[LengthTrace],
    *,
    title: str,
    lengths: Sequence[int],
    expensive: float = SWITCH_SECONDS,
    paper_home: Layout | None = None,
    warm_up: Sequence[LengthTrace] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> PaperComparison:
    """Replay batches under every policy.

    Args:
        lengths: a large sample of the workload's lengths, which the paper's policy may know.
        expensive: seconds of a switch for the rows that show what cheap ones are worth.
        paper_home: layout in which the paper's policy begins; None: it chooses.
        warm_up: batches before, from which policies learn and which are not reported.
    """
    replayer = Replayer(profile, batches, warm_up, progress)
    layouts, capacity = profile.all_layouts, ReplicaCapacity.of(profile)
    cheap = ReplayedTruth(profile, profile if profile.kind == "measured" else measured_noise())
    costly = FixedSwitches(cheap, expensive)
    prompt = int(statistics.mean(tokens for batch in batches for tokens in batch.num_prompt_tokens))
    static = replayer.replay_static(cheap)
    paper = PaperPolicy(
        layouts,
        StepTimeModel.fit(profile).step,
        lengths,
        requests=max(len(batch) for batch in batches),
        prompt=prompt,
        cost=expensive,
        home=paper_home,
    )
    # A policy with one switch must not spend it on a probe.
    one_cheap = LimitedPolicy(replayer.adaptive(profile, Tuning(probe_saving=math.inf)))
    several_costly = replayer.adaptive(with_switch_cost(profile, expensive))
    others = [
        replayer.replay(paper_label(paper.home, expensive), paper, costly),
        replayer.replay(ONE_CHEAP, one_cheap, cheap),
        replayer.replay(several_label(expensive), several_costly, costly),
        replayer.replay(OURS, replayer.adaptive(profile), cheap),
    ]
    for label, most in ((ORACLE_ONE, 1), (ORACLE, None)):
        progress(label)
        found = [
            oracle(batch, layouts, cheap, capacity, most_switches=most)[1] for batch in batches
        ]
        others.append(PolicyResult(label, tuple(found)))
    # The oracle's search is not exhaustive: whatever did better under the same truth is taken.
    under_it = [one for one in (*static.values(), *others) if one.label != others[0].label]
    best = tuple(
        min((one.runs[i] for one in under_it), key=lambda run: run.seconds)
        for i in range(len(batches))
    )
    others[-1] = PolicyResult(ORACLE, best)
    return PaperComparison(title, profile.kind == "modelled", static, tuple(others))


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
            num_seqs=1,
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
