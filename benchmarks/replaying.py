"""Policies on the same batches, for the simulated benchmarks."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pat_vllm.layout import Layout
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.policy import Policy, StayPolicy
from pat_vllm.profiling.profile import Profile
from pat_vllm.simulator.replay import simulate_batches
from pat_vllm.simulator.replica import ReplicaCapacity
from pat_vllm.simulator.run import SimulatedReport
from pat_vllm.simulator.traces import LengthTrace
from pat_vllm.simulator.truth import Truth


@dataclass(frozen=True)
class PolicyResult:
    """One policy over the batches of a comparison."""

    label: str
    runs: tuple[SimulatedReport, ...]

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
    """Policies on the same batches.

    Attributes:
        title: profile and workload.
        modelled: whether step and switch times were modelled rather than measured.
        static: results of the static layouts, by layout.
        others: results of the other policies.
    """

    title: str
    modelled: bool
    static: dict[Layout, PolicyResult]
    others: tuple[PolicyResult, ...]

    @property
    def results(self) -> tuple[PolicyResult, ...]:
        """All of them."""
        return (*self.static.values(), *self.others)

    @property
    def best_static(self) -> PolicyResult:
        """The layout that is fastest over all batches."""
        return min(self.static.values(), key=lambda result: result.seconds)

    def result(self, label: str) -> PolicyResult:
        """That of a policy."""
        return next(result for result in self.results if result.label == label)

    def saving(self, label: str, over: PolicyResult | None = None) -> tuple[float, float, float]:
        """Time saved over another policy (the best static layout), as a fraction: median, least and
        most over batches."""
        over = over or self.best_static
        pairs = zip(self.result(label).runs, over.runs, strict=True)
        saved = [1 - ours.seconds / theirs.seconds for ours, theirs in pairs]
        return statistics.median(saved), min(saved), max(saved)

    def to_json(self, timelines: bool = True) -> dict[str, Any]:
        """Plain values; `timelines` of live requests are the larger part."""
        return {
            "title": self.title,
            "modelled": self.modelled,
            "best_static": self.best_static.label,
            "policies": [self._policy_to_json(result, timelines) for result in self.results],
        }

    def _policy_to_json(self, result: PolicyResult, timelines: bool) -> dict[str, Any]:
        runs = [{"seconds": run.seconds, **json.loads(run.to_json())} for run in result.runs]
        for run in runs:
            for left_out in ("predictor", "drafts", *["timeline", "finished"] * (not timelines)):
                del run[left_out]
        return {
            "policy": result.label,
            "seconds": result.seconds,
            "tokens_per_second": result.tokens_per_second,
            "switches_per_batch": result.switches,
            "saving_over_best_static": self.saving(result.label),
            "saving_over": {
                str(layout): self.saving(result.label, static)
                for layout, static in self.static.items()
            },
            "batches": runs,
        }


@dataclass(frozen=True)
class Replayer:
    """Replays the same batches under one policy after another.

    Attributes:
        profile: of the engine.
        warm_up: batches before, from which policies learn and which are not reported.
        progress: is told the label of the policy that is replayed next.
    """

    profile: Profile
    batches: Sequence[LengthTrace]
    warm_up: Sequence[LengthTrace] = ()
    progress: Callable[[str], None] = lambda text: None

    def replay(self, label: str, policy: Policy, truth: Truth) -> PolicyResult:
        """The batches under a policy.

        Args:
            truth: what steps and switches take.
        """
        self.progress(label)
        capacity = ReplicaCapacity.of(self.profile)
        runs = simulate_batches((*self.warm_up, *self.batches), policy, truth, capacity)
        return PolicyResult(label, tuple(runs[len(self.warm_up) :]))

    def replay_static(self, truth: Truth) -> dict[Layout, PolicyResult]:
        """The batches under every static layout of the profile."""
        return {
            layout: self.replay(f"static {layout}", StayPolicy(layout), truth)
            for layout in self.profile.layouts
        }

    def adaptive(self, profile: Profile, draft_lengths: Sequence[int] = (0,)) -> AdaptivePolicy:
        """PAT's default policy, which believes `profile` and has seen no length yet.

        Args:
            draft_lengths: among which it chooses.
        """
        return AdaptivePolicy(
            profile,
            bound=max(batch.max_tokens for batch in self.batches),
            draft_lengths=draft_lengths,
            # The time that planning takes here is not the simulated engine's.
            timer=lambda: 0.0,
        )
