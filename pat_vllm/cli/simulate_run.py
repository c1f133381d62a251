"""`pat-vllm simulate`: one workload under every policy, or the paper's settings."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from pat_vllm.layout import Layout
from pat_vllm.predictor.adaptive import AdaptivePolicy, Tuning
from pat_vllm.predictor.policy import Policy, StayPolicy
from pat_vllm.predictor.profile import Profile, SwitchSample
from pat_vllm.predictor.step_time import StepTimeModel
from pat_vllm.simulator import traces
from pat_vllm.simulator.engine import Limits
from pat_vllm.simulator.hardware import gpu_names, modelled_profile
from pat_vllm.simulator.oracle import oracle
from pat_vllm.simulator.paper import (
    BATCH,
    GENERATION_SHARE,
    NODE_SIZE,
    SETTINGS,
    SWITCH_SECONDS,
    LimitedPolicy,
    PaperPolicy,
    PaperSetting,
)
from pat_vllm.simulator.replay import simulate_batches
from pat_vllm.simulator.run import SimulatedRun
from pat_vllm.simulator.traces import LengthTrace
from pat_vllm.simulator.truth import FixedSwitches, ProfileTruth, Truth

Generator = Callable[[int, int, int], LengthTrace]
WORKLOADS: dict[str, Generator] = {
    "deepscaler": lambda requests, bound, seed: traces.deepscaler(requests, bound, seed),
    "log-normal": lambda requests, bound, seed: traces.lognormal(
        requests, bound / 16, 1.2, bound, seed
    ),
    "two-mode": lambda requests, bound, seed: traces.two_mode(
        requests, median=bound / 16, bound=bound, seed=seed
    ),
    "uniform": lambda requests, bound, seed: traces.uniform(requests, 1, bound, seed=seed),
    "straggler": lambda requests, bound, seed: traces.straggler(
        requests, max(1, bound // 16), bound, seed=seed
    ),
    "grpo": lambda requests, bound, seed: traces.grpo(
        max(1, requests // 8), 8, 0.6, 1.0, median=bound / 16, bound=bound, seed=seed
    ),
}
"""Made by (requests, bound, seed)."""

OURS = "pat-vllm: several cheap switches"
ONE_CHEAP = "pat-vllm: one cheap switch"
ORACLE = "oracle"
ORACLE_ONE = "oracle: one switch"
_SAMPLE = 20_000
"""Lengths from which the paper's policy knows the distribution."""


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
        StepTimeModel.fit(profile),
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


# -------------------------------------------------------------------- one workload


def simulate_workload(
    console: Console,
    *,
    profile: Path | None,
    gpu: str,
    model: str,
    ranks: int,
    lengths: Path | None,
    workload: str,
    iterations: int,
    requests: int,
    bound: int,
    switch_cost: float,
    seed: int,
    output_dir: Path | None,
) -> Comparison:
    """Compare all policies on one workload, and print and write the result.

    Raises:
        ValueError: an option names something that is not there.
    """
    engine = Profile.load(profile) if profile else modelled(model, gpu, ranks)
    if lengths is not None:
        trace = traces.load_trace(lengths)
        batches, known = [trace] * iterations, list(trace.lengths)
    else:
        if workload not in WORKLOADS:
            raise ValueError(
                f"workload {workload!r} is unknown; allowed are {', '.join(WORKLOADS)}"
            )
        make = WORKLOADS[workload]
        batches = [make(requests, bound, seed + number) for number in range(iterations)]
        known = list(make(_SAMPLE, bound, seed + 1_000_003).lengths)
    title = (
        f"{engine.title}; {batches[0].name}, {iterations} x {len(batches[0])} requests of up to "
        f"{batches[0].bound:,} tokens"
    )
    with console.status("simulating") as status:
        result = compare(
            engine,
            batches,
            title=title,
            lengths=known,
            expensive=switch_cost,
            progress=lambda text: status.update(f"simulating {text}"),
        )
    console.print(_table(result))
    if output_dir is not None:
        from pat_vllm.cli.simulate_plot import plot_comparison

        output_dir.mkdir(parents=True, exist_ok=True)
        _write_json(output_dir / "simulate.json", result.to_json())
        (output_dir / "simulate.md").write_text(_markdown(result))
        plot_comparison(result, output_dir / "simulate.png")
        console.print(f"written: {output_dir}/simulate.json, simulate.md, simulate.png")
    return result


