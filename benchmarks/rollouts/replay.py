"""Replays recorded rollouts in lockstep and says how many tokens a step each drafter would give."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.rollouts.records import Response, Rollouts


@dataclass(frozen=True)
class Drafter:
    """Where drafts come from.

    Attributes:
        visits: earlier epochs whose responses to the same prompt are looked at, the latest ones.
        siblings: whether responses that are generated side by side are.
        placebo: take another prompt's responses in place of the own prompt's.
        ngram: vLLM's n-gram drafter.
        shortest, longest: tokens of a match.
        base: how many times the votes of a match one token shorter a match has.
        least: share of the votes that a draft token needs.
    """

    visits: int = 0
    siblings: bool = False
    placebo: bool = False
    ngram: bool = False
    shortest: int = 1
    longest: int = 32
    base: float = 8.0
    least: float = 0.0


@dataclass(frozen=True)
class Replayed:
    """What drafts did.

    Attributes:
        prompts: of each response, `[responses]`.
        tokens: int64 `[responses]`, those that decode steps gave.
        steps, drafted, accepted: int64 `[responses]`: decode steps, draft tokens, those accepted.
        matches: int64 `[buckets, 3]`: the same three by the length of the match.
    """

    prompts: np.ndarray
    tokens: np.ndarray
    steps: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray
    matches: np.ndarray

    @property
    def tokens_per_step(self) -> float:
        """Over all responses."""
        return float(self.tokens.sum() / self.steps.sum())

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens that were accepted."""
        return float(self.accepted.sum() / max(1, self.drafted.sum()))

    @property
    def drafted_per_step(self) -> float:
        """Draft tokens of a step."""
        return float(self.drafted.sum() / self.steps.sum())


def replay_epoch(rollouts: Rollouts, epoch: int, drafter: Drafter, k: int) -> Replayed:
    """An epoch's rollout with a drafter that sees what existed then.

    Args:
        k: draft tokens of a step.
    """
    from benchmarks.rollouts import drafters

    epochs = rollouts.epochs
    before = epochs[max(0, epoch - drafter.visits) : epoch]
    others = _shuffled(len(rollouts.prompts)) if drafter.placebo else range(len(rollouts.prompts))
    parts: list[tuple[np.ndarray, np.ndarray]] = []
    for prompt in range(len(rollouts.prompts)):
        live = [one for one in epochs[epoch] if one.prompt == prompt]
        past = [one for done in before for one in done if one.prompt == others[prompt]]
        flat, starts, firsts, totals = _rows(rollouts, [*live, *past])
        counts, matches = drafters.replay(
            flat,
            starts,
            firsts,
            totals,
            len(live),
            drafter.siblings,
            drafter.ngram,
            k,
            drafter.shortest,
            drafter.longest,
            drafter.base,
            drafter.least,
        )
        given = np.array([len(one.tokens) - 1 for one in live])
        parts.append((np.column_stack([np.full(len(live), prompt), given, counts]), matches))
    columns = np.concatenate([counts for counts, _ in parts]).T
    prompts, tokens, steps, drafted, accepted = columns
    by_match: np.ndarray = np.sum([one for _, one in parts], axis=0)
    return Replayed(prompts, tokens, steps, drafted, accepted, by_match)


def gain(new: Replayed, old: Replayed) -> tuple[float, float, float]:
    """Tokens a step of one replay over those of another of the same responses.

    Returns:
        The ratio, and its bootstrap 95% interval over prompts.
    """
    count = new.prompts.max() + 1
    ours, theirs = (np.bincount(one.prompts, one.steps, count) for one in (new, old))
    drawn = np.random.default_rng(0).integers(count, size=(2000, count))
    ratios = theirs[drawn].sum(1) / ours[drawn].sum(1)
    low, high = np.percentile(ratios, [2.5, 97.5])
    return float(theirs.sum() / ours.sum()), float(low), float(high)


def _rows(rollouts: Rollouts, responses: Sequence[Response]) -> tuple[Any, Any, Any, Any]:
    """Prompts and responses in a row each: flat tokens, starts, where responses begin, ends."""
    prompts = [rollouts.prompts[one.prompt] for one in responses]
    rows = [
        np.concatenate(pair) for pair in zip(prompts, (r.tokens for r in responses), strict=True)
    ]
    totals = np.cumsum([len(row) for row in rows])
    starts = totals - [len(row) for row in rows]
    return np.concatenate(rows), starts, starts + [len(one) for one in prompts], totals


def _shuffled(count: int) -> list[int]:
    """For each prompt another one."""
    order = list(range(count))
    random.Random(0).shuffle(order)
    return [order[(order.index(i) + 1) % count] for i in range(count)]
