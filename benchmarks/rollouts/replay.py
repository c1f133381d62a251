"""Replays recorded rollouts in lockstep and says how many tokens a step each drafter would give.

A draft token that is drawn from a point mass is accepted with the probability of that token, so on
a recorded response it is accepted exactly if it is the recorded token.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numba import njit

from benchmarks.rollouts.records import Response, Rollouts
from pat_vllm.drafts.corpus import Corpus, key_of
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
    """

    visits: int = 0
    siblings: bool = False
    placebo: bool = False
    ngram: bool = False
    shortest: int = 1


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
    epochs = rollouts.epochs
    before = epochs[max(0, epoch - drafter.visits) : epoch]
    others = _shuffled(len(rollouts.prompts)) if drafter.placebo else range(len(rollouts.prompts))
    columns, matches = [], np.zeros((MATCH_BUCKETS, 3), np.int64)
    for number, prompt in enumerate(rollouts.prompts):
        live = [one for one in epochs[epoch] if one.prompt == number]
        past = [one for done in before for one in done if one.prompt == others[number]]
        counts = _replay(prompt, live, past, drafter, k, matches)
        given = np.array([len(one.tokens) - 1 for one in live])
        columns.append(np.column_stack([np.full(len(live), number), given, counts]))
    prompts, tokens, steps, drafted, accepted = np.concatenate(columns).T
    return Replayed(prompts, tokens, steps, drafted, accepted, matches)


def _replay(
    prompt: np.ndarray,
    live: Sequence[Response],
    past: Sequence[Response],
    drafter: Drafter,
    k: int,
    matches: np.ndarray,
) -> np.ndarray:
    """Responses that are generated side by side; each step drafts and verifies.

    Args:
        matches: counts of steps, drafted and accepted tokens are added by the match's length.

    Returns:
        Of each response its decode steps, draft tokens verified and accepted, int64 [responses, 3].
    """
    corpus, key = Corpus(1 << 40), key_of([])
    for one in past:
        corpus.add(key, prompt.tolist(), one.tokens.tolist())

    def rows() -> np.ndarray:
        return np.concatenate([out[:0], *(row.tokens for row in corpus.latest(key, 1 << 17))])

    out, counts = np.empty(k, np.int32), np.zeros((len(live), 3), np.int64)
    texts = [np.concatenate([prompt, one.tokens]).astype(np.int32) for one in live]
    ends = [min(len(prompt) + 1, len(text)) for text in texts]  # prefill makes the first token
    others = rows()
    while going := [at for at, text in enumerate(texts) if ends[at] < len(text)]:
        ended = []
        for at in going:
            text, end = texts[at], ends[at]
            if drafter.ngram:
                drafted, match = draft_ngram(text[:end], drafter.shortest, 4, out)
            else:
                drafted, match = draft(text[:end], others, drafter.shortest, out)
            right = out[:drafted][: len(text) - end] == text[end : end + drafted]
            accepted = int(right.cumprod().sum())
            ends[at] = min(end + accepted + 1, len(text))
            counts[at] += (1, drafted, accepted)
            bucket = min(int(match).bit_length(), MATCH_BUCKETS - 1)
            matches[bucket] += (1, drafted, accepted)
            if ends[at] == len(text):
                ended.append(at)
        if drafter.siblings and ended:
            for at in ended:
                corpus.add(key, prompt.tolist(), live[at].tokens.tolist())
            others = rows()
    return counts


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


def _shuffled(count: int) -> list[int]:
    """For each prompt another one."""
    order = list(range(count))
    random.Random(0).shuffle(order)
    return [order[(order.index(i) + 1) % count] for i in range(count)]
