"""The settings of arXiv 2605.23945 on modelled profiles.

Static layouts, the paper's policy, PAT and a clairvoyant have the same batches.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import permutations

import numpy as np
from numpy.typing import ArrayLike

from benchmarks.simulated.clairvoyant import ClairvoyantPolicy
from benchmarks.simulated.replay import Comparison, Setting, least_of_each
from benchmarks.truths import FixedSwitches
from pat_vllm.layout import Layout
from pat_vllm.predictor.policy import SETTLE_SECONDS, Policy
from pat_vllm.predictor.state import LiveState
from pat_vllm.predictor.step_time import StepTimeModel
from pat_vllm.profiling.profile import Profile, StepShape, SwitchSample
from pat_vllm.reporting import SwitchReport
from pat_vllm.simulator.modelled.hardware import measured_noise
from pat_vllm.simulator.replica import ReplicaCapacity
from pat_vllm.simulator.shapes import generator
from pat_vllm.simulator.truth import ReplayedTruth

SWITCH_SECONDS = 5.52
"""A switch on the paper's hardware, seconds."""
GENERATION_SHARE = 0.272 / 0.346
"""Share of generation in an iteration. Derived: the paper's iteration takes 27.2% less when its
generation takes 34.6% less, which holds if nothing else changes and generation is 0.786 of it."""

BATCH = 128
"""The paper's batch. Whether it counts responses, or prompts with several samples each, it does not
say; responses are assumed."""
BASELINE_TP = 2
"""The paper's predictor errors are for TP2DP4 and TP8DP1, so that these seem to be its layouts."""

SAMPLE = 20_000
"""Lengths from which the paper's policy knows the distribution."""
_SAMPLE_SEED = 1_000_003
"""Not that of a batch."""

_LLAMA, _QWEN = "llama-3.1-8b", "qwen3-14b"

SETTINGS: Mapping[Setting, tuple[float | None, float | None]] = {
    Setting("H100", _LLAMA, BATCH, 6 * 1024): (None, None),
    Setting("H100", _LLAMA, BATCH, 8 * 1024): (None, None),
    Setting("H100", _LLAMA, BATCH, 16 * 1024): (None, None),
    Setting("H100", _LLAMA, BATCH, 24 * 1024): (-0.346, 1.37),
    Setting("H100", _QWEN, BATCH, 8 * 1024): (None, None),
    Setting("H100", _QWEN, BATCH, 16 * 1024): (-0.320, 1.29),
    Setting("H100", _QWEN, BATCH, 24 * 1024): (None, None),
    Setting("A40", _LLAMA, BATCH, 16 * 1024): (None, 1.27),
    Setting("A40", _QWEN, BATCH, 16 * 1024, ranks=16): (None, 1.18),
}
"""The paper's experiments, and what it published of each: the change of the generation time, and
the speed-up end to end."""


