"""What PAT saves over the best static layout, with KV in 16 bits and in fp8. Modelled, not run.

    python -m benchmarks.where_it_pays rollouts --output benchmarks/results/DATE-fp8-kv.md

Every cell is what `pat-vllm advise` computes, for PAT and for static engines with the same KV, on
the same batches, whose lengths the planner knows. Cells are a sample of rollouts as trainers have
them (`rollouts`, 51), or all of a grid of tails (`tails`, 210).
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass
from itertools import islice, product
from pathlib import Path

import numpy as np

from benchmarks.record import machine, table
from pat_vllm.advice.advice import Advice, advise
from pat_vllm.advice.batches import FUTURES
from pat_vllm.advice.engines import Engines, modelled_engines
from pat_vllm.cli.advise import AdviseOptions
from pat_vllm.modelled.shapes import drawn_lengths
from pat_vllm.models.checkpoint import named_config
from pat_vllm.predictor.state import Floats
from pat_vllm.predictor.whole_batch import Batch

RANKS = 8
LONGEST_PROMPT = 512
BAR = 0.03
"""Share of the time that PAT with KV in fp8 is to save in the median of `rollouts`."""


@dataclass(frozen=True)
class Cell:
    """A question. `samples`: responses to each prompt, which are alike; 1: all are unlike."""

    gpu: str
    model: str
    lengths: str
    per_gpu: int
    longest: int = 16384
    samples: int = 1
    gpu_memory_utilization: float = 0.92


def rollouts() -> Iterator[Cell]:
    """51 cells: 20 of H100, 13 of A40, 16 of L40S, 2 of RTX 4090, drawn among those that fit."""
    dense = ("qwen3-8b", "qwen3-14b", "qwen3-32b")
    draw = random.Random(54)
    for gpu, models, count in (
        ("H100", dense, 15),
        ("H100", ("qwen3-30b-a3b",), 5),
        ("A40", dense, 13),
        ("L40S", dense, 16),
        ("RTX 4090", dense[:1], 2),
    ):
        lengths = ("deepscaler", "two-mode", "heavy")
        axes = models, lengths, (64, 128, 256), (16384, 32768), (8, 16), (0.5, 0.9)
        cells = [Cell(gpu, *which) for which in product(*axes)]
        yield from islice(filter(fits, draw.sample(cells, len(cells))), count)


def tails() -> Iterator[Cell]:
    """The cells of benchmarks/results/2026-11-26-where-it-pays, all without drafts."""
    models = ("llama-3.1-8b", "qwen3-14b", "qwen3-32b", "qwen3-30b-a3b")
    shapes = ("alike", "uniform", "deepscaler", "two-mode", "straggler")
    for cell in product(("A40", "H100", "H200"), models, shapes, (4, 16, 64, 256)):
        if cell[3] > 4 or cell[1] in models[:2]:
            yield Cell(*cell)


def fits(cell: Cell) -> bool:
    """Whether some static layout has room for the longest request, with KV in 16 bits."""
    try:
        engines_of(cell, "auto", batches_of(cell)[0])
    except ValueError:
        return False
    return True


def lengths_of(cell: Cell, seed: int) -> Floats:
    """Lengths of a batch, in tokens. Half of their spread, as a logarithm, is within a prompt."""
    count = cell.per_gpu * RANKS
    if cell.samples == 1:
        return drawn_lengths(cell.lengths, count, cell.longest, seed).astype(np.float64)
    draw = np.random.default_rng(seed)
    prompts = count // cell.samples
    of_prompt, own = draw.standard_normal(prompts).repeat(cell.samples), draw.standard_normal(count)
    if cell.lengths == "deepscaler":
        return 1443 * np.exp(1.406 * (0.75**0.5 * of_prompt + 0.5 * own))
    few = (draw.random(prompts) < (0.2 if cell.lengths == "two-mode" else 0.04)).repeat(
        cell.samples
    )
    if cell.lengths == "heavy":
        return cell.longest * np.where(few, 0.4, 1 / 24) * np.exp(0.4 * own)
    usual = cell.longest / 16 * np.exp(0.6 * (0.75**0.5 * of_prompt + 0.5 * own))
    late = cell.longest * draw.uniform(2 / 3, 1, count)
    return np.where(few & (draw.random(count) < 0.5), late, usual)


def batches_of(cell: Cell) -> list[Batch]:
    batches = []
    for seed in range(FUTURES):
        lengths = np.clip(np.rint(lengths_of(cell, seed)), 1, cell.longest).astype(np.int64)
        prompts = np.random.default_rng((seed, 1)).integers(64, LONGEST_PROMPT, len(lengths))
        batches.append(Batch(prompts, lengths, None))
    return batches


def engines_of(cell: Cell, kv_cache_dtype: str, first: Batch) -> Engines:
    options = AdviseOptions(cell.model, cell.gpu, RANKS, kv_cache_dtype=kv_cache_dtype)
    longest = cell.longest + LONGEST_PROMPT
    model, memory = named_config(cell.model), cell.gpu_memory_utilization
    return modelled_engines(options, model, first, 0.0, longest, memory)


@dataclass(frozen=True)
class Answer:
    """What PAT saves, by KV."""

    plain: Advice
    fp8: Advice

    @classmethod
    def of(cls, cell: Cell) -> Answer:
        batches = batches_of(cell)
        both = (engines_of(cell, dtype, batches[0]) for dtype in ("auto", "fp8"))
        return cls(*(advise(engines, batches) for engines in both))

    @property
    def of_fp8(self) -> float:
        """What fp8 KV saves of PAT's own time."""
        return 1 - sum(self.fp8.pat) / sum(self.plain.pat)

    @property
    def of_static_fp8(self) -> float:
        """What static engines with fp8 KV would save of the time of PAT without it."""
        return 1 - sum(self.fp8.static[self.fp8.best]) / sum(self.plain.pat)


