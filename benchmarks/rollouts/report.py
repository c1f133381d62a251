"""What is said of a run of GRPO, and of its replay."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.record import table
from benchmarks.rollouts.lengths import length_errors
from benchmarks.rollouts.records import Rollouts
from benchmarks.rollouts.replay import Drafter, gain, replay_epoch

if TYPE_CHECKING:
    from benchmarks.rollouts.learn import Epoch

OWN = Drafter()
NGRAM = "n-gram of 2 to 4 tokens, as vLLM's"
DRAFTERS: Mapping[str, Drafter] = {
    NGRAM: Drafter(ngram=True, shortest=2),
    "own text, match of 2 or more": Drafter(shortest=2),
    "own text, match of 1 or more": OWN,
    "own text, siblings that have ended": Drafter(siblings=True),
    "own text, 1 visit": Drafter(visits=1),
    "own text, 4 visits": Drafter(visits=4),
    "own text, 8 visits": Drafter(visits=8),
    "own text, 8 visits, siblings that have ended": Drafter(visits=8, siblings=True),
    "the same, match of 2 or more": Drafter(visits=8, siblings=True, shortest=2),
    "own text, 8 visits of another prompt (placebo)": Drafter(visits=8, placebo=True),
}

ALIKE = (1, 2, 3, 4, 6, 8, 12, 16)
BY_MATCH = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Draft tokens of a request: for all, or for each token of its match."""


def of_learning(rollouts: Rollouts, epochs: Sequence[Epoch], picture: Path | None = None) -> str:
    """Markdown: each epoch's reward, lengths, certainty; and its rollout's time, by side.

    Args:
        picture: a PNG to write.
    """
    rows = []
    for number, (responses, epoch) in enumerate(zip(rollouts.epochs, epochs, strict=True)):
        lengths = np.array([len(one.tokens) for one in responses])
        by_token = lengths / lengths.sum()
        rows.append(
            [
                str(number),
                f"{np.mean([one.reward for one in responses]):.3f}",
                *(f"{np.percentile(lengths, q):.0f}" for q in (50, 90, 100)),
                f"{lengths.sum()}",
                f"{np.dot(by_token, [one.max_p for one in responses]):.3f}",
                f"{np.dot(by_token, [one.entropy for one in responses]):.3f}",
                f"{epoch.training:.1f}",
            ]
        )
    heads = ["epoch", "reward", "median", "p90", "longest", "tokens", "E[max p]", "entropy"]
    parts = [table([*heads, "training, s"], rows)]
    parts += [_of_lengths(rollouts)]
    sides = list(epochs[0].rollouts)
    rows = []
    for number, epoch in enumerate(epochs):
        of_sides = [epoch.rollouts[side] for side in sides]
        cells = [
            f"{one.seconds:.1f} ({one.tokens_per_step:.2f}; {1e6 * one.seconds / one.tokens:.0f}; "
            f"{one.switches})"
            for one in of_sides
        ]
        rows.append([str(number), *cells])
    parts += ["Seconds of the rollout (tokens a step; microseconds a token; switches):\n"]
    parts += [table(["epoch", *sides], rows)]
    if picture is not None:
        curves: dict[str, list[tuple[float, float]]] = {side: [] for side in sides}
        for epoch in epochs:
            for side, one in epoch.rollouts.items():
                curves[side].append((one.tokens_per_step, 1e6 * one.seconds / one.tokens))
        draw_epochs(curves, picture)
    return "\n".join(parts)


def _of_lengths(rollouts: Rollouts) -> str:
    """How well lengths are known from the epoch before."""
    of_epochs = rollouts.epochs
    rows = []
    for number, (before, now) in enumerate(itertools.pairwise(of_epochs), 1):
        errors = length_errors(before, now)
        cells = f"{errors.alike:.2f}", f"{errors.by_prompt:.2f}", f"{errors.found:.2f}"
        rows.append([str(number), *cells])
    text = (
        "Lengths, guessed by the median of the epoch before, are off by so many octaves; and how "
        "much of the longest tenth is of the fifth of the prompts that were longest:\n\n"
    )
    return text + table(["epoch", "of all responses", "of the prompt's", "found"], rows)


