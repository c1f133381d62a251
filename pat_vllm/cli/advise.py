"""`pat-vllm advise`: whether PAT would pay for given rollouts, before an engine is started."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from pat_vllm.advice.options import AdviseOptions
from pat_vllm.advice.settings import CHECKPOINT, PLACEHOLDERS, settings
from pat_vllm.advice.text import PARTS, heading, of_drafts, percents, verdict
from pat_vllm.advice.verdict import Advice, advise
from pat_vllm.files.writing import to_json, write_whole
from pat_vllm.simulator.modelled.hardware import config_file


def run_advise(
    console: Console,
    options: AdviseOptions,
    *,
    processes: int,
    output: Path | None = None,
    plot: Path | None = None,
) -> None:
    """Replay what is asked about, print the advice and write it.

    Raises:
        OSError: a file cannot be written.
        ValueError: an option or a file is wrong, or cannot be read.
    """
    for option, path in (("output", output), ("plot", plot)):
        if path is not None and not path.parent.is_dir():
            raise ValueError(f"--{option} is {path}; {path.parent} is no directory, make it first")
        if path is not None and path.is_dir():
            raise ValueError(f"--{option} is {path}, a directory; name a file in it")
    began = time.perf_counter()
    with console.status("replaying iterations"):
        advice = advise(options, processes)
    seconds = time.perf_counter() - began
    pasted = _settings(advice, options)
    show(console, advice, pasted)
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
    file = config_file(options.model) if options.model is not None else None
    model = CHECKPOINT
    if file is not None and file.name == "config.json":
        model = str(file.parent.resolve())
    # An engine refuses a profile that was not measured on it.
    measured = None if advice.modelled or not options.profile else str(options.profile.resolve())
    return settings(advice, model, None if options.profile else options.max_num_seqs, measured)


def show(console: Console, advice: Advice, pasted: Mapping[str, str]) -> None:
    """Print an advice."""
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
        console.print(said, markup=False, emoji=False)
    console.print(verdict(advice), markup=False, emoji=False, style="bold")
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
        console.print(text, markup=False, emoji=False, soft_wrap=True)
    for placeholder, meaning in PLACEHOLDERS.items():
        if any(placeholder in text for text in pasted.values()):
            console.print(
                f"Replace {placeholder} by {meaning}.", markup=False, emoji=False, soft_wrap=True
            )
    if advice.modelled:
        console.print(
            "Modelled from public figures of the GPU; absolute times may be off by tens of percent."
        )