HEADERS = (
    "GPUs", "model", "lengths", "per GPU", "longest", "samples", "memory", "best static",
    "PAT saves", "best static, fp8 KV", "PAT saves, fp8 KV", "95% interval", "fp8 KV saves PAT",
)  # fmt: skip


def row(cell: Cell, answer: Answer) -> tuple[str, ...]:
    gpu, *rest = astuple(cell)
    plain, fp8 = answer.plain, answer.fp8
    return (
        f"{RANKS} x {gpu}", *map(str, rest),
        str(plain.best.layout), f"{plain.gain.mean:.1%}",
        str(fp8.best.layout), f"{fp8.gain.mean:.1%}",
        f"{fp8.gain.low:.1%} to {fp8.gain.high:.1%}", f"{answer.of_fp8:.1%}",
    )  # fmt: skip


def spread(values: Sequence[float]) -> str:
    low, middle, high = np.quantile(values, (0.1, 0.5, 0.9))
    return f"{middle:.1%} ({low:.1%} to {high:.1%})"


def summary(answers: Sequence[Answer], barred: bool) -> str:
    """`barred`: whether it is told if `BAR` is met."""
    gains = {name: [getattr(each, name).gain for each in answers] for name in ("plain", "fp8")}
    lines = [f"{len(answers)} cells; medians (10% to 90% of the cells)."]
    for name, title in (("plain", "16 bits"), ("fp8", "fp8")):
        of = gains[name]
        slower = [gain for gain in of if gain.high < 0]
        worst = min(gain.mean for gain in of)
        lines.append(
            f"KV in {title}: PAT saves {spread([gain.mean for gain in of])} of the best static "
            f"engine's time with the same KV; surely slower in {len(slower)}, at worst {worst:.1%}."
        )
    if barred:
        met = statistics.median(gain.mean for gain in gains["fp8"]) >= BAR
        lines.append(f"Bar with fp8 KV: a median of {BAR:.0%}: {'met' if met else 'missed'}.")
    lines.append(
        f"fp8 KV saves {spread([each.of_fp8 for each in answers])} of PAT's time; static engines "
        f"with it {spread([each.of_static_fp8 for each in answers])} of that of PAT without."
    )
    return "\n".join(f"* {line}" for line in lines)


def by_tail(results: Sequence[tuple[Cell, Answer]]) -> str:
    """The median saving with fp8 KV, and in 16 bits, by lengths and responses per GPU."""
    counts = sorted({cell.per_gpu for cell, _ in results})
    rows = []
    for lengths in dict.fromkeys(cell.lengths for cell, _ in results):
        texts = []
        for count in counts:
            of = [
                each for cell, each in results if (cell.lengths, cell.per_gpu) == (lengths, count)
            ]
            pair = ([each.fp8.gain.mean for each in of], [each.plain.gain.mean for each in of])
            texts.append(" / ".join(f"{statistics.median(p):.1%}" for p in pair) if of else "")
        rows.append((lengths, *texts))
    return table(("lengths", *(f"{count} per GPU" for count in counts)), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("cells", choices=("rollouts", "tails"))
    parser.add_argument("--output", type=Path, required=True, help="Markdown to write.")
    options = parser.parse_args()
    cells = list({"rollouts": rollouts, "tails": tails}[options.cells]())
    results = []
    for cell in cells:
        try:
            results.append((cell, Answer.of(cell)))
        except ValueError as error:
            print(f"{cell}: {error}")
            continue
        print(" | ".join(row(*results[-1])), flush=True)
    about = machine()
    text = summary([answer for _, answer in results], options.cells == "rollouts")
    options.output.write_text(
        f"# KV in fp8: what PAT saves, {options.cells}\n\n**Modelled**, nothing measured: "
        f"`{about['command']}`, {about['date']}, commit {about['commit']}.\n\n{text}\n\n"
        f"Median saving, fp8 KV / 16 bits:\n\n{by_tail(results)}\n"
        f"{table(HEADERS, [row(*each) for each in results])}"
    )
    print(text)


if __name__ == "__main__":
    main()