def draw_epochs(sides: Mapping[str, Sequence[tuple[float, float]]], picture: Path) -> None:
    """Draw tokens a step and microseconds a token, by epoch and side.

    Args:
        sides: of each side, both in each epoch.
        picture: the PNG to write.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for side, epochs in sides.items():
        left.plot([tokens for tokens, _ in epochs], marker="o", label=side)
        right.plot([microseconds for _, microseconds in epochs], marker="o", label=side)
    left.set(xlabel="epoch", ylabel="tokens a step")
    right.set(xlabel="epoch", ylabel="rollout, microseconds a token", ylim=(0, None))
    for axes in (left, right):
        axes.grid(alpha=0.3)
    left.legend()
    figure.savefig(picture, dpi=110)


def of_replay(rollouts: Rollouts, lengths: Sequence[int], picture: Path) -> str:
    """Markdown: tokens a step of each drafter, in the last epoch, by draft length and by epoch.

    Args:
        lengths: draft tokens of a step; of the middle one are the other tables.
        picture: a PNG to write.
    """
    last = len(rollouts.epochs) - 1
    k = lengths[len(lengths) // 2]
    rows = []
    for name, drafter in DRAFTERS.items():
        sides = [replay_epoch(rollouts, last, drafter, k) for k in lengths]
        middle = sides[len(sides) // 2]
        if name == NGRAM:
            ngram = middle
        cells = [f"{one.tokens_per_step:.3f} ({one.acceptance:.2f})" for one in sides]
        over = "{:.3f} ({:.3f}-{:.3f})".format(*gain(middle, ngram))
        rows.append([name, *cells, over])
    head = ["tokens a step (accepted share)", *(f"k = {k}" for k in lengths)]
    parts = [
        f"**Replayed** in lockstep: epoch {last}, which had {last} visits before.\n",
        table([*head, f"over n-gram, k = {k} (interval)"], rows),
        f"By epoch, all earlier visits, k = {k}:\n",
    ]
    curves = {
        name: [replay_epoch(rollouts, epoch, one, k).tokens_per_step for epoch in range(last + 1)]
        for name, one in BY_EPOCH.items()
    }
    rows = [
        [str(epoch), *(f"{curve[epoch]:.3f}" for curve in curves.values())]
        for epoch in range(last + 1)
    ]
    parts += [table(["epoch", *BY_EPOCH], rows), f"By the match's length, k = {k}:\n"]
    rows = []
    sides = [replay_epoch(rollouts, last, one, k) for one in BY_EPOCH.values()]
    for bucket in range(sides[0].matches.shape[0]):
        if any(one.matches[bucket, 0] for one in sides):
            shown = "none" if bucket == 0 else f"{2 ** (bucket - 1)} to {2**bucket - 1}"
            cells = []
            for one in sides:
                steps, _, accepted = one.matches[bucket]
                share = steps / one.matches[:, 0].sum()
                cells.append(f"{share:.2f}: {accepted / max(1, steps):.2f}")
            rows.append([shown, *cells])
    parts.append(table(["match, tokens: share of steps: accepted a step", *BY_EPOCH], rows))
    parts.append(_by_match(rollouts, last))
    _draw(curves, k, picture)
    return "\n".join(parts)


def _by_match(rollouts: Rollouts, epoch: int) -> str:
    """Markdown: as many drafts for all requests, or more for those whose match is longer."""
    history = Drafter(visits=1_000)
    points = []
    for k in ALIKE:
        one = replay_epoch(rollouts, epoch, history, k)
        points.append((one.drafted.sum() / one.steps.sum(), one.tokens_per_step))
    drafts, tokens = zip(*points, strict=True)
    rows = [
        [f"{k}", f"{made:.2f}", f"{of_step:.3f}", "-"]
        for k, made, of_step in zip(ALIKE, drafts, tokens, strict=True)
    ]
    for factor in BY_MATCH:
        one = replay_epoch(rollouts, epoch, replace(history, by_match=factor), ALIKE[-1])
        made, of_step = one.drafted.sum() / one.steps.sum(), one.tokens_per_step
        alike = float(np.interp(made, drafts, tokens))
        name = f"{factor:g} for a token of the match, at most {ALIKE[-1]}"
        rows.append([name, f"{made:.2f}", f"{of_step:.3f}", f"{of_step / alike:.3f}"])
    head = ["drafts of a request", "verified a step", "tokens a step"]
    return "Drafts by the match, all earlier visits:\n\n" + table(
        [*head, "over as many drafts, alike for all"], rows
    )


def _draw(curves: Mapping[str, Sequence[float]], k: int, picture: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    for name, curve in curves.items():
        axes.plot(curve, marker="o", label=name)
    axes.set(xlabel="epoch", ylabel="tokens a step", title=f"Replayed, k = {k}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(picture, dpi=110)


BY_EPOCH: Mapping[str, Drafter] = {
    "n-gram": DRAFTERS[NGRAM],
    "own text": OWN,
    "siblings": Drafter(siblings=True),
    "history": Drafter(visits=1_000),
    "history, siblings": Drafter(visits=1_000, siblings=True),
    "placebo": Drafter(visits=1_000, placebo=True),
}
