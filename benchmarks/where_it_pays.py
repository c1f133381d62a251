"""What PAT saves over the best static engine, both as they are and with a feature. Modelled.

    python -m benchmarks.where_it_pays rollouts --feature mtp --output benchmarks/results/DATE.md

Every cell is what `pat-vllm advise` computes, for PAT and for static engines with the same feature,
on the same batches, whose lengths the planner knows. Cells are a sample of rollouts as trainers
have them (`rollouts`, 51), all of a grid of tails (`tails`, 210), or of very long responses
(`traces`, 12).
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import astuple, dataclass
from itertools import islice, product
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import machine, table
from pat_vllm.advice.advice import Advice, Gain, advise
from pat_vllm.advice.batches import FUTURES
from pat_vllm.advice.engines import Engines, load_of, modelled_engines
from pat_vllm.advice.replayed_drafts import acceptance_of
from pat_vllm.cli.advise import AdviseOptions
from pat_vllm.modelled.shapes import drawn_lengths
from pat_vllm.models.checkpoint import named_config
from pat_vllm.predictor.state import Floats
from pat_vllm.predictor.whole_batch import Batch, acceptance_of_each

RANKS = 8
LONGEST_PROMPT = 512


@dataclass(frozen=True)
class Feature:
    """What engines may have.

    Attributes:
        options: of `pat-vllm advise`.
        bar: share of the best static engine's time that PAT is to save with it in the median of
            `rollouts`.
        bar_of_enough: the same of the cells that have KV enough; None: there is none.
        acceptance: probability that a draft is accepted if those before it were.
    """

    name: str
    options: Mapping[str, str]
    bar: float
    bar_of_enough: float | None = None
    acceptance: float = 0.0


FEATURES = {
    "fp8-kv": Feature("fp8 KV", {"kv_cache_dtype": "fp8"}, 0.03),
    # 2.5 tokens a step with four drafts.
    "mtp": Feature("MTP drafts", {"drafter": "mtp"}, 0.05, 0.09, acceptance_of(2.5, 4)),
}
PLAIN = Feature("plain", {}, 0.0)
STATIC_LENGTHS = (3, 5)
"""Draft lengths that static engines may have beside those of PAT's."""


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


def traces() -> Iterator[Cell]:
    """Responses of up to 65,536 tokens, as of rl-traces-bench."""
    models = ("llama-3.1-8b", "qwen3-next-80b-a3b")
    for gpu, model, per_gpu in product(("A40", "H100", "H200"), models, (16, 64)):
        yield Cell(gpu, model, "rl-traces", per_gpu, longest=65536)


CELLS = {"rollouts": rollouts, "tails": tails, "traces": traces}


def fits(cell: Cell) -> bool:
    """Whether some static layout has room for the longest request, with KV in 16 bits."""
    try:
        engines_of(cell, PLAIN, batches_of(cell)[0])
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


def batches_of(cell: Cell, acceptance: float = 0.0) -> list[Batch]:
    batches = []
    for seed in range(FUTURES):
        lengths = np.clip(np.rint(lengths_of(cell, seed)), 1, cell.longest).astype(np.int64)
        prompts = np.random.default_rng((seed, 1)).integers(64, LONGEST_PROMPT, len(lengths))
        each = acceptance_of_each(acceptance, len(lengths), seed) if acceptance else None
        batches.append(Batch(prompts, lengths, each))
    return batches


def engines_of(cell: Cell, feature: Feature, first: Batch) -> Engines:
    given: dict[str, Any] = dict(feature.options)
    options = AdviseOptions(cell.model, cell.gpu, RANKS, **given)
    longest = cell.longest + LONGEST_PROMPT
    model, memory = named_config(cell.model), cell.gpu_memory_utilization
    return modelled_engines(options, model, first, feature.acceptance, longest, memory)


@dataclass(frozen=True)
class Answer:
    """What PAT saves, without the feature and with it.

    Attributes:
        enough: whether PAT's base layout with the feature has room for all KV of a batch at once.
    """

    plain: Advice
    with_it: Advice
    best: str
    gain: Gain
    enough: bool

    @classmethod
    def of(cls, cell: Cell, feature: Feature) -> Answer:
        plain, with_it = (advice_of(cell, each) for each in (PLAIN, feature))
        batches = batches_of(cell, feature.acceptance)
        static = {str(each): seconds for each, seconds in with_it.static.items()}
        if feature.acceptance:
            static |= {
                f"{each.layout}, k = {k}": tuple(
                    each.seconds(batch, ((1, each.max_num_seqs, k),)) for batch in batches
                )
                for each in with_it.engines.static
                for k in STATIC_LENGTHS
            }
        best = min(static, key=lambda name: sum(static[name]))
        planner = with_it.engines.planner
        room, _ = planner.room(planner.layouts[0])
        enough = load_of(batches[0], feature.acceptance).most_tokens <= room
        return cls(plain, with_it, best, Gain.of(with_it.pat, static[best]), enough)

    @property
    def of_feature(self) -> float:
        """What the feature saves of PAT's own time."""
        return 1 - sum(self.with_it.pat) / sum(self.plain.pat)


