"""Replays responses and counts what drafts give. Pure.

A draft token is a point mass, so sampling accepts it with the probability that the model gives it:
on a response that was written it is accepted exactly if it is the token that was written.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from pat_vllm.drafts.corpus import Corpus, key_of
from pat_vllm.drafts.suffix import draft

Find = Callable[[np.ndarray, np.ndarray, np.ndarray], tuple[int, int]]
"""A drafter: `own` and `others` as in `suffix.draft`, and `out`, which it fills; returns the
draft's tokens and the match's."""

Seen = Callable[[int, int, int], None]
"""Is told of each step: tokens of the match, of the draft, and those accepted."""

_MOST_TOKENS = 1 << 17
_ALL = 1 << 62


def suffix(own: np.ndarray, others: np.ndarray, out: np.ndarray) -> tuple[int, int]:
    """As Model Runner V2 drafts, with matches of at least one token.

    V1 drafts no more tokens than the match has.
    """
    count, match = draft(own, others, 1, out)
    return int(count), int(match)


@dataclass(frozen=True)
class Replayed:
    """Decode steps of each response, the tokens that they gave, and their draft tokens. All int64
    `[responses]`."""

    tokens: np.ndarray
    steps: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[Replayed]) -> Replayed:
        """All responses of some replays."""
        columns = [(one.tokens, one.steps, one.drafted, one.accepted) for one in parts]
        return cls(*(np.concatenate(column) for column in zip(*columns, strict=True)))

    @property
    def tokens_per_step(self) -> float:
        """Over all responses."""
        return float(self.tokens.sum() / max(1, self.steps.sum()))

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens that were accepted."""
        return float(self.accepted.sum() / max(1, self.drafted.sum()))


def replay(
    prompt: np.ndarray,
    responses: Sequence[np.ndarray],
    earlier: Sequence[np.ndarray],
    k: int,
    *,
    siblings: bool = True,
    find: Find = suffix,
    seen: Seen = lambda match, drafted, accepted: None,
) -> Replayed:
    """Responses to a prompt that are generated side by side; each step drafts and verifies.

    Args:
        prompt: int32 [tokens].
        responses: int32 [tokens] of each.
        earlier: responses from which all draft, the latest last; int32 [tokens] of each.
        k: draft tokens of a step, at most.
        siblings: whether they draft from those of `responses` that have ended, too.
    """
    corpus, key, tail = Corpus(_ALL), key_of([]), prompt.tolist()
    for one in earlier:
        corpus.add(key, tail, one.tolist())

    def rows() -> np.ndarray:
        found = corpus.latest(key, _MOST_TOKENS)
        return np.concatenate([np.empty(0, np.int32), *(row.tokens for row in found)])

    out, counts = np.empty(k, np.int32), np.zeros((len(responses), 3), np.int64)
    texts = [np.concatenate([prompt, one]).astype(np.int32) for one in responses]
    ends = [min(len(prompt) + 1, len(text)) for text in texts]  # prefill makes the first token
    others = rows()
    while going := [at for at, text in enumerate(texts) if ends[at] < len(text)]:
        ended = []
        for at in going:
            text, end = texts[at], ends[at]
            drafted, match = find(text[:end], others, out)
            right = out[:drafted][: len(text) - end] == text[end : end + drafted]
            accepted = int(right.cumprod().sum())
            ends[at] = min(end + accepted + 1, len(text))
            counts[at] += (1, drafted, accepted)
            seen(match, drafted, accepted)
            if ends[at] == len(text):
                ended.append(at)
        if siblings and ended:
            for at in ended:
                corpus.add(key, tail, responses[at].tolist())
            others = rows()
    tokens = np.array([max(0, len(one) - 1) for one in responses], np.int64)
    return Replayed(tokens, *counts.T)
