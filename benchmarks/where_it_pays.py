"""`python -m benchmarks.where_it_pays`: a map of what PAT gains. Simulated on modelled profiles.

Each cell is what `pat-vllm advise` says: the gain over the best static layout with its best draft
length, at equal concurrency, by responses per GPU, tail, GPU and model. In some cells, which are
drawn, drafts are accepted. With an output directory the map goes on where it was interrupted.
"""

from __future__ import annotations

import json
import random
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, astuple, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated

import typer

from benchmarks.record import table
from pat_vllm.advice.advice_text import percents
from pat_vllm.advice.advise_options import AdviseOptions
from pat_vllm.advice.simulations import Gain
from pat_vllm.advice.verdict import advise
from pat_vllm.files.writing import to_json

GPUS = ("A40", "H100", "H200")
MODELS = ("llama-3.1-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b")
PER_GPU = (4, 16, 64, 256)
FEWEST_OF_LARGE = 16
LARGE = ("qwen3-32b", "qwen3-30b-a3b")
"""Models that are asked about from so many responses per GPU on."""
TAILS = ("alike", "uniform", "deepscaler", "two-mode", "straggler")
"""Shapes of `pat_vllm.simulator.shapes`."""
AGENTS, TRAJECTORIES = "agents", 32
"""A shape of trajectories with tools, and how many of them for each GPU."""
RANKS = 8
MOST_LOST = 0.01
"""Share of the time that PAT may lose in a cell."""


@dataclass(frozen=True)
class Cell:
    """One question.

    Attributes:
        per_gpu: responses, or trajectories, of an iteration for each GPU.
        tail: shape of the lengths.
    """

    gpu: str
    model: str
    tail: str
    per_gpu: int
    max_tokens: int = 16384
    acceptance: float = 0.0
    iterations: int = 4


@dataclass(frozen=True)
class Answer:
    """What was found.

    Attributes:
        static: the best static layout and its draft length.
        base: PAT's base layout.
        static_seconds, pat_seconds: of an iteration, in the mean; modelled.
        took: seconds to simulate it.
    """

    gain: Gain
    pays: bool
    static: str
    base: str
    static_seconds: float
    pat_seconds: float
    took: float


def ask(cell: Cell) -> Answer:
    """Simulate a cell."""
    began = time.perf_counter()
    advice = advise(
        AdviseOptions(
            cell.model,
            cell.gpu,
            RANKS,
            responses=cell.per_gpu * RANKS,
            shape=cell.tail,
            max_tokens=cell.max_tokens,
            acceptance=cell.acceptance,
            iterations=cell.iterations,
        )
    )
    return Answer(
        advice.gain,
        advice.pays,
        f"{advice.static.layout}, {advice.static.drafts}",
        str(advice.rollouts.profile.layouts[0]),
        statistics.mean(advice.seconds(advice.static)),
        statistics.mean(advice.seconds(advice.ours)),
        time.perf_counter() - began,
    )


HEADERS = (
    "GPUs", "model", "lengths", "responses per GPU", "acceptance", "best static layout",
    "PAT's base", "static seconds, modelled", "PAT's seconds, modelled", "PAT saves, modelled",
    "95% interval", "pays",
)  # fmt: skip


def row(cell: Cell, answer: Answer) -> tuple[str, ...]:
    """A line of the table."""
    mean, low, high, *_ = percents(answer.gain)
    return (
        f"{RANKS} x {cell.gpu}",
        cell.model,
        cell.tail,
        str(cell.per_gpu),
        f"{cell.acceptance:g}",
        answer.static,
        answer.base,
        f"{answer.static_seconds:.1f}",
        f"{answer.pat_seconds:.1f}",
        mean,
        f"{low} to {high}",
        "yes" if answer.pays else "no",
    )


def title(cell: Cell) -> str:
    """What all cells have in common."""
    return (
        f"Simulated on MODELLED profiles, nothing measured. Responses of up to {cell.max_tokens:,} "
        f"tokens, {cell.iterations} iterations of each"
    )


def summary(results: Sequence[tuple[Cell, Answer]]) -> str:
    """How many cells are slower, and by how much."""
    gains = [answer.gain for _, answer in results]
    slower = [gain for gain in gains if gain.mean < -MOST_LOST]
    sure = sum(gain.high < 0 for gain in slower)
    return (
        f"{len(gains)} cells: {sum(answer.pays for _, answer in results)} pay; {len(slower)} are "
        f"more than {MOST_LOST:.0%} slower, of which {sure} with an interval that excludes zero; "
        f"worst {min(gain.mean for gain in gains):.1%}"
    )


def drawn(cells: Sequence[Cell], acceptance: float, share: float, seed: int) -> list[Cell]:
    """The cells in an order that is drawn, with drafts in a share of them. Those of agents come
    last, and do not change what is drawn for the others."""
    order = []
    for agents in (False, True):
        group = [cell for cell in cells if (cell.tail == AGENTS) == agents]
        draw = random.Random(seed)
        shuffled = draw.sample(group, len(group))
        count = round(share * len(group))
        part = [replace(c, acceptance=acceptance) for c in shuffled[:count]] + shuffled[count:]
        draw.shuffle(part)
        order += part
    return order


