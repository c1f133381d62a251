"""Which parts of the predictor earn their place: `python -m benchmarks.simulated.elimination`.

Backward elimination by batch time. PAT replays every workload without each of its parts; the part
without which batches take least time is dropped, and the rest is measured again, for as long as
nothing loses more than is allowed. Profiles are modelled and measured, right and wrong by two.
Steps of `8 x H100, kernels` have the structure of `KernelTruth`, and its profile measures them with
their noise; `8 x H100, drafts` has draft tokens, of which half are accepted.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Annotated, Any
from unittest.mock import patch

import numpy as np
import typer

from benchmarks.held_out import held_out_error
from benchmarks.record import table
from benchmarks.simulated.kernel_truth import KernelTruth
from benchmarks.simulated.processes import Processes
from pat_vllm.advice.rollouts import DRAFT_LENGTHS
from pat_vllm.layout import Layout
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.lengths import Pool, Prior
from pat_vllm.predictor.step_residual import StepFit, by_layout, learnable
from pat_vllm.profiling.profile import Profile, StepSample, StepShape
from pat_vllm.simulator import shapes
from pat_vllm.simulator.modelled.hardware import measured_noise, modelled_profile
from pat_vllm.simulator.replay import simulate_batches
from pat_vllm.simulator.traces import LengthTrace
from pat_vllm.simulator.truth import ReplayedTruth

BATCHES = 3
"""One after another, so that learning counts."""

MOST_LOST = 0.01
"""Of a workload's time, relative to the whole predictor's."""

MOST_LOST_WRONG = 0.05
"""By a profile that is wrong by two, relative to the whole predictor with the right one; where the
whole one loses more, that."""

_HERE = "pat_vllm.predictor"


def _unseen(prior: Prior, pool: Pool) -> Pool:
    """The prior as it is before anything was seen."""
    return Pool(prior._unseen @ prior._ends, prior._unseen @ prior._tokens)


def _always(steps: Sequence[StepSample], _: float) -> dict[Layout, StepFit]:
    """The residual in every layout that has samples enough."""
    enough = learnable(by_layout(steps, decodes=True))
    return {one: StepFit((1.0,) if one in enough else ()) for one in by_layout(steps)}


def _never(steps: Sequence[StepSample], _: float) -> dict[Layout, StepFit]:
    return dict.fromkeys(by_layout(steps), StepFit())


PARTS: Mapping[str, Callable[[], AbstractContextManager[Any]]] = {
    "online correction": lambda: patch(
        f"{_HERE}.step_time.StepTimeModel.observe", lambda *arguments: None
    ),
    "probes": lambda: patch(f"{_HERE}.probing.Prober.find", lambda *_: None),
    "likely prior": lambda: patch(f"{_HERE}.lengths.Prior.given", _unseen),
    "news of corrections": lambda: patch(f"{_HERE}.step_time.StepTimeModel.correction_version", 0),
    "trusted steps": lambda: patch(f"{_HERE}.adaptive._TRUSTED_STEPS", 0),
    "dwell": lambda: patch(f"{_HERE}.adaptive._DWELL", 0.0),
    "choice of the residual": lambda: patch(f"{_HERE}.step_time.cross_validate", _always),
    "residual": lambda: patch(f"{_HERE}.step_time.cross_validate", _never),
    "knees": lambda: patch(f"{_HERE}.step_base.KNEES", ()),
    "growing contexts": lambda: patch(f"{_HERE}.course._MOST_PARTS", 1),
}
"""What makes PAT do without each part."""


@dataclass(frozen=True)
class Scenario:
    """Batches of a workload on an engine, whose profile has the steps of the layout `wrong[0]`
    `wrong[1]` times as long as they are."""

    engine: str
    workload: str
    seed: int
    wrong: tuple[Layout, float] | None = None


@cache
def engine(name: str) -> Profile:
    """`8 x A40` and the like are modelled; anything else is the file of a measured profile."""
    if " x " not in name:
        return Profile.load(Path(name))
    devices, _, kind = name.partition(", ")
    ranks, gpu = devices.split(" x ")
    lengths = DRAFT_LENGTHS if kind == "drafts" else ()
    return modelled_profile("llama-3.1-8b", gpu, int(ranks), draft_lengths=lengths)


def _truth(name: str, seed: int) -> ReplayedTruth:
    profile = engine(name)
    kind = KernelTruth if name.endswith(", kernels") else ReplayedTruth
    return kind(profile, measured_noise() if profile.kind == "modelled" else profile, seed)


def scaled_steps(profile: Profile, layout: Layout, factor: float) -> Profile:
    """A profile in which the steps of a layout take `factor` times as long."""
    steps = tuple(
        s.model_copy(
            update={name: factor * getattr(s, name) for name in ("seconds", "low", "high")}
        )
        if s.layout == layout
        else s
        for s in profile.steps
    )
    return profile.model_copy(update={"steps": steps})


@cache
def profiled(name: str) -> Profile:
    """What an engine believes of itself: of `KernelTruth` five steps each of a full profile."""
    profile = engine(name)
    if not name.endswith(", kernels"):
        return profile
    truths = [_truth(name, 1_000_000 + repeat) for repeat in range(5)]
    steps = []
    for s in profile.steps:
        room = profile.kv_tokens[s.layout.tp] // max(1, s.longest)
        between = min(s.batch + s.batch // 2, room, profile.max_num_seqs[s.layout.tp])
        for batch in sorted({s.batch, s.batch if s.prefill else between}):
            shape = replace(s.shape, batch=batch, context=s.longest * batch)
            times = [truth.step_seconds(s.layout, shape, 0.0) for truth in truths]
            steps.append(StepSample.of(s.layout, shape, times))
    return profile.model_copy(update={"steps": tuple(steps)})


@cache
def batches_of(name: str, workload: str, seed: int) -> tuple[LengthTrace, ...]:
    """The batches of a scenario."""
    profile = engine(name)
    modelled = profile.kind == "modelled"
    bound, requests = (8192, 128) if modelled else (384, 64)
    median = bound / 16

    def batch(seed: int) -> LengthTrace:
        if workload == "log-normal":
            return shapes.lognormal(requests, median, 1.2, bound, seed)
        if workload == "two modes":
            return shapes.two_mode(requests, median, 0.6, 0.1, bound, seed)
        if workload == "uniform":
            return shapes.uniform(requests, 1, bound // 2, bound, seed)
        if workload == "straggler":
            return shapes.straggler(requests, bound // 16, bound, bound, seed)
        if workload == "GRPO":
            return shapes.grpo(requests // 8, 8, 0.6, 1.0, median, bound, seed)
        if workload == "staggered":
            first = ReplayedTruth(profile).step_seconds(
                profile.layouts[0], StepShape(8, 8 * bound // 4, bound // 4), 0.0
            )
            return shapes.staggered(requests, median, 1.0, bound, first * bound / 64, seed=seed)
        whole = shapes.deepscaler(requests, seed=seed)
        lengths = tuple(max(1, one * bound // whole.max_tokens) for one in whole.lengths)
        return replace(whole, lengths=lengths, max_tokens=bound)

    if workload == "shift":
        medians = (median / 2, median / 2, 2 * median)
        found = shapes.shifted(medians, requests, 0.8, bound, seed)
    else:
        found = tuple(batch(1000 * seed + number) for number in range(BATCHES))
    prompts = 256 if modelled else 32
    return tuple(replace(one, num_prompt_tokens=(prompts,) * len(one)) for one in found)


WORKLOADS = (
    "log-normal",
    "two modes",
    "uniform",
    "straggler",
    "staggered",
    "shift",
    "GRPO",
    "DeepScaleR-like",
)
_WRONG_ON = ("log-normal", "straggler", "uniform")
"""Workloads with wrong profiles: a tail, one response that lasts, and hardly a tail."""


def seconds(scenario: Scenario, without: frozenset[str]) -> float:
    """Of all batches of a scenario, under PAT without some of its parts."""
    profile = believed = profiled(scenario.engine)
    truth = _truth(scenario.engine, scenario.seed)
    batches = batches_of(scenario.engine, scenario.workload, scenario.seed)
    if scenario.wrong is not None:
        believed = scaled_steps(profile, *scenario.wrong)
    with ExitStack() as stack:
        for part in sorted(without):
            stack.enter_context(PARTS[part]())
        lengths: tuple[int, ...] = (0,)
        if scenario.engine.endswith(", drafts"):
            lengths = DRAFT_LENGTHS
            batches = tuple(replace(batch, acceptance=0.5) for batch in batches)
        policy = AdaptivePolicy(
            believed, bound=batches[0].max_tokens, draft_lengths=lengths, timer=lambda: 0.0
        )
        runs = simulate_batches(batches, policy, truth, profile)
    return sum(run.seconds for run in runs)


@dataclass(frozen=True)
class Loss:
    """What PAT without some parts loses against the whole; fractions, geometric means.

    Attributes:
        mean: over all scenarios.
        workloads: by workload, with right profiles.
        wrong: by how the profile is wrong, against the whole PAT with the right one.
    """

    mean: float
    workloads: Mapping[str, float]
    wrong: Mapping[str, float]

    def allowed(self, whole: Loss) -> bool:
        """Whether nothing loses more than it may."""
        return max(self.workloads.values()) <= MOST_LOST and all(
            lost <= max(MOST_LOST_WRONG, whole.wrong[name]) for name, lost in self.wrong.items()
        )


class Elimination:
    """Measures PAT without parts, each scenario once."""

    def __init__(
        self,
        scenarios: Sequence[Scenario],
        processes: Processes,
        parts: Sequence[str] | None = None,
    ) -> None:
        """`parts` are those that may be dropped; None: all."""
        self.scenarios = scenarios
        self._parts = parts or [*PARTS]
        self._processes = processes
        self._known: dict[frozenset[str], list[float]] = {}

    def measure(self, without: frozenset[str], part: str = "") -> list[float]:
        """Seconds by scenario, without `part` besides."""
        both = without | {part} if part else without
        if both not in self._known:
            work, chunk = partial(seconds, without=both), max(1, len(self.scenarios) // 16)
            self._known[both] = [*self._processes.map(work, self.scenarios, chunk)]
        return self._known[both]

    def loss(self, without: frozenset[str], part: str = "") -> Loss:
        """Against the whole predictor."""
        whole, now = self.measure(frozenset()), self.measure(without, part)
        right = {
            (s.engine, s.workload, s.seed): time
            for s, time in zip(self.scenarios, whole, strict=True)
            if s.wrong is None
        }
        by_workload: dict[str, list[float]] = {}
        by_wrong: dict[str, list[float]] = {}
        for s, time, before in zip(self.scenarios, now, whole, strict=True):
            if s.wrong is None:
                by_workload.setdefault(s.workload, []).append(time / before)
            else:
                at = engine(s.engine).layouts.index(s.wrong[0])
                name = f"{'widest' if at else 'base'} layout's steps x {s.wrong[1]:g}"
                ratio = time / right[s.engine, s.workload, s.seed]
                by_wrong.setdefault(name, []).append(ratio)
        return Loss(
            _mean([time / before for time, before in zip(now, whole, strict=True)]),
            {name: _mean(ratios) for name, ratios in by_workload.items()},
            {name: _mean(ratios) for name, ratios in by_wrong.items()},
        )

    def path(self, tell: Callable[[str], None]) -> Iterator[tuple[str, bool, Loss]]:
        """The parts in the order in which they were tried: name, whether dropped, what was lost.

        A part's loss is measured again once it comes first by what it was before, so not all of
        them at each step.
        """
        whole = self.loss(frozenset())
        yield "", True, whole
        without: frozenset[str] = frozenset()
        losses: dict[str, tuple[int, Loss]] = {}
        for part in self._parts:
            losses[part] = (0, self.loss(without, part))
            tell(f"without {part}: {losses[part][1].mean:+.2%}")
        while losses:
            part = min(losses, key=lambda one: losses[one][1].mean)
            measured, loss = losses[part]
            if measured != len(without):
                losses[part] = (len(without), self.loss(without, part))
                tell(f"{len(without)} dropped, without {part}: {losses[part][1].mean:+.2%}")
                continue
            del losses[part]
            dropped = loss.allowed(whole)
            yield part, dropped, loss
            if dropped:
                without |= {part}


def _mean(ratios: Sequence[float]) -> float:
    """Geometric, less 1."""
    return statistics.geometric_mean(ratios) - 1


def held_out(names: Sequence[str], seeds: int) -> str:
    """Mean error of decode steps that were held out, with several ways to split them; Markdown."""
    rows = []
    for name in names:
        row = [name]
        for without in ("residual", "choice of the residual", None):
            with PARTS[without]() if without else nullcontext():
                folds = (held_out_error(profiled(name), seed=seed) for seed in range(seeds))
                means = [np.hstack([*errors.values()]).mean() for errors in folds]
            row.append(f"{statistics.mean(means):.2%} ({min(means):.1%} to {max(means):.1%})")
        rows.append(row)
    return table(("profile", "roofline alone", "with the residual", "as chosen"), rows)


def eliminate(
    names: Sequence[str],
    seeds: int,
    wrong_seeds: int,
    processes: int,
    parts: Sequence[str] | None = None,
) -> str:
    """The path of the elimination; Markdown.

    Args:
        names: of engines.
        seeds, wrong_seeds: per workload, with right and with wrong profiles.
        parts: that may be dropped; None: all.
    """
    scenarios = [Scenario(*one) for one in product(names, WORKLOADS, range(seeds))]
    for name, workload, seed in product(names, _WRONG_ON, range(wrong_seeds)):
        layouts = engine(name).layouts
        for layout, factor in product((layouts[0], layouts[-1]), (0.5, 2.0)):
            scenarios.append(Scenario(name, workload, seed, (layout, factor)))
    rows = []
    with Processes(processes) as pool:
        for tried, dropped, loss in Elimination(scenarios, pool, parts).path(
            lambda text: print(text, flush=True)
        ):
            worst = max(loss.workloads, key=loss.workloads.__getitem__)
            row = (
                tried or "nothing",
                "dropped" if dropped else "stays",
                f"{loss.mean:+.2%}",
                f"{loss.workloads[worst]:+.2%} ({worst})",
                f"{max(loss.wrong.values(), default=0):+.2%}",
            )
            rows.append(row)
            print(" | ".join(row), flush=True)
    headers = ("without", "", "all, against the whole", "worst workload", "worst wrong profile")
    return table(headers, rows)


def main(
    engines: Annotated[
        list[str] | None,
        typer.Option("--engine", help="`8 x H100` for a modelled one, or a profile's file."),
    ] = None,
    seeds: Annotated[int, typer.Option(min=1, help="Per workload.")] = 10,
    wrong_seeds: Annotated[int, typer.Option(min=0, help="Likewise, with wrong profiles.")] = 3,
    processes: Annotated[int, typer.Option(min=1, help="At once.")] = 2,
    part: Annotated[list[str] | None, typer.Option(help="May be dropped; default: all.")] = None,
    steps: Annotated[bool, typer.Option(help="Only how well steps are predicted.")] = False,
) -> None:
    """Which parts of the predictor earn their place. Everything here is simulated."""
    if unknown := {*(part or ())} - set(PARTS):
        raise typer.BadParameter(f"no such part: {unknown}; there are {[*PARTS]}")
    names = engines or ["8 x H100", "8 x A40", "pat_vllm/simulator/modelled/measured.json"]
    if steps:
        print(held_out(names, seeds))
    else:
        print(eliminate(names, seeds, wrong_seeds, processes, part))


if __name__ == "__main__":
    typer.run(main)
