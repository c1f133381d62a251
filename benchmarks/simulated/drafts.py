"""Layout and draft length, planned together.

Every side has the same batches, of which the same tokens are guessed by a drafter, the same
concurrency and the same router: each static layout without drafts, with each draft length and with
vLLM's schedule by batch size, tuned for that layout; PAT without drafts and with; a clairvoyant.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product

from benchmarks.simulated.clairvoyant import ClairvoyantPolicy
from benchmarks.simulated.replay import (
    Comparison,
    Replayed,
    Setting,
    fastest,
    least_of_each,
)
from pat_vllm.layout import Layout
from pat_vllm.predictor.policy import SchedulePolicy
from pat_vllm.simulator.modelled.hardware import measured_noise
from pat_vllm.simulator.replica import ReplicaCapacity
from pat_vllm.simulator.truth import ReplayedTruth
from pat_vllm.simulator.tuned import DRAFT_LENGTHS, tuned_schedule
from pat_vllm.speculation import Schedule


@dataclass(frozen=True)
class Result:
    """Seconds of all batches of a setting, by side.

    Attributes:
        plain, fixed, tuned: of the best static layout without drafts, with the best draft length
            and with its tuned schedule.
        pat_plain, pat: of PAT without drafts, and with.
        clairvoyant: of the best of all sides in each batch.
        chosen: names of the first three, and what PAT did.
    """

    plain: float
    fixed: float
    tuned: float
    pat_plain: float
    pat: float
    clairvoyant: float
    chosen: tuple[str, ...]

    @property
    def static(self) -> float:
        """Of the best static layout with its best draft length or schedule."""
        return min(self.plain, self.fixed, self.tuned)


def run(setting: Setting, count: int) -> Result:
    """Replay so many batches of a setting under every side."""
    lengths = DRAFT_LENGTHS[1:]
    profile = setting.profile(draft_lengths=lengths)
    alone = setting.profile(draft_lengths=lengths, static=True)
    truth = ReplayedTruth(alone.model_copy(update={"switches": profile.switches}), measured_noise())
    batches, believed = setting.batches(count), setting.believed(profile)

    def static(layout: Layout, schedule: Schedule, label: str) -> Replayed:
        policy = SchedulePolicy(layout, (), {layout: schedule})
        return batches.replay(f"{layout} {label}", policy, truth, alone)

    plain: list[Replayed] = []
    fixed: list[Replayed] = []
    tuned: list[Replayed] = []
    for layout in alone.layouts:
        most = alone.max_num_seqs[layout.tp]
        for k in DRAFT_LENGTHS:
            (fixed if k else plain).append(static(layout, ((1, most, k),), f"k={k}"))
        tuned.append(static(layout, tuned_schedule(truth, layout, most, batches.reported), "tuned"))
    pat_plain = batches.replay("PAT k=0", batches.adaptive(believed), truth, profile)
    pat = batches.replay("PAT", batches.adaptive(believed, DRAFT_LENGTHS), truth, profile)
    told = ClairvoyantPolicy(
        (batches.learnt, *batches.reported),
        profile.layouts,
        truth,
        ReplicaCapacity.of(profile),
        DRAFT_LENGTHS,
    )
    sides = [*plain, *fixed, *tuned, pat_plain, pat]
    sides.append(batches.replay("clairvoyant", told, truth, profile))
    bests = [fastest(some) for some in (plain, fixed, tuned)]
    return Result(
        bests[0].seconds,
        bests[1].seconds,
        bests[2].seconds,
        pat_plain.seconds,
        pat.seconds,
        sum(least_of_each(sides)),
        (*(best.label for best in bests), pat.path),
    )


def usual_settings() -> Iterator[Setting]:
    """Hardware and models by batch and acceptance; then long responses, a slow drafter, other
    lengths and wrong predictors."""
    for gpu, model in product(("H100", "A40"), ("llama-3.1-8b", "qwen3-14b")):
        for requests, acceptance in product((128, 1024), (0.3, 0.5, 0.7)):
            yield Setting(gpu, model, requests, acceptance=acceptance)
        yield Setting(gpu, model, 2048, acceptance=0.5)
        yield Setting(gpu, model, max_tokens=32768, acceptance=0.5)
        yield Setting(gpu, model, acceptance=0.5, drafting=1e-3)
    for workload in ("log-normal", "two-mode", "uniform", "straggler", "grpo"):
        for acceptance in (0.0, 0.5):
            yield Setting(requests=256, workload=workload, acceptance=acceptance)
    for wrong in ("steps x 2", "steps / 2", "acceptance x 2", "acceptance / 2"):
        for gpu in ("H100", "A40"):
            yield Setting(gpu, requests=256, acceptance=0.4, wrong=wrong)


def row(setting: Setting, result: Result) -> tuple[str, ...]:
    """Cells; times without a unit are relative to the best static layout without drafts."""

    def relative(seconds: float) -> str:
        return f"{seconds / result.plain:.3f}"

    names = [name.split(" ", 1) for name in result.chosen[:3]]
    return (
        f"{setting.ranks} x {setting.gpu}",
        setting.model,
        f"{setting.workload}{', wrong: ' if setting.wrong else ''}{setting.wrong}",
        str(setting.requests),
        str(setting.max_tokens),
        f"{setting.acceptance:g}",
        f"{setting.drafting * 1e3:g}",
        f"{result.plain:.1f} ({names[0][0]})",
        f"{relative(result.fixed)} ({' '.join(names[1])})",
        f"{relative(result.tuned)} ({names[2][0]})",
        relative(result.pat_plain),
        relative(result.pat),
        f"{result.pat / result.static:.3f}",
        f"{result.pat / result.clairvoyant - 1:+.1%}",
        result.chosen[-1],
    )


def closing(results: Sequence[tuple[Setting, Result]]) -> str:
    """The middle and the worst of all settings with right predictors."""
    ratios = [result.pat / result.static for setting, result in results if not setting.wrong]
    if not ratios:
        return ""
    return f"PAT / best static: median {statistics.median(ratios):.3f}, worst {max(ratios):.3f}"


def comparison(count: int) -> Comparison[Setting, Result]:
    """Over so many batches of each setting."""
    headers = (
        "GPUs", "model", "lengths", "requests", "max_tokens", "acceptance", "drafting, ms",
        "static, k = 0: s", "best k", "tuned", "PAT, k = 0", "PAT", "PAT / best static", "regret",
        "PAT's last batch",
    )  # fmt: skip
    text = "Simulated on MODELLED profiles, nothing measured."
    return Comparison("layouts-and-drafts", text, headers, partial(run, count=count), row, closing)
