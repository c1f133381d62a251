"""`python -m benchmarks.layouts_and_drafts`: layout and draft length, planned together. Simulated.

Every side has the same batches, of which the same tokens are guessed by a drafter, the same
concurrency and the same router: each static layout without drafts, with each draft length and with
vLLM's schedule by batch size, tuned for that layout; PAT without drafts and with; a clairvoyant.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.paper.clairvoyant import ClairvoyantPolicy
from benchmarks.replaying import PolicyResult, Replayer
from pat_vllm.cli.results import table, to_json
from pat_vllm.layout import Layout
from pat_vllm.predictor.policy import SchedulePolicy
from pat_vllm.profiling.profile import Profile
from pat_vllm.reporting.plot import LAYOUT_COLOURS, draw_drafts
from pat_vllm.simulator.modelled.hardware import measured_noise, modelled_profile
from pat_vllm.simulator.replica import ReplicaCapacity
from pat_vllm.simulator.traces import LengthTrace, generator
from pat_vllm.simulator.truth import ReplayedTruth
from pat_vllm.simulator.tuned import DRAFT_LENGTHS, tuned_schedule
from pat_vllm.speculation import Schedule


@dataclass(frozen=True)
class Setting:
    """One comparison.

    Attributes:
        drafting: seconds that the drafter adds to a step.
        wrong: what the predictor is wrong about: "" nothing; "steps x 2" or "steps / 2", those of
            the widest layout in its profile; "acceptance x 2" or "acceptance / 2", that of the
            batches from which it has learnt.
    """

    gpu: str = "H100"
    model: str = "llama-3.1-8b"
    requests: int = 1024
    max_tokens: int = 16384
    acceptance: float = 0.5
    drafting: float = 0.0
    workload: str = "deepscaler"
    wrong: str = ""
    ranks: int = 8


@dataclass(frozen=True)
class Result:
    """Seconds of all batches of a setting, by side.

    Attributes:
        plain, fixed, dynamic: of the best static layout without drafts, with the best draft length
            and with its tuned schedule.
        pat_plain, pat: of PAT without drafts, and with.
        clairvoyant: of the best of all sides in each batch.
        chosen: names of the first three, and what PAT did.
    """

    plain: float
    fixed: float
    dynamic: float
    pat_plain: float
    pat: float
    clairvoyant: float
    chosen: tuple[str, ...]

    @property
    def static(self) -> float:
        """Of the best static layout with its best draft length or schedule."""
        return min(self.plain, self.fixed, self.dynamic)


def run_setting(setting: Setting, seeds: int) -> Result:
    """Replay a setting's batches under every side, after one from which policies learn."""
    profile, replayer = _replayer(setting, seeds)
    alone = replace(replayer, profile=_profile(setting, static=True))
    steps = alone.profile.model_copy(update={"switches": profile.switches})
    truth = ReplayedTruth(steps, measured_noise())
    batches = (*replayer.warm_up, *replayer.batches)

    def static(layout: Layout, schedule: Schedule, label: str) -> PolicyResult:
        policy = SchedulePolicy(layout, (), {layout: schedule})
        return alone.replay(f"{layout} {label}", policy, truth)

    fixed: list[PolicyResult] = []
    dynamic: list[PolicyResult] = []
    plain: list[PolicyResult] = []
    for layout in alone.profile.layouts:
        most = alone.profile.max_num_seqs[layout.tp]
        for k in DRAFT_LENGTHS:
            result = static(layout, ((1, most, k),), f"k={k}")
            (fixed if k else plain).append(result)
        schedule = tuned_schedule(truth, layout, most, replayer.batches)
        dynamic.append(static(layout, schedule, "tuned"))
    believed = _believed(profile, setting.wrong)
    pat_plain = replayer.replay("PAT k=0", replayer.adaptive(believed), truth)
    pat = replayer.replay("PAT", replayer.adaptive(believed, draft_lengths=DRAFT_LENGTHS), truth)
    told = ClairvoyantPolicy(
        batches,
        profile.layouts,
        truth,
        ReplicaCapacity.of(profile),
        draft_lengths=DRAFT_LENGTHS,
    )
    sides = [*plain, *fixed, *dynamic, pat_plain, pat, replayer.replay("clairvoyant", told, truth)]
    clairvoyant = sum(
        min(side.runs[i].seconds for side in sides) for i in range(len(replayer.batches))
    )
    bests = [min(some, key=lambda one: one.seconds) for some in (plain, fixed, dynamic)]
    last = pat.runs[-1]
    path = " ".join(
        [
            str(last.timeline[0].layout),
            *(f"{switch.target}@{switch.num_seqs}" for switch in last.switches_on_the_way),
        ]
    )
    return Result(
        bests[0].seconds,
        bests[1].seconds,
        bests[2].seconds,
        pat_plain.seconds,
        pat.seconds,
        clairvoyant,
        (*(one.label for one in bests), path),
    )


