"""What drafts would have given to earlier rollouts, replayed from their texts. Pure."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_MOST_TOKENS = 200_000
"""Of the responses that are replayed: some seconds."""

_VISITS = 8
"""Earlier iterations from which drafts come, at most."""


@dataclass(frozen=True)
class Text:
    """A response and its prompt, as token ids, int32 [tokens] each."""

    prompt: np.ndarray
    response: np.ndarray


@dataclass(frozen=True)
class DraftsGive:
    """What drafts of at most `k` tokens would have given to an iteration's responses.

    Attributes:
        responses: that were replayed.
        repeated: share of them to whose prompts there are earlier iterations' responses.
        own: tokens a step, with drafts from a request's own text alone.
        earlier: the same, with drafts from earlier responses, too.
        acceptance: probability with which each draft token would be accepted if those before it
            were, were there as many drafts in every step, to make that of `earlier`.
    """

    k: int
    responses: int
    repeated: float
    own: float
    earlier: float
    acceptance: float


def drafts_give(iterations: Sequence[Sequence[Text]], k: int) -> DraftsGive:
    """Replay responses of the last iteration, all to some of its prompts, which are drawn.

    Args:
        iterations: the oldest first; the last one has a response.

    Raises:
        ValueError: numba, which compiles the drafter, is not installed.
    """
    try:
        from pat_vllm.drafts.replay import DraftReplay, replay  # imported here: it takes a second
    except ImportError as error:
        raise ValueError(
            f"the texts in --lengths cannot be replayed ({error}); `pip install numba`, or name an "
            "--acceptance"
        ) from None

    *before, last = [_by_prompt(iteration) for iteration in iterations[-1 - _VISITS :]]
    order = sorted(last)
    random.Random(0).shuffle(order)
    own, with_earlier, repeated, tokens = [], [], 0, 0
    for key in order:
        if tokens > _MOST_TOKENS:
            break
        prompt, responses = last[key][0].prompt, [text.response for text in last[key]]
        past = [text.response for of_prompt in before for text in of_prompt.get(key, ())]
        own.append(replay(prompt, responses, (), k, siblings=False))
        with_earlier.append(replay(prompt, responses, past, k))
        repeated += len(responses) if past else 0
        tokens += sum(map(len, responses))
    ours, theirs = DraftReplay.of(with_earlier), DraftReplay.of(own)
    count = len(ours.tokens)
    return DraftsGive(
        k,
        count,
        repeated / count,
        theirs.tokens_per_step,
        ours.tokens_per_step,
        acceptance_of(ours.tokens_per_step, k),
    )


def _by_prompt(texts: Sequence[Text]) -> dict[bytes, list[Text]]:
    groups = defaultdict(list)
    for text in texts:
        groups[text.prompt.tobytes()].append(text)
    return dict(groups)


def acceptance_of(tokens_per_step: float, k: int) -> float:
    """The acceptance p of each of k drafts with which a step gives so many tokens: 1 + p + p^2 +
    ... + p^k."""
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = 0.5 * (low + high)
        given = sum(middle**i for i in range(k + 1))
        low, high = (middle, high) if given < tokens_per_step else (low, middle)
    return high if tokens_per_step > 1 else 0.0
