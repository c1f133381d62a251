"""Static layouts, the paper's policy, this one and a clairvoyant, on the same batches. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.paper.clairvoyant import ClairvoyantPolicy
from benchmarks.paper.policy import SWITCH_SECONDS, PaperPolicy
from benchmarks.replaying import Comparison, PolicyResult, Replayer
from benchmarks.truths import FixedSwitches
from pat_vllm.layout import Layout
from pat_vllm.predictor.step_time import StepTimeModel
from pat_vllm.profiling.profile import Profile, SwitchSample
from pat_vllm.simulator.modelled.hardware import measured_noise
from pat_vllm.simulator.replica import ReplicaCapacity
from pat_vllm.simulator.traces import LengthTrace
from pat_vllm.simulator.truth import ReplayedTruth

OURS = "pat-vllm: several cheap switches"
CLAIRVOYANT = "clairvoyant"


@dataclass(frozen=True)
class PaperComparison(Comparison):
    """With the paper's policy, the first of `others`, and the clairvoyant, the last: in each batch
    the best of it and of whatever did better under the same truth."""

    def regret(self, result: PolicyResult) -> float:
        """Time beyond the clairvoyant's, as a fraction of it."""
        return result.seconds / self.result(CLAIRVOYANT).seconds - 1

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
    alone: Profile | None = None,
    lengths: Sequence[int],
    expensive: float = SWITCH_SECONDS,
    paper_home: Layout | None = None,
    warm_up: Sequence[LengthTrace] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> PaperComparison:
    """Replay batches under every policy.

    Args:
        alone: of static engines, where these have other memory than PAT's.
        lengths: a large sample of the workload's lengths, which the paper's policy may know.
        expensive: seconds of a switch for the rows that show what cheap ones are worth.
        paper_home: layout in which the paper's policy begins; None: it chooses.
        warm_up: batches before, from which policies learn and which are not reported.
    """
    replayer = Replayer(profile, batches, warm_up, progress)
    layouts, capacity = profile.layouts, ReplicaCapacity.of(profile)
    alone = alone or profile
    cheap = ReplayedTruth(
        alone.model_copy(update={"switches": profile.switches}),
        profile if profile.kind == "measured" else measured_noise(),
    )
    costly = FixedSwitches(cheap, expensive)
    prompt = int(statistics.mean(tokens for batch in batches for tokens in batch.num_prompt_tokens))
    static = replace(replayer, profile=alone).replay_static(cheap)
    paper = PaperPolicy(
        layouts,
        StepTimeModel.fit(profile).step,
        lengths,
        requests=max(len(batch) for batch in batches),
        prompt=prompt,
        cost=expensive,
        home=paper_home,
    )
    several_costly = replayer.adaptive(with_switch_cost(profile, expensive))
    costly_labels = (paper_label(paper.home, expensive), several_label(expensive))
    others = [
        replayer.replay(costly_labels[0], paper, costly),
        replayer.replay(costly_labels[1], several_costly, costly),
        replayer.replay(OURS, replayer.adaptive(profile), cheap),
    ]
    told = ClairvoyantPolicy((*warm_up, *batches), layouts, cheap, capacity)
    others.append(replayer.replay(CLAIRVOYANT, told, cheap))
    under_it = [one for one in (*static.values(), *others) if one.label not in costly_labels]
    best = tuple(
        min((one.runs[i] for one in under_it), key=lambda run: run.seconds)
        for i in range(len(batches))
    )
    others[-1] = PolicyResult(CLAIRVOYANT, best)
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
