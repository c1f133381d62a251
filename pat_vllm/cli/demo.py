"""`pat-vllm demo`: one long-tail batch as replicas, as one group, and switching between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from pat_vllm.cli.options import failed, options_of
from pat_vllm.cli.ranges import Ranged
from pat_vllm.start.text_only import without_vision_and_audio

if TYPE_CHECKING:  # these are slow to import, for `--help`
    from pat_vllm.cli.demo_batch import Variant
    from pat_vllm.cli.engine_run import RunResult

    Runs = Sequence[tuple[Variant, Sequence[RunResult]]]
    """The runs of each variant, by round; the live switch is the last variant."""

_MOST_SPREAD = 0.25
"""Times of the same work that differ by more than this cannot be compared."""


@dataclass(frozen=True)
class DemoOptions(Ranged):
    """A batch, and the engine that serves it; each field is an option of the command."""

    model: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint to use instead of a random model. Other random models: `repeating`, "
            "whose text repeats itself, so that drafts are accepted; `moe`, a mixture of experts."
        ),
    ] = None
    models_dir: Annotated[
        Path, typer.Option(help="Where a random model (0.7 GB) is made once and kept.")
    ] = Path(".models")
    ranks: Annotated[int, typer.Option(min=2, max=1024, help="Worker processes.")] = 2
    requests: Annotated[int, typer.Option(min=2, max=100_000, help="Requests in the batch.")] = 128
    max_tokens: Annotated[
        int, typer.Option(min=8, max=1 << 24, help="Longest response, tokens.")
    ] = 320
    switch_at: Annotated[
        int, typer.Option(min=1, max=100_000, help="Live requests at which to switch.")
    ] = 16
    speculate: Annotated[
        bool, typer.Option("--speculate", help="Speculative decoding in all runs: n-gram drafts.")
    ] = False
    num_speculative_tokens: Annotated[
        int,
        typer.Option(min=1, max=1024, help="With --speculate: draft tokens a request and step."),
    ] = 4
    temperature: Annotated[
        float | None,
        typer.Option(min=0, max=100, help="0 is greedy; 1 by default, 0 with --speculate."),
    ] = None
    seed: Annotated[
        int, typer.Option(min=0, max=1 << 62, help="Of prompts, lengths and sampling.")
    ] = 0
    rounds: Annotated[
        int, typer.Option(min=2, max=1000, help="Runs of each way: replicas, one group, switching.")
    ] = 3
    output: Annotated[Path, typer.Option(help="PNG to write.")] = Path("demo.png")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.speculate and self.temperature:
            raise ValueError(
                f"--temperature {self.temperature:g} does not go with --speculate: what a request "
                "samples depends on its drafts, which a switch drops. Leave it out"
            )
        usual = type(self).num_speculative_tokens
        if not self.speculate and self.num_speculative_tokens != usual:
            raise ValueError(
                f"--num-speculative-tokens {self.num_speculative_tokens} needs --speculate"
            )

    @property
    def draft_length(self) -> int:
        """Draft tokens of a request and step; 0 is no speculative decoding."""
        return self.num_speculative_tokens if self.speculate else 0

    @property
    def sampling_temperature(self) -> float:
        return float(not self.speculate) if self.temperature is None else self.temperature


@options_of(DemoOptions)
def run_demo(options: DemoOptions) -> None:
    """Run a long-tail batch as replicas, as one group, and switching; compare and plot.

    The three ways take turns on one engine. Exits with 1 when their outputs are not the same, token
    by token.
    """
    from pat_vllm.cli.engine_run import RunFailed

    without_vision_and_audio()
    try:
        agree = demo(Console(highlight=False), options)
    except RunFailed as error:
        raise failed(error) from error
    if not agree:
        raise typer.Exit(1)


def disagreement(results: Runs) -> str | None:
    """Where outputs differ from the first run's, or None if all agree token by token."""
    reference, (expected, *_) = results[0]
    for variant, result in ((way, run) for way, runs in results for run in runs):
        pairs = list(enumerate(zip(expected.outputs, result.outputs, strict=True)))
        if differing := [(i, a, b) for i, (a, b) in pairs if a != b]:
            request, a, b = differing[0]
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            if at is None:
                where = f"request {request} has {len(a)} and {len(b)} tokens"
            else:
                where = f"request {request} differs first at token {at}: {a[at]} and {b[at]}"
            return (
                f"the outputs of '{reference.label}' and '{variant.label}' differ in "
                f"{len(differing)} of {len(pairs)} requests; {where}"
            )
    return None