def advice_of(cell: Cell, feature: Feature) -> Advice:
    batches = batches_of(cell, feature.acceptance)
    return advise(engines_of(cell, feature, batches[0]), batches)


HEADERS = (
    "GPUs", "model", "lengths", "per GPU", "longest", "samples", "memory", "best static",
    "PAT saves", "best static, both with it", "PAT saves", "95% interval", "it saves PAT", "KV",
)  # fmt: skip


def row(cell: Cell, answer: Answer) -> tuple[str, ...]:
    gpu, *rest = astuple(cell)
    plain, gain = answer.plain, answer.gain
    return (
        f"{RANKS} x {gpu}", *map(str, rest),
        str(plain.best.layout), f"{plain.gain.mean:.1%}",
        answer.best, f"{gain.mean:.1%}", f"{gain.low:.1%} to {gain.high:.1%}",
        f"{answer.of_feature:.1%}", "enough" if answer.enough else "short",
    )  # fmt: skip


def spread(values: Sequence[float]) -> str:
    low, middle, high = np.quantile(values, (0.1, 0.5, 0.9))
    return f"{middle:.1%} ({low:.1%} to {high:.1%})"


def summary(answers: Sequence[Answer], feature: Feature, barred: bool) -> str:
    """`barred`: whether it is told if the bars are met."""
    lines = [f"{len(answers)} cells; medians (10% to 90% of the cells)."]
    for name, gains in (
        ("without it", [answer.plain.gain for answer in answers]),
        ("with it", [answer.gain for answer in answers]),
    ):
        slower, worst = sum(gain.high < 0 for gain in gains), min(gain.mean for gain in gains)
        lines.append(
            f"Both {name}: PAT saves {spread([gain.mean for gain in gains])} of the best static "
            f"engine's time; surely slower in {slower}, at worst {worst:.1%}."
        )
    enough = [answer.gain.mean for answer in answers if answer.enough]
    for which, bar, of in (
        ("all cells", feature.bar, [answer.gain.mean for answer in answers]),
        (f"{len(enough)} cells with KV enough", feature.bar_of_enough, enough),
    ):
        if barred and bar is not None:
            met = "met" if statistics.median(of) >= bar else "**missed**"
            lines.append(f"Of {which}, with it: {spread(of)}; bar {bar:.0%}: {met}.")
    saved = spread([each.of_feature for each in answers])
    lines.append(f"It saves {saved} of PAT's own time.")
    return "\n".join(f"* {line}" for line in lines)


def by_tail(results: Sequence[tuple[Cell, Answer]]) -> str:
    """The median saving with the feature, and without, by lengths and responses per GPU."""
    counts = sorted({cell.per_gpu for cell, _ in results})
    rows = []
    for lengths in dict.fromkeys(cell.lengths for cell, _ in results):
        texts = []
        for count in counts:
            of = [
                each for cell, each in results if (cell.lengths, cell.per_gpu) == (lengths, count)
            ]
            pair = ([each.gain.mean for each in of], [each.plain.gain.mean for each in of])
            texts.append(" / ".join(f"{statistics.median(p):.1%}" for p in pair) if of else "")
        rows.append((lengths, *texts))
    return table(("lengths", *(f"{count} per GPU" for count in counts)), rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cells", choices=CELLS)
    parser.add_argument("--feature", choices=FEATURES, default="fp8-kv")
    parser.add_argument("--output", type=Path, required=True, help="Markdown to write.")
    options = parser.parse_args()
    about, feature = machine(), FEATURES[options.feature]
    cells = list(CELLS[options.cells]())
    results = []
    for cell in cells:
        try:
            results.append((cell, Answer.of(cell, feature)))
        except ValueError as error:
            print(f"{cell}: {error}")
            continue
        print(" | ".join(row(*results[-1])), flush=True)
    text = summary([answer for _, answer in results], feature, barred=options.cells == "rollouts")
    drafts = f" A draft is accepted with {feature.acceptance:.2f}." if feature.acceptance else ""
    options.output.write_text(
        f"# {feature.name}: what PAT saves, {options.cells}\n\n**Modelled**, nothing measured: "
        f"`{about['command']}`, {about['date']}, commit {about['commit']}.{drafts}\n\n{text}\n\n"
        f"Median saving, with it / without:\n\n{by_tail(results)}\n"
        f"{table(HEADERS, [row(*each) for each in results])}"
    )
    print(text)


if __name__ == "__main__":
    main()
