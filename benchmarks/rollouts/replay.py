"""Replays recorded rollouts: how many tokens a step each drafter would give."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import numpy as np
from numba import njit

from benchmarks.rollouts.records import Rollouts
from pat_vllm.drafts.replay import Replayed, replay
from pat_vllm.drafts.suffix import draft

MATCH_BUCKETS = 12
"""Match lengths 0, 1, 2-3, 4-7 and so on, by powers of two."""


@dataclass(frozen=True)
class Drafter:
    """Where drafts come from: the engine's drafter, with these rows.

    Attributes:
        visits: earlier epochs whose responses to the same prompt are looked at, the latest ones.
        siblings: whether responses of the same epoch are looked at once they have ended.
        placebo: take another prompt's responses in place of the own prompt's.
        ngram: vLLM's n-gram drafter, with matches of up to 4 tokens.
        shortest: tokens of a match.
        by_match: draft tokens for each token of the match, at most; 0: as many as are asked for.
    """

    visits: int = 0
    siblings: bool = False
    placebo: bool = False
    ngram: bool = False
    shortest: int = 1
    by_match: float = 0.0


@dataclass(frozen=True)
class ReplayedEpoch(Replayed):
    """What drafts did in an epoch.

    Attributes:
        prompts: of each response, int64 `[responses]`.
        matches: steps, drafted and accepted tokens by the length of the match, int64
            `[buckets, 3]`.
    """

    prompts: np.ndarray
    matches: np.ndarray


def replay_epoch(rollouts: Rollouts, epoch: int, drafter: Drafter, k: int) -> ReplayedEpoch:
    """An epoch's rollout with a drafter that sees what existed then.

    Args:
        k: draft tokens of a step.
    """
    epochs = rollouts.epochs
    before = epochs[max(0, epoch - drafter.visits) : epoch]
    others = shuffled(len(rollouts.prompts)) if drafter.placebo else range(len(rollouts.prompts))
    matches = np.zeros((MATCH_BUCKETS, 3), np.int64)

    def seen(match: int, drafted: int, accepted: int) -> None:
        matches[min(match.bit_length(), MATCH_BUCKETS - 1)] += (1, drafted, accepted)

    def find(own: np.ndarray, others: np.ndarray, out: np.ndarray) -> tuple[int, int]:
        if drafter.ngram:
            count, match = draft_ngram(own, drafter.shortest, 4, out)
        else:
            count, match = draft(own, others, drafter.shortest, out)
        if drafter.by_match:
            count = min(count, math.ceil(drafter.by_match * match))
        return int(count), int(match)

    parts, prompts = [], []
    for number, prompt in enumerate(rollouts.prompts):
        live = [one.tokens for one in epochs[epoch] if one.prompt == number]
        past = [one.tokens for done in before for one in done if one.prompt == others[number]]
        parts.append(replay(prompt, live, past, k, siblings=drafter.siblings, find=find, seen=seen))
        prompts += [number] * len(live)
    return ReplayedEpoch(**vars(Replayed.of(parts)), prompts=np.array(prompts), matches=matches)


def gain(new: ReplayedEpoch, old: ReplayedEpoch) -> tuple[float, float, float]:
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


@njit(cache=True)
def draft_ngram(own, shortest, longest, out):  # type: ignore[no-untyped-def]
    """As vLLM's n-gram drafter: the earliest place of the longest n-gram within bounds.

    Args:
        own: int32 [tokens] of a request.
        out: int32 [k], for the draft.

    Returns:
        Tokens of the draft, and the length of the match.
    """
    size, best, place = len(own), 0, -1
    for at in range(size - 1):
        length = 0
        while length < min(longest, at + 1) and own[at - length] == own[size - 1 - length]:
            length += 1
        if length > best:
            best, place = length, at
    if best < shortest:
        return 0, 0
    count = min(len(out), size - 1 - place)
    for i in range(count):
        out[i] = own[place + 1 + i]
    return count, best


def shuffled(count: int) -> list[int]:
    """For each prompt another one."""
    order = list(range(count))
    random.Random(0).shuffle(order)
    return [order[(order.index(i) + 1) % count] for i in range(count)]