def typical(runs: Sequence[RunResult]) -> RunResult:
    """The run whose time is the median; of an even number, the faster of the two."""
    return sorted(runs, key=lambda run: run.seconds)[(len(runs) - 1) // 2]


def spread(runs: Sequence[RunResult]) -> float:
    """By how much the times of the same work differ, relative to the typical one."""
    seconds = [run.seconds for run in runs]
    return (max(seconds) - min(seconds)) / typical(runs).seconds


def table_rows(results: Runs) -> list[tuple[str, ...]]:
    """Cells of the table: label, layouts, seconds, spread, relative time, switches, stall."""
    best_static = min(typical(runs).seconds for _, runs in results[:2])
    return [
        (
            variant.label,
            variant.layouts,
            f"{result.seconds:.2f}",
            f"{spread(runs):.0%}",
            f"{result.seconds / best_static:.2f}",
            str(len(switches)),
            f"{1e3 * sum(switch.seconds for switch in switches):.0f}" if switches else "-",
        )
        for variant, runs in results
        for result in (typical(runs),)
        for switches in (result.run.switches,)
    ]


def verdict(results: Runs) -> str:
    """In a sentence, whether switching paid, as far as the figures can say."""
    *static, (_, switching) = results
    best, of_best = min(static, key=lambda pair: typical(pair[1]).seconds)
    ours, theirs = typical(switching), typical(of_best)
    if not ours.run.switches:
        return "The live switch did not happen: the batch never came down to the threshold."
    busiest, runs = max(results, key=lambda pair: spread(pair[1]))
    if spread(runs) > _MOST_SPREAD:
        seconds = [run.seconds for run in runs]
        return (
            f"The machine was busy with other work: '{busiest.label}' took {min(seconds):.2f} to "
            f"{max(seconds):.2f} s for the same batch. These figures cannot be compared; try again "
            "when the machine is idle."
        )
    change = 1 - ours.seconds / theirs.seconds
    text = (
        f"The live switch took {ours.seconds:.2f} s, {abs(change):.1%} "
        f"{'less' if change > 0 else 'more'} than the best static layout "
        f"('{best.label}', {theirs.seconds:.2f} s): "
    )
    noise = max(spread(switching), spread(of_best))
    if abs(change) <= noise:
        return (
            f"{text}equal within the noise, as the times of one way differ by up to {noise:.1%} "
            "between rounds."
        )
    return f"{text}it {'paid' if change > 0 else 'did not pay'}."


def speed(result: RunResult) -> str:
    """What the picture says of a run."""
    text = f"{result.seconds:.1f} s, {result.tokens / result.seconds:.0f} tokens/s"
    run = result.run
    return text + (f", {run.acceptance:.0%} of drafts accepted" if run.drafted else "")


def drafts_of(results: Runs) -> str:
    """In a sentence, how long drafts were in each way, and how many were accepted."""
    shown = [(variant, typical(runs).run) for variant, runs in results]
    lengths = {sample.num_speculative_tokens for _, run in shown for sample in run.drafts}
    accepted = ", ".join(
        f"'{variant.label}' {run.acceptance:.0%} of {run.drafted}" for variant, run in shown
    )
    ks = ", ".join(map(str, sorted(lengths)))
    return f"n-gram drafts, k = {ks}: accepted in {accepted} tokens."


def show(console: Console, results: Runs) -> None:
    """Print the table, and the switches of the last variant."""
    from pat_vllm.reporting.text import switch_in_words

    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    table.add_column("run", no_wrap=True)
    table.add_column("layout", min_width=10)
    for heading in ("seconds", "spread", "vs static", "switches", "stall ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in table_rows(results):
        table.add_row(*row)
    console.print(table)
    console.print("Same batch and engine, taking turns. seconds: generation, median of the rounds;")
    console.print(
        "spread: from the fastest to the slowest round; vs static: relative to the faster"
    )
    console.print("static layout; stall: while switching.")
    run = typical(results[-1][1]).run
    if run.drafts:
        console.print(drafts_of(results))
    for switch in run.switches:
        console.print(f"switch {switch_in_words(switch, run.began)}", soft_wrap=True)


def demo(console: Console, options: DemoOptions) -> bool:
    """Serve the batch in three ways in turn, print and plot what was measured.

    Returns:
        Whether all outputs agree token by token.

    Raises:
        ValueError: an option does not fit the model.
        RunFailed: an engine failed.
    """
    from pat_vllm.cli import demo_batch
    from pat_vllm.cli.engine_run import run
    from pat_vllm.doctor.child import environment
    from pat_vllm.models.moe_config import MoEConfig
    from pat_vllm.reporting.report_plot import plot_runs

    model, ranks, requests, seed = options.model, options.ranks, options.requests, options.seed
    if model is None or str(model) in demo_batch.OWN_MODELS:
        with console.status("making a random model"):
            name = None if model is None else str(model)
            model = demo_batch.demo_model(options.models_dir, name)
    config = demo_batch.model_config(model)
    lengths = demo_batch.response_lengths(requests, options.max_tokens, seed)
    short = [max(2, round(length * demo_batch.WARM_UP_SHARE)) for length in lengths]
    batch, warm_up = (
        demo_batch.make_batch(num_tokens, config["vocab_size"], options.sampling_temperature, first)
        for num_tokens, first in ((lengths, seed), (short, seed + 1))
    )
    mixture = MoEConfig.from_config(config)
    table = demo_batch.schedule(ranks, options.switch_at, mixture)
    ways = demo_batch.variants(table)
    spec = demo_batch.run_spec(
        model,
        ranks,
        demo_batch.engine_options(table, mixture),
        batch,
        warm_up,
        options.draft_length,
        tuple(variant.way for variant in ways),
        options.rounds,
    )
    bind = environment(ranks)["VLLM_CPU_OMP_THREADS_BIND"]
    cores = "not bound to cores" if bind == "nobind" else f"on cores {bind}"
    console.print(f"model {model}, float32, {ranks} ranks ({cores})", soft_wrap=True)
    ordered = sorted(lengths, reverse=True)
    console.print(
        f"{requests} requests at once, {batch.tokens} tokens: median {ordered[requests // 2]}, "
        f"longest {', '.join(map(str, ordered[:3]))}; "
        f"temperature {options.sampling_temperature:g}, seed {seed}"
    )
    results: list[tuple[Variant, list[RunResult]]] = [(variant, []) for variant in ways]
    made = 0
    with console.status("starting an engine and warming up") as status:

        def take(result: RunResult) -> None:
            nonlocal made
            number, way = divmod(made, len(ways))
            made += 1
            if made == 1:
                console.print(f"  engine started in {result.start_seconds:.0f} s")
            results[way][1].append(result)
            if way + 1 == len(ways):
                seconds = [f"{variant.label} {runs[-1].seconds:.2f} s" for variant, runs in results]
                console.print(f"  round {number + 1} of {options.rounds}: {', '.join(seconds)}")
            upcoming = ways[made % len(ways)].label
            status.update(f"round {made // len(ways) + 1} of {options.rounds}: {upcoming}")

        run(spec, take)
    console.print()
    show(console, results)

    title = (
        f"One long-tail batch, {len(results)} ways: {len(batch.prompts)} requests, "
        f"{batch.tokens:,} tokens, {ranks} ranks"
    )
    shown = [(variant.label, typical(runs)) for variant, runs in results]
    plot_runs(title, [(name, speed(result), result.run) for name, result in shown], options.output)
    console.print(f"\nplot: {options.output}", soft_wrap=True)
    console.print(verdict(results))
    if problem := disagreement(results):
        console.print(f"[bold red]DIFFERENT OUTPUTS:[/] {problem}")
        return False
    console.print(f"Outputs of all runs agree, token by token ({batch.tokens} tokens).")
    return True