def plot_batch(setting: Setting, path: Path) -> None:
    """Save a PNG of one batch under PAT: live requests and layouts, draft lengths and acceptance.

    It has learnt from one batch before.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    profile, replayer = _replayer(setting, 1)
    truth = ReplayedTruth(profile, measured_noise())
    policy = replayer.adaptive(profile, draft_lengths=DRAFT_LENGTHS)
    (run,) = replayer.replay("PAT", policy, truth).runs
    colour = dict(zip(profile.layouts, LAYOUT_COLOURS, strict=False))
    figure = Figure(figsize=(10, 6), layout="constrained")
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, gridspec_kw={"height_ratios": [3, 1.5]})
    figure.suptitle(
        f"Simulated, modelled step times: {setting.requests} responses of up to "
        f"{setting.max_tokens} tokens, {profile.title.removeprefix('modelled: ')}, "
        f"acceptance {setting.acceptance:g}",
        fontsize=11,
    )
    for layout, start, stop in run.spans:
        above.axvspan(start, stop, color=colour[layout], alpha=0.2, linewidth=0)
    above.step(
        [sample.at - run.began for sample in run.timeline],
        [max(sample.num_seqs, 0.8) for sample in run.timeline],
        where="post",
        color="#222222",
    )
    above.set_yscale("log", base=2)
    above.set_ylabel("live requests (log scale)")
    used = [one for one in profile.layouts if one in {span[0] for span in run.spans}]
    above.legend(
        handles=[Patch(color=colour[one], alpha=0.4, label=f"layout {one}") for one in used],
        loc="upper right",
    )
    draw_drafts(below, run.drafts, run.began, run.seconds, run.seconds / 60)
    below.set_xlabel("time since the batch was submitted (s)")
    for axes in (above, below):
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)


def _profile(setting: Setting, static: bool = False) -> Profile:
    """Of PAT's engine, or of static ones."""
    return modelled_profile(
        setting.model,
        setting.gpu,
        setting.ranks,
        draft_lengths=DRAFT_LENGTHS[1:],
        drafting=setting.drafting,
        static=static,
    )


def _replayer(setting: Setting, seeds: int) -> tuple[Profile, Replayer]:
    profile = _profile(setting)

    def batch(seed: int, acceptance: float) -> LengthTrace:
        make = generator(setting.workload)
        return replace(make(setting.requests, setting.max_tokens, seed), acceptance=acceptance)

    learnt = setting.acceptance
    if setting.wrong.startswith("acceptance"):
        learnt *= 2 if setting.wrong.endswith("x 2") else 0.5
    batches = [batch(seed, setting.acceptance) for seed in range(seeds)]
    return profile, Replayer(profile, batches, [batch(seeds, min(1.0, learnt))])


def _believed(profile: Profile, wrong: str) -> Profile:
    """The profile that the predictor is given."""
    if not wrong.startswith("steps"):
        return profile
    layout, factor = profile.layouts[-1], 2 if wrong.endswith("x 2") else 0.5

    def scaled(value: float) -> float:
        return factor * value

    steps = tuple(
        s.model_copy(update={name: scaled(getattr(s, name)) for name in ("seconds", "low", "high")})
        if s.layout == layout
        else s
        for s in profile.steps
    )
    return profile.model_copy(update={"steps": steps})


