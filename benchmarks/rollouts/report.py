"""What is said of a run of GRPO, and of its replay."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from benchmarks.rollouts.records import Rollouts
from benchmarks.rollouts.replay import Drafter, replay_epoch
from pat_vllm.cli.results import table

if TYPE_CHECKING:
    from benchmarks.rollouts.learn import Epoch

OWN = Drafter()
DRAFTERS: Mapping[str, Drafter] = {
    "n-gram of 2 to 4 tokens, as vLLM's": Drafter(ngram=True, shortest=2, longest=4),
    "own text, longest match of 2 or more": Drafter(shortest=2),
    "own text, longest match of 1 or more": OWN,
    "and live siblings": Drafter(siblings=True),
    "own text and 1 visit": Drafter(visits=1),
    "own text and 4 visits": Drafter(visits=4),
    "own text and 9 visits": Drafter(visits=9),
    "own text, 9 visits, live siblings": Drafter(visits=9, siblings=True),
    "own text and 9 visits of another prompt (placebo)": Drafter(visits=9, placebo=True),
}


def of_learning(rollouts: Rollouts, epochs: Sequence[Epoch]) -> str:
    """Markdown: each epoch's reward, lengths, certainty and time."""
    rows = []
    for number, (responses, epoch) in enumerate(zip(rollouts.epochs, epochs, strict=True)):
        lengths = np.array([len(one.tokens) for one in responses])
        by_token = lengths / lengths.sum()
        steps = lengths.sum() - len(lengths) - epoch.accepted
        rows.append(
            [
                str(number),
                f"{np.mean([one.reward for one in responses]):.3f}",
                *(f"{np.percentile(lengths, q):.0f}" for q in (50, 90, 100)),
                f"{lengths.sum()}",
                f"{np.dot(by_token, [one.max_p for one in responses]):.3f}",
                f"{np.dot(by_token, [one.entropy for one in responses]):.3f}",
                f"{epoch.seconds:.1f}",
                f"{epoch.training:.1f}",
                f"{(lengths.sum() - len(lengths)) / steps:.3f}",
                str(epoch.switches),
            ]
        )
    heads = ["epoch", "reward", "median", "p90", "longest", "tokens", "E[max p]", "entropy"]
    heads += ["rollout, s", "training, s", "tokens a step", "switches"]
    return table(heads, rows)


def of_replay(rollouts: Rollouts, lengths: Sequence[int]) -> str:
    """Markdown: tokens a step of each drafter, in the last epoch, by draft length and by epoch."""
    last = len(rollouts.epochs) - 1
    parts = [f"Replayed in lockstep: epoch {last}, which had {last} visits before.\n"]
    rows = []
    for name, drafter in DRAFTERS.items():
        cells = []
        for k in lengths:
            one = replay_epoch(rollouts, last, drafter, k)
            cells.append(f"{one.tokens_per_step:.3f} ({one.acceptance:.2f})")
        rows.append([name, *cells])
    heads = ["tokens a step (accepted share)", *(f"k = {k}" for k in lengths)]
    parts.append(table(heads, rows))
    k = 8
    rows = []
    for epoch in range(last + 1):
        sides = [replay_epoch(rollouts, epoch, one, k) for one in _BY_EPOCH.values()]
        rows.append([str(epoch), *(f"{one.tokens_per_step:.3f}" for one in sides)])
    parts.append(f"By epoch, all earlier visits, k = {k}:\n")
    parts.append(table(["epoch", *_BY_EPOCH], rows))
    return "\n".join(parts)


_BY_EPOCH: Mapping[str, Drafter] = {
    "n-gram": DRAFTERS["n-gram of 2 to 4 tokens, as vLLM's"],
    "own text": OWN,
    "siblings": Drafter(siblings=True),
    "history": Drafter(visits=1_000),
    "history, siblings": Drafter(visits=1_000, siblings=True),
    "placebo": Drafter(visits=1_000, placebo=True),
}
