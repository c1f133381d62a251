"""Replays responses and counts what drafts give. Pure.

A draft token is a point mass, so sampling accepts it with the probability that the model gives it:
on a response that was written it is accepted exactly if it is the token that was written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pat_vllm.drafts.corpus import Corpus, key_of
from pat_vllm.drafts.suffix import draft

_MOST_TOKENS = 1 << 17
_ALL = 1 << 62


@dataclass(frozen=True)
class DraftReplay:
    """Decode steps of each response, the tokens that they gave, and their draft tokens. All int64
    `[responses]`."""

    tokens: np.ndarray
    steps: np.ndarray
    drafted: np.ndarray
    accepted: np.ndarray

    @classmethod
    def of(cls, parts: Sequence[DraftReplay]) -> DraftReplay:
        """All responses of some replays."""
        columns = [(part.tokens, part.steps, part.drafted, part.accepted) for part in parts]
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
) -> DraftReplay:
    """Responses to a prompt that are generated side by side; each step drafts and verifies.

    They draft as Model Runner V2 does, with matches of at least one token. V1 drafts no more tokens
    than the match has.

    Args:
        prompt: int32 [tokens].
        responses: int32 [tokens] of each.
        earlier: responses from which all draft, the latest last; int32 [tokens] of each.
        k: draft tokens of a step, at most.
        siblings: whether they draft from those of `responses` that have ended, too.
    """
    corpus, key, tail = Corpus(_ALL), key_of([]), prompt.tolist()
    for response in earlier:
        corpus.add(key, tail, response.tolist())

    def rows() -> np.ndarray:
        latest = corpus.latest(key, _MOST_TOKENS)
        return np.concatenate([np.empty(0, np.int32), *(row.tokens for row in latest)])

    out, counts = np.empty(k, np.int32), np.zeros((len(responses), 3), np.int64)
    texts = [np.concatenate([prompt, response]).astype(np.int32) for response in responses]
    ends = [min(len(prompt) + 1, len(text)) for text in texts]  # prefill makes the first token
    others = rows()
    while going := [at for at, text in enumerate(texts) if ends[at] < len(text)]:
        ended = []
        for at in going:
            text, end = texts[at], ends[at]
            drafted, _ = draft(text[:end], others, 1, out)
            right = out[:drafted][: len(text) - end] == text[end : end + drafted]
            accepted = int(right.cumprod().sum())
            ends[at] = min(end + accepted + 1, len(text))
            counts[at] += (1, drafted, accepted)
            if ends[at] == len(text):
                ended.append(at)
        if siblings and ended:
            for at in ended:
                corpus.add(key, tail, responses[at].tolist())
            others = rows()
    tokens = np.array([max(0, len(response) - 1) for response in responses], np.int64)
    return DraftReplay(tokens, *counts.T)