def cells_of(
    gpus: Sequence[str],
    models: Sequence[str],
    tails: Sequence[str],
    per_gpu: Sequence[int],
    max_tokens: int,
    iterations: int,
) -> list[Cell]:
    """The cells that are asked about, in order, those of agents last."""
    where = [*product(gpus, models, (tail for tail in tails if tail != AGENTS), per_gpu)]
    if AGENTS in tails:
        where += product(gpus, models, (AGENTS,), (TRAJECTORIES,))
    return [
        Cell(*which, max_tokens=max_tokens, iterations=iterations)
        for which in where
        if which[1] not in LARGE or which[3] >= FEWEST_OF_LARGE
    ]


def known(output_dir: Path) -> dict[Cell, Answer]:
    """What an earlier run found."""
    file = output_dir / "where-it-pays.json"
    if not file.is_file():
        return {}
    return {
        Cell(**entry["cell"]): Answer(**entry["answer"] | {"gain": Gain(**entry["answer"]["gain"])})
        for entry in json.loads(file.read_text())
    }


def plot_map(results: Sequence[tuple[Cell, Answer]], path: Path) -> None:
    """Save a PNG: a panel for each GPU and model, in it responses per GPU by tail."""
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    cell_of = {(c.model, c.gpu, c.tail, c.per_gpu): c for c, _ in results}
    answers = {(c.model, c.gpu, c.tail, c.per_gpu): answer for c, answer in results}
    models, gpus, tails, per_gpu = (sorted({*values}) for values in zip(*answers, strict=True))
    figure = Figure(
        figsize=(4 + 0.7 * len(per_gpu) * len(gpus), 2.5 + 0.5 * len(tails) * len(models)),
        layout="constrained",
    )
    FigureCanvasAgg(figure)
    figure.suptitle(title(results[0][0]), fontsize=9, wrap=True)
    panels = figure.subplots(len(models), len(gpus), squeeze=False, sharex=True, sharey=True)
    most = 1.5 * max(0.1, *(answer.gain.mean for answer in answers.values()))
    for (i, model), (j, gpu) in product(enumerate(models), enumerate(gpus)):
        axes = panels[i][j]
        gains = np.full((len(tails), len(per_gpu)), np.nan)
        for (y, tail), (x, count) in product(enumerate(tails), enumerate(per_gpu)):
            answer = answers.get((model, gpu, tail, count))
            if answer is not None:
                gains[y, x] = answer.gain.mean if answer.pays else 0.0
                text = f"{answer.gain.mean:.0%}" if answer.pays else "-"
                text += "*" * (cell_of[model, gpu, tail, count].acceptance > 0)
                axes.text(x, y, text, ha="center", va="center", fontsize=8)
        image = axes.imshow(gains, cmap="YlGn", vmin=0, vmax=most, aspect="auto")
        axes.set_title(f"{RANKS} x {gpu}, {model}", fontsize=9)
        axes.set_xticks(range(len(per_gpu)), [str(count) for count in per_gpu])
        axes.set_yticks(range(len(tails)), tails)
        if i == len(models) - 1:
            axes.set_xlabel("responses per GPU")
    figure.colorbar(image, ax=panels, label="saved, modelled (-: nothing; *: drafts)")
    figure.savefig(path, dpi=130)


def write(results: Sequence[tuple[Cell, Answer]], output_dir: Path) -> None:
    """Markdown, JSON and PNG."""
    output_dir.mkdir(parents=True, exist_ok=True)
    results = sorted(results, key=lambda result: astuple(result[0]))
    by = table(HEADERS, [row(*result) for result in results])
    about = f"{title(results[0][0])}. {summary(results)}."
    (output_dir / "where-it-pays.md").write_text(f"{about}\n\n{by}")
    content = [{"cell": asdict(cell), "answer": asdict(answer)} for cell, answer in results]
    (output_dir / "where-it-pays.json").write_text(to_json(content))
    plot_map(results, output_dir / "where-it-pays.png")


app = typer.Typer(add_completion=False, pretty_exceptions_show_locals=False)


@app.command()
def main(
    gpu: Annotated[list[str], typer.Option(help="May be repeated.")] = list(GPUS),  # noqa: B006
    model: Annotated[list[str], typer.Option(help="May be repeated.")] = list(MODELS),  # noqa: B006
    tail: Annotated[list[str], typer.Option(help="May be repeated.")] = [*TAILS, AGENTS],  # noqa: B006
    per_gpu: Annotated[list[int], typer.Option(help="May be repeated.")] = list(PER_GPU),  # noqa: B006
    max_tokens: int = 16384,
    acceptance: Annotated[float, typer.Option(help="Where there are drafts.")] = 0.5,
    drafts: Annotated[float, typer.Option(help="Share of the cells with drafts.")] = 1 / 3,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    iterations: Annotated[int, typer.Option(min=2, help="Of each cell.")] = 4,
    processes: Annotated[int, typer.Option(min=1)] = 1,
    output_dir: Annotated[Path | None, typer.Option(help="For Markdown, JSON and PNG.")] = None,
) -> None:
    """Simulate a map."""
    every = cells_of(gpu, model, tail, per_gpu, max_tokens, iterations)
    answers = known(output_dir) if output_dir is not None else {}
    cells = [cell for cell in drawn(every, acceptance, drafts, seed) if cell not in answers]
    with ProcessPoolExecutor(processes) as pool:
        asked = {pool.submit(ask, cell): cell for cell in cells}
        for done in as_completed(asked):
            cell, answer = asked[done], done.result()
            answers[cell] = answer
            print(" | ".join((*row(cell, answer), f"{answer.took:.1f} s")), flush=True)
            if output_dir is not None:
                write([*answers.items()], output_dir)
    print(summary([*answers.items()]))


if __name__ == "__main__":
    app(prog_name="python -m benchmarks.where_it_pays")