def usual_settings() -> Iterator[Setting]:
    """Hardware and models by batch and acceptance; then long responses, a slow drafter, other
    lengths and wrong predictors."""
    for gpu, model in product(("H100", "A40"), ("llama-3.1-8b", "qwen3-14b")):
        for requests, acceptance in product((128, 1024), (0.3, 0.5, 0.7)):
            yield Setting(gpu, model, requests, acceptance=acceptance)
        yield Setting(gpu, model, 2048)
        yield Setting(gpu, model, max_tokens=32768)
        yield Setting(gpu, model, drafting=1e-3)
    for workload in ("log-normal", "two-mode", "uniform", "straggler", "grpo"):
        for acceptance in (0.0, 0.5):
            yield Setting(requests=256, workload=workload, acceptance=acceptance)
    for wrong in ("steps x 2", "steps / 2", "acceptance x 2", "acceptance / 2"):
        for gpu in ("H100", "A40"):
            yield Setting(gpu, requests=256, acceptance=0.4, wrong=wrong)


HEADERS = (
    "GPUs", "model", "lengths", "requests", "max_tokens", "acceptance", "drafting, ms",
    "static, k = 0: s", "best k", "tuned", "PAT, k = 0", "PAT", "PAT / best static", "regret",
)  # fmt: skip


def row(setting: Setting, result: Result) -> tuple[str, ...]:
    """A line of the table; times without a unit are relative to the best static layout without
    drafts."""

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
        f"{relative(result.dynamic)} ({names[2][0]})",
        relative(result.pat_plain),
        relative(result.pat),
        f"{result.pat / result.static:.3f}",
        f"{result.pat / result.clairvoyant - 1:+.1%}",
    )


app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(
    gpu: Annotated[str | None, typer.Option(help="One setting in place of all: its GPU.")] = None,
    model: str = "llama-3.1-8b",
    requests: int = 1024,
    max_tokens: int = 16384,
    acceptance: float = 0.5,
    drafting: Annotated[float, typer.Option(help="Seconds of the drafter in a step.")] = 0.0,
    workload: str = "deepscaler",
    wrong: Annotated[str, typer.Option(help="E.g. `steps x 2`, `acceptance / 2`.")] = "",
    seeds: Annotated[int, typer.Option(min=1, help="Batches, after one to learn from.")] = 2,
    processes: Annotated[int, typer.Option(min=1)] = 1,
    output_dir: Annotated[Path | None, typer.Option(help="For JSON and Markdown.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG of a batch of one setting.")] = None,
) -> None:
    """Simulate one setting, or the usual ones."""
    settings = list(usual_settings())
    if gpu is not None:
        settings = [
            Setting(gpu, model, requests, max_tokens, acceptance, drafting, workload, wrong)
        ]
    if plot is not None:
        plot_batch(settings[0], plot)
    results: list[tuple[Setting, Result]] = []
    with ProcessPoolExecutor(processes) as pool:
        for setting, result in zip(
            settings, pool.map(run_setting, settings, [seeds] * len(settings)), strict=True
        ):
            results.append((setting, result))
            print(" | ".join((*row(setting, result), result.chosen[-1])), flush=True)
    by = table(HEADERS, [row(*one) for one in results])
    ratios = [result.pat / result.static for setting, result in results if not setting.wrong]
    closing = (
        f"PAT / best static: median {statistics.median(ratios):.3f}, worst {max(ratios):.3f}"
        if ratios
        else ""
    )
    print(f"{by}\n{closing}")
    if output_dir is not None:
        output_dir.mkdir(parents=True, exist_ok=True)
        (output_dir / "layouts-and-drafts.md").write_text(
            f"Simulated on MODELLED profiles, nothing measured.\n\n{by}\n{closing}\n"
        )
        content = [{"setting": asdict(s), "result": asdict(r)} for s, r in results]
        (output_dir / "layouts-and-drafts.json").write_text(to_json(content))


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.layouts_and_drafts")
