"""`pat-vllm advise`: whether PAT would pay for given rollouts, before an engine is started."""

from __future__ import annotations

import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pat_vllm.advice.advise_options import AdviseOptions
from pat_vllm.cli.options import options_of

if TYPE_CHECKING:  # this is slow to import, for `--help`
    from pat_vllm.advice.verdict import Advice


@options_of(AdviseOptions)
def advise_user(
    options: AdviseOptions,
    processes: Annotated[
        int, typer.Option(min=1, max=256, help="Processes among which the work is spread.")
    ] = 2,
    output: Annotated[Path | None, typer.Option(help="JSON to write.")] = None,
    plot: Annotated[Path | None, typer.Option(help="PNG to write.")] = None,
) -> None:
    """Say whether PAT would pay for your rollouts, and with which settings. Simulated."""
    from pat_vllm.advice.verdict import advise
    from pat_vllm.cli.with_defaults import with_defaults
    from pat_vllm.files.writing import to_json, write_whole

    for option, path in (("output", output), ("plot", plot)):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"--{option} is {path}; {path.parent} is no directory, make it first")
        if path is not None and path.is_dir():
            raise ValueError(f"--{option} is {path}, a directory; name a file in it")
    console = Console(highlight=False)
    began = time.perf_counter()
    with console.status("replaying iterations"):
        advice = advise(options, processes, with_defaults)
    seconds = time.perf_counter() - began
    pasted = _settings(advice, options)
    _show(console, advice, pasted)
    if output is not None:
        content = {**advice.to_json(), "settings": pasted, "simulated_in_seconds": seconds}
        write_whole(output, to_json(content))
    if plot is not None:
        from pat_vllm.cli.advise_plot import plot_advice

        plot_advice(advice, plot)
    written = ", ".join(str(path) for path in (output, plot) if path is not None)
    console.print(
        f"The simulation took {seconds:.0f} s." + (f" Written: {written}" if written else ""),
        markup=False,
        emoji=False,
    )


def _settings(advice: Advice, options: AdviseOptions) -> dict[str, str]:
    from pat_vllm.advice.settings import CHECKPOINT, settings
    from pat_vllm.models.checkpoint import config_file

    file = config_file(options.model) if options.model is not None else None
    model = CHECKPOINT
    if file is not None and file.name == "config.json":
        model = str(file.parent.resolve())
    # An engine refuses a profile that was not measured on it.
    measured = None if advice.modelled or not options.profile else str(options.profile.resolve())
    return settings(advice, model, None if options.profile else options.max_num_seqs, measured)


def _show(console: Console, advice: Advice, pasted: Mapping[str, str]) -> None:
    from pat_vllm.advice.advice_text import PARTS, heading, of_drafts, percents, verdict
    from pat_vllm.advice.settings import PLACEHOLDERS

    say = partial(console.print, markup=False, emoji=False)
    kind = "modelled" if advice.modelled else "simulated"
    table = Table(title=escape(heading(advice)), title_justify="left")
    table.add_column("configuration")
    for column in (f"seconds, {kind}", f"vs best static, {kind}"):
        table.add_column(column, justify="right")
    best = sum(advice.seconds(advice.static))
    for config in advice.shown:
        seconds = advice.seconds(config)
        table.add_row(
            str(config) + (" (best static)" if config == advice.static else ""),
            f"{sum(seconds) / len(seconds):.1f}",
            f"{round(sum(seconds) / best - 1, 3) + 0.0:+.1%}",
        )
    console.print(table)
    if said := of_drafts(advice):
        say(said)
    say(verdict(advice), style="bold")
    console.print(f"PAT in the last iteration ({kind}): {advice.path}.")
    parts = Table(title=PARTS, title_justify="left")
    parts.add_column("part", no_wrap=True)
    single = len(advice.rollouts.batches) == 1
    for column in [f"saves, {kind}", f"95% interval, {kind}"][: 1 if single else 2]:
        parts.add_column(column, justify="right")
    parts.add_column("compared")
    for name, source in advice.sources.items():
        mean, low, high, *_ = percents(source.gain)
        interval = [] if single else [f"{low} to {high}"]
        parts.add_row(name, mean, *interval, source.meaning)
    console.print(parts)
    console.print(
        "Settings:" if advice.pays else "Settings of the best static layout, without PAT:"
    )
    for name, text in pasted.items():
        console.print(f"[bold]# {name}[/bold]")
        say(text, soft_wrap=True)
    for placeholder, meaning in PLACEHOLDERS.items():
        if any(placeholder in text for text in pasted.values()):
            say(f"Replace {placeholder} by {meaning}.", soft_wrap=True)
    if advice.modelled:
        console.print(
            "Modelled from public figures of the GPU; absolute times may be off by tens of percent."
        )