def modelled(model: str, gpu: str, ranks: int, node_size: int = NODE_SIZE) -> Profile:
    """A modelled profile; `model` is a name or a config.json, `gpu` in any case.

    Raises:
        ValueError: one of them is unknown.
    """
    config: Any = model
    name = ""
    if model.endswith(".json"):
        try:
            config = json.loads(Path(model).read_text())
        except OSError as error:
            raise ValueError(f"model config {model} cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"model config {model} is no JSON: {error}") from None
        name = Path(model).resolve().parent.name
    by_lower = {known.lower(): known for known in gpu_names()}
    gpu = by_lower.get(gpu.lower(), gpu)
    return modelled_profile(config, gpu, ranks, node_size=node_size, name=name)


_HEADERS = ("policy", "seconds", "tokens/s", "vs best static", "regret", "switches")


def _cells(result: Comparison) -> Iterable[tuple[str, ...]]:
    best = result.best_static
    for row in result.rows:
        yield (
            row.label + (" (best static)" if row is best else ""),
            f"{row.seconds:.2f}",
            f"{row.tokens_per_second:.0f}",
            f"{_rounded(row.seconds / best.seconds - 1):+.1%}",
            f"{_rounded(result.regret(row)):+.1%}",
            f"{row.switches:.1f}",
        )


def _table(result: Comparison) -> Table:
    table = Table(title=_heading(result), title_justify="left")
    for number, header in enumerate(_HEADERS):
        table.add_column(header, justify="right" if number else "left", no_wrap=bool(number))
    for cells in _cells(result):
        table.add_row(*cells)
    return table


def _heading(result: Comparison) -> str:
    kind = "step and switch times MODELLED, not measured" if result.modelled else "measured times"
    return f"Simulated, {kind}. {result.title}"


def _markdown(result: Comparison) -> str:
    return f"{_heading(result)}\n\n" + _markdown_table(_HEADERS, _cells(result))


def _markdown_table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [headers, ["---"] * len(headers), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def _write_json(path: Path, content: Any) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


# -------------------------------------------------------------------- the paper's settings

PAPER_STATIC_TP = 2
"""The paper's predictor errors are for TP2DP4 and TP8DP1, so that these seem to be its layouts."""

_PAPER_HEADERS = (
    "setting",
    "static, s",
    "paper's policy",
    "pat-vllm, one cheap",
    "pat-vllm, several expensive",
    "pat-vllm, several cheap",
    "regret",
    "pat-vllm vs static tp2",
    "published",
    "end to end vs tp2",
    "published e2e",
)


def simulate_paper(
    console: Console,
    *,
    seeds: int,
    seed: int,
    requests: int = BATCH,
    settings: Sequence[PaperSetting] = SETTINGS,
    output_dir: Path | None,
) -> list[tuple[PaperSetting, Comparison]]:
    """Replay the paper's settings on modelled profiles, and print and write the results.

    Args:
        seeds: batches with different lengths per setting, after one from which policies learn.
        requests: of a batch.
    """
    results = []
    with console.status("simulating") as status:
        for setting in settings:

            def progress(text: str, setting: PaperSetting = setting) -> None:
                status.update(f"simulating {setting.title}: {text}")

            profile = modelled(setting.model, setting.gpu, setting.ranks)
            batches = [traces.deepscaler(requests, setting.bound, seed + i) for i in range(seeds)]
            comparison = compare(
                profile,
                batches,
                title=setting.title,
                lengths=traces.deepscaler(_SAMPLE, setting.bound, seed + 1_000_003).lengths,
                paper_home=_paper_static(profile),
                warm_up=[traces.deepscaler(requests, setting.bound, seed + seeds)],
                progress=progress,
            )
            results.append((setting, comparison))
    table = Table(title=_PAPER_HEADING, title_justify="left")
    for header in _PAPER_HEADERS:
        table.add_column(header)
    for setting, comparison in results:
        table.add_row(*_paper_cells(setting, comparison))
    console.print(table)
    console.print(PAPER_NOTES)
    if output_dir is not None:
        from pat_vllm.cli.simulate_plot import plot_comparison, plot_paper

        output_dir.mkdir(parents=True, exist_ok=True)
        content = [
            {"setting": asdict(setting), **comparison.to_json(timelines=False)}
            for setting, comparison in results
        ]
        _write_json(output_dir / "paper.json", {"notes": PAPER_NOTES, "settings": content})
        (output_dir / "paper.md").write_text(_paper_markdown(results))
        plot_paper(results, output_dir / "paper.png")
        for setting, comparison in results:
            name = setting.title.lower().replace(",", "").replace(" ", "-")
            plot_comparison(comparison, output_dir / f"paper-{name}.png")
        console.print(f"written: {output_dir}/paper.json, paper.md, paper*.png")
    return results


_PAPER_HEADING = (
    "The settings of arXiv 2605.23945 on MODELLED profiles, nothing measured. Time of a batch "
    "relative to the best static layout: median (range) over batches"
)

PAPER_NOTES = f"""\
- Published figures are from public summaries of the paper. It does not say which static layout is
  its baseline; its predictor errors are for TP2DP4 and TP8DP1, so tp{PAPER_STATIC_TP} is taken.
- The paper's policy begins there and switches at most once, at {SWITCH_SECONDS} s. It is given the
  true distribution of lengths and the true step times, more than its offline profile can know.
- pat-vllm learns lengths as it goes, one batch before those reported included, and begins where it
  chooses. "one cheap" is the same policy without probes, stopped after the first switch of a
  batch; "several expensive" pays {SWITCH_SECONDS} s for each.
- Every policy pays for the way back to the layout in which its next batch begins.
- Regret is against an oracle that knows all lengths.
- End to end is derived: generation is {GENERATION_SHARE:.3f} of an iteration by the paper's own
  two figures (generation -34.6%, iteration -27.2%)."""


def _paper_static(profile: Profile) -> Layout:
    """The baseline's layout, or the next larger that the profile has."""
    return next(one for one in profile.all_layouts if one.tp >= PAPER_STATIC_TP)


def _paper_cells(setting: PaperSetting, result: Comparison) -> tuple[str, ...]:
    best = result.best_static
    first = result.others[0].label  # its label depends on where it begins
    low = next(row for layout, row in result.static.items() if layout.tp >= PAPER_STATIC_TP)
    saving = result.saving(OURS, low)
    static = ", ".join(
        f"{layout}: {statistics.median(run.seconds for run in row.runs):.0f}"
        + ("*" if row is best else "")
        for layout, row in result.static.items()
    )
    return (
        setting.title,
        static,
        *(
            _change(result.saving(label))
            for label in (first, ONE_CHEAP, several_label(SWITCH_SECONDS), OURS)
        ),
        f"{_rounded(result.regret(result.row(OURS))):+.1%}",
        _change(saving),
        "" if setting.generation is None else f"{setting.generation:+.1%}",
        f"{1 / (1 - GENERATION_SHARE * saving[0]):.2f}x",
        "" if setting.speedup is None else f"{setting.speedup:.2f}x",
    )


def _change(saving: tuple[float, float, float]) -> str:
    median, least, most = (_rounded(-part) for part in saving)
    return f"{median:+.1%} ({most:+.1%} to {least:+.1%})"


def _rounded(part: float) -> float:
    """To a tenth of a percent, without a negative zero."""
    return round(part, 3) + 0.0


def _paper_markdown(results: Sequence[tuple[PaperSetting, Comparison]]) -> str:
    parts = [
        f"{_PAPER_HEADING}\n\n",
        _markdown_table(_PAPER_HEADERS, (_paper_cells(*result) for result in results)),
        f"\n`*`: the best static layout.\n\n{PAPER_NOTES}\n",
    ]
    for setting, comparison in results:
        headers = ("policy", *(f"vs {layout}" for layout in comparison.static), "regret")
        rows = [
            (
                row.label,
                *(_change(comparison.saving(row.label, one)) for one in comparison.static.values()),
                f"{_rounded(comparison.regret(row)):+.1%}",
            )
            for row in comparison.rows
        ]
        parts.append(f"\n### {setting.title}\n\n{_markdown_table(headers, rows)}")
    return "".join(parts)