class PaperPolicy(Policy):
    """At most one switch per batch.

    It begins in the layout whose step is fastest with the whole batch live. Whenever a response
    has ended it compares step times of the layouts at the present load, and switches to the
    fastest when

        (step now - step then) * expected remaining tokens  >  cost.

    What the paper does for the length estimate is not known. Here it is the mean remaining length
    of a live request, given what it has generated, under the true distribution of lengths: more
    than an offline profile on synthetic shapes can know.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        step: Callable[[Layout, StepShape], float],
        lengths: ArrayLike,
        *,
        requests: int,
        prompt: int,
        cost: float = SWITCH_SECONDS,
        home: Layout | None = None,
    ) -> None:
        """Plan for batches of `requests` with prompts of `prompt` tokens.

        Args:
            step: seconds of a step, by layout.
            lengths: a large sample of the workload's response lengths, tokens.
            cost: of a switch, seconds.
            home: where a batch begins; None: where its first steps are fastest.
        """
        self._layouts = tuple(layouts)
        self._step_seconds = step
        self._lengths = np.sort(np.asarray(lengths, dtype=np.float64))
        # Suffix sums, for means over all that are longer than a request is now.
        self._longer = np.append(np.cumsum(self._lengths[::-1])[::-1], 0.0)
        self._cost = cost
        self._switched = False
        self._live = -1
        context = int(requests * (prompt + self._lengths.mean() / 2))
        longest = prompt + int(self._lengths.mean())
        self.home = home or min(
            self._layouts, key=lambda layout: self._step(layout, requests, context, longest)
        )

    def choose(self, state: LiveState) -> Layout:
        settled = state.quiet >= SETTLE_SECONDS
        if self._switched or not settled or state.num_seqs == self._live:
            return state.layout
        self._live = state.num_seqs
        requests = state.requests()
        context, longest = int(requests.context.sum()), int(requests.context.max())
        times = {
            layout: self._step(layout, state.num_seqs, context, longest) for layout in self._layouts
        }
        best = min(times, key=times.__getitem__)
        remaining = float(self.remaining(requests.num_output_tokens).mean())
        saving = (times[state.layout] - times[best]) * remaining
        return best if saving > self._cost else state.layout

    def remaining(self, generated: ArrayLike) -> np.ndarray:
        """Mean tokens to come for responses that have `generated` tokens so far."""
        generated = np.asarray(generated, dtype=np.float64)
        first = np.searchsorted(self._lengths, generated, side="right")
        count = len(self._lengths) - first
        return np.where(count > 0, self._longer[first] / np.maximum(count, 1) - generated, 0.0)

    def switched(self, report: SwitchReport) -> None:
        self._switched = report.reason != "idle"

    def idle(self, now: float) -> None:
        self._switched = False
        self._live = -1

    def _step(self, layout: Layout, live: int, context: int, longest: int) -> float:
        """Step time with the requests spread evenly."""
        return self._step_seconds(
            layout,
            StepShape(
                -(-live // layout.replicas),
                -(-context // layout.replicas),
                longest,
                busy=min(live, layout.replicas),
            ),
        )


@dataclass(frozen=True)
class Result:
    """Seconds of each batch.

    Attributes:
        static: by layout.
        paper: under the paper's policy.
        expensive, ours: under PAT with switches that take as long as the paper's, and with its own.
        clairvoyant: of the best of static layouts, `ours` and the clairvoyant in each batch.
    """

    static: Mapping[str, Sequence[float]]
    paper: Sequence[float]
    expensive: Sequence[float]
    ours: Sequence[float]
    clairvoyant: Sequence[float]


def run(setting: Setting, count: int) -> Result:
    """Replay so many batches of a setting under every policy."""
    profile, alone = setting.profile(), setting.profile(static=True)
    batches, layouts = setting.batches(count), profile.layouts
    cheap = ReplayedTruth(alone.model_copy(update={"switches": profile.switches}), measured_noise())
    costly = FixedSwitches(cheap, SWITCH_SECONDS)
    sample = generator(setting.workload)(SAMPLE, setting.max_tokens, _SAMPLE_SEED)
    prompts = [tokens for batch in batches.reported for tokens in batch.num_prompt_tokens]
    paper = PaperPolicy(
        layouts,
        StepTimeModel.fit(profile).step,
        sample.lengths,
        requests=setting.requests,
        prompt=int(statistics.mean(prompts)),
        home=next(layout for layout in layouts if layout.tp >= BASELINE_TP),
    )
    several = batches.adaptive(with_switch_cost(profile, SWITCH_SECONDS))
    told = ClairvoyantPolicy(
        (batches.learnt, *batches.reported), layouts, cheap, ReplicaCapacity.of(profile)
    )
    static = [*batches.replay_static(cheap, alone).values()]
    ours = batches.replay("PAT", batches.adaptive(profile), cheap, profile)
    best = batches.replay("clairvoyant", told, cheap, profile)

    def seconds(policy: Policy) -> list[float]:
        return [run.seconds for run in batches.replay("", policy, costly, profile).runs]

    return Result(
        {result.label: [run.seconds for run in result.runs] for result in static},
        seconds(paper),
        seconds(several),
        [run.seconds for run in ours.runs],
        least_of_each([*static, ours, best]),
    )


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
        for source, target in permutations(profile.layouts, 2)
    )
    return profile.model_copy(update={"switches": switches})


def row(setting: Setting, result: Result) -> tuple[str, ...]:
    """Cells: medians, with the range over batches."""
    best = min(result.static, key=lambda layout: sum(result.static[layout]))
    low = next(
        seconds for name, seconds in result.static.items() if Layout.parse(name).tp >= BASELINE_TP
    )
    generation, speedup = SETTINGS.get(setting, (None, None))
    static = ", ".join(
        f"{layout}: {statistics.median(seconds):.0f}" + ("*" if layout == best else "")
        for layout, seconds in result.static.items()
    )
    policies = (result.paper, result.expensive, result.ours)
    change = statistics.median(_changes(result.ours, low))
    return (
        f"{setting.model}, {setting.ranks} x {setting.gpu}, {setting.max_tokens // 1024}K",
        static,
        *(_shown(_changes(seconds, result.static[best])) for seconds in policies),
        f"{_rounded(sum(result.ours) / sum(result.clairvoyant) - 1):+.1%}",
        _shown(_changes(result.ours, low)),
        "" if generation is None else f"{generation:+.1%}",
        f"{1 / (1 + GENERATION_SHARE * change):.2f}x",
        "" if speedup is None else f"{speedup:.2f}x",
    )


def _changes(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    return [a / b - 1 for a, b in zip(ours, theirs, strict=True)]


def _shown(changes: Sequence[float]) -> str:
    least, most = min(changes), max(changes)
    median, least, most = map(_rounded, (statistics.median(changes), least, most))
    return f"{median:+.1%} ({least:+.1%} to {most:+.1%})"


def _rounded(part: float) -> float:
    """To a tenth of a percent, without a negative zero."""
    return round(part, 3) + 0.0


NOTES = f"""\
- `*`: the best static layout.
- Published figures are from public summaries of the paper. It does not say which static layout is
  its baseline; its predictor errors are for TP2DP4 and TP8DP1, so tp{BASELINE_TP} is taken.
- The paper's policy begins there and switches at most once, at {SWITCH_SECONDS} s. It is given the
  true distribution of lengths and the true step times, more than its offline profile can know.
- pat-vllm learns lengths as it goes, one batch before those reported included, and begins in its
  base layout. "several expensive" pays {SWITCH_SECONDS} s for each switch.
- Every policy pays for the way back to the layout in which its next batch begins.
- Regret is against a clairvoyant: the same planner, told all lengths and the true times, or what
  did better under the same truth.
- Steps are those of the modelled profile, with noise bootstrapped from a measured one
  (pat_vllm/simulator/modelled/measured.json).
- End to end is derived: generation is {GENERATION_SHARE:.3f} of an iteration by the paper's own
  two figures (generation -34.6%, iteration -27.2%)."""


def comparison(count: int) -> Comparison[Setting, Result]:
    """Over so many batches of each setting."""
    headers = (
        "setting", "static, s", "paper's policy", "pat-vllm, several expensive",
        "pat-vllm, several cheap", "regret", "pat-vllm vs static tp2", "published",
        "end to end vs tp2", "published e2e",
    )  # fmt: skip
    text = (
        "The settings of arXiv 2605.23945 on MODELLED profiles, nothing measured. Time of a batch "
        "relative to the best static layout: median (range) over batches."
    )
    work = partial(run, count=count)
    return Comparison("paper-modelled", text, headers, work, row, lambda results: NOTES)
