"""Batches of a workload, and the table, files and picture of a comparison on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.replaying import Comparison, PolicyResult
from pat_vllm.cli.results import table, to_json
from pat_vllm.files.writing import write_whole
from pat_vllm.profiling.profile import Profile
from pat_vllm.simulator import traces
from pat_vllm.simulator.traces import LengthTrace

Column = tuple[str, Callable[[PolicyResult], str]]
"""A heading, and the cell of a policy."""


def make_batches(
    lengths: Path | None, workload: str, iterations: int, requests: int, max_tokens: int, seed: int
) -> list[LengthTrace]:
    """Batches from a file, the same each time, or from a generator, different each time.

    Raises:
        OSError: the file cannot be read.
        ValueError: the file is no trace, or the workload is unknown.
    """
    if lengths is not None:
        return [traces.load_trace(lengths)] * iterations
    make = traces.generator(workload)
    return [make(requests, max_tokens, seed + number) for number in range(iterations)]


def title_of(profile: Profile, batches: list[LengthTrace]) -> str:
    """Engine and workload in a line."""
    first = batches[0]
    return (
        f"{profile.title}; {first.name}, {len(batches)} x {len(first)} requests of up to "
        f"{first.max_tokens:,} tokens"
    )


def show(
    console: Console, result: Comparison, output_dir: Path | None, extra: tuple[Column, ...] = ()
) -> None:
    """Print a comparison, and write it as JSON, Markdown and PNG where a directory is given.

    Args:
        extra: further columns of the table.
    """
    columns = (*_columns(result), *extra)
    shown = Table(title=heading(result), title_justify="left")
    for number, (header, _) in enumerate(columns):
        shown.add_column(header, justify="right" if number else "left", no_wrap=bool(number))
    rows = [[cell(one) for _, cell in columns] for one in result.results]
    for row in rows:
        shown.add_row(*row)
    console.print(shown)
    if output_dir is None:
        return
    from benchmarks.paper.batch_plot import plot_comparison

    output_dir.mkdir(parents=True, exist_ok=True)
    markdown = table([header for header, _ in columns], rows)
    write_whole(output_dir / "simulate.json", to_json(result.to_json()))
    write_whole(output_dir / "simulate.md", f"{heading(result)}\n\n{markdown}")
    plot_comparison(result, output_dir / "simulate.png")
    console.print(f"written: {output_dir}/simulate.json, simulate.md, simulate.png")


def _columns(result: Comparison) -> tuple[Column, ...]:
    best = result.best_static
    return (
        ("policy", lambda one: one.label + (" (best static)" if one is best else "")),
        ("seconds", lambda one: f"{one.seconds:.2f}"),
        ("tokens/s", lambda one: f"{one.tokens_per_second:.0f}"),
        ("vs best static", lambda one: f"{rounded(one.seconds / best.seconds - 1):+.1%}"),
        ("switches", lambda one: f"{one.switches:.1f}"),
    )


def heading(result: Comparison) -> str:
    """The title, with what its times are."""
    kind = "step and switch times MODELLED, not measured" if result.modelled else "measured times"
    return f"Simulated, {kind}. {result.title}"


def rounded(part: float) -> float:
    """To a tenth of a percent, without a negative zero."""
    return round(part, 3) + 0.0
