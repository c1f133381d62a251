"""What n-gram drafts and sampled text must be, computed in the plainest way."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch


def propose(tokens: Sequence[int], shortest: int, longest: int, k: int) -> Sequence[int]:
    """The draft of vLLM's "ngram": what followed the last tokens where they stood first.

    As many last tokens as possible are looked up, from `longest` to `shortest`.

    Returns:
        At most `k` tokens; none where even the shortest n-gram is new.
    """
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for start in range(len(tokens) - n):
            if tokens[start : start + n] == tokens[-n:]:
                return tokens[start + n : start + n + k]
    return []


def drafts(
    prompt: Sequence[int], output: Sequence[int], shortest: int, longest: int, k: int
) -> tuple[int, int]:
    """Tokens drafted, and those of them accepted, while a request with this output runs."""
    tokens = [*prompt, *output]
    at = len(prompt) + 1  # the prompt's own step makes a token without a draft
    drafted = accepted = 0
    while at < len(tokens):
        draft = propose(tokens[:at], shortest, longest, k)
        right = 0
        while right < len(draft) and tokens[at + right : at + right + 1] == [draft[right]]:
            right += 1
        drafted += len(draft)
        accepted += right
        at += right + 1
    return drafted, accepted


def acceptance(
    texts: Iterable[tuple[Sequence[int], Sequence[int]]], shortest: int, longest: int, k: int
) -> list[float]:
    """Share of each text's drafted tokens that is accepted; a text is a prompt and an output."""
    counts = [drafts(prompt, output, shortest, longest, k) for prompt, output in texts]
    return [accepted / drafted for drafted, accepted in counts]


@torch.inference_mode()
def generate(
    model: Any, prompts: Sequence[Sequence[int]], steps: int, seed: int | None = None
) -> list[list[int]]:
    """Continue prompts of one length: greedily, or by sampling at temperature 1 with a seed."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    tokens, cache = torch.tensor(prompts), None
    outputs = []
    for _ in range(steps):
        step = model(tokens, past_key_values=cache)
        cache, logits = step.past_key_values, step.logits[:, -1]
        if generator is None:
            tokens = logits.argmax(-1, keepdim=True)
        else:
            tokens = torch.multinomial(logits.softmax(-1), 1, generator=generator)
        outputs.append(tokens)
    return torch.cat(outputs, 1).tolist()
