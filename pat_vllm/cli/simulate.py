"""`pat-vllm simulate`: one workload under every policy."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.paper.compare import Comparison, compare
from benchmarks.paper.hardware import gpu_names, modelled_profile
from benchmarks.paper.policy import NODE_SIZE
from pat_vllm.cli.results import table, to_json
from pat_vllm.profiling.profile import Profile
from pat_vllm.simulator import traces
from pat_vllm.simulator.traces import LengthTrace

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

SAMPLE = 20_000
"""Lengths from which the paper's policy knows the distribution."""


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
        known = list(make(SAMPLE, bound, seed + 1_000_003).lengths)
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
        (output_dir / "simulate.json").write_text(to_json(result.to_json()))
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


def _cells(result: Comparison) -> Iterator[tuple[str, ...]]:
    best = result.best_static
    for row in result.rows:
        yield (
            row.label + (" (best static)" if row is best else ""),
            f"{row.seconds:.2f}",
            f"{row.tokens_per_second:.0f}",
            f"{rounded(row.seconds / best.seconds - 1):+.1%}",
            f"{rounded(result.regret(row)):+.1%}",
            f"{row.switches:.1f}",
        )


def _table(result: Comparison) -> Table:
    shown = Table(title=_heading(result), title_justify="left")
    for number, header in enumerate(_HEADERS):
        shown.add_column(header, justify="right" if number else "left", no_wrap=bool(number))
    for cells in _cells(result):
        shown.add_row(*cells)
    return shown


def _heading(result: Comparison) -> str:
    kind = "step and switch times MODELLED, not measured" if result.modelled else "measured times"
    return f"Simulated, {kind}. {result.title}"


def _markdown(result: Comparison) -> str:
    return f"{_heading(result)}\n\n" + table(_HEADERS, list(_cells(result)))


def rounded(part: float) -> float:
    """To a tenth of a percent, without a negative zero."""
    return round(part, 3) + 0.0
