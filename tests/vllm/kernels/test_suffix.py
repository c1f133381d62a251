"""The drafter's Triton kernels against the drafter for one request, in Triton's interpreter."""

from __future__ import annotations

import random

import numpy as np
import torch

from pat_vllm.drafts.corpus import BETWEEN_ROWS
from pat_vllm.drafts.suffix import draft
from tests.vllm.kernels.triton_kernels import in_interpreter, needs_triton

ROUNDS = 12
OWN, OTHER = 2300, 1500
"""Tokens of the longest texts: more than one block of places."""


def random_text(draws: random.Random, size: int, words: int) -> list[int]:
    """Repeats itself, with changes."""
    text: list[int] = []
    while len(text) < size:
        if text and draws.random() < 0.7:
            start, count = draws.randrange(len(text)), draws.randint(1, 60)
            text += text[start : start + count]
        else:
            text.append(draws.randrange(words))
    return text[:size]


@needs_triton
def test_kernels_draft_as_the_function_does() -> None:
    assert in_interpreter(__name__).split()[-1] == "equal"


def main() -> None:
    from pat_vllm.kernels import suffix

    draws, found = random.Random(5), 0
    for round_ in range(ROUNDS):
        requests, k, shortest = draws.randint(1, 5), draws.randint(1, 9), draws.randint(1, 3)
        states = torch.tensor(draws.sample(range(8), requests), dtype=torch.int32)
        tokens = torch.full((8, OWN), 3, dtype=torch.int32)
        lengths, sampled = torch.ones(8, dtype=torch.int32), []
        last_sampled = torch.arange(100, 108)
        others, texts, expected = torch.zeros((requests + 1, 2), dtype=torch.int64), [], []
        for request, state in enumerate(states.tolist()):
            own = random_text(draws, draws.choice([1, 2, 40, 1025, OWN]), 2 + round_)
            rows: list[int] = []
            while draws.random() < 0.7 and len(rows) < OTHER // 2:
                row = random_text(draws, draws.choice([1, 50, OTHER // 2]), 2 + round_)
                rows += [BETWEEN_ROWS, *row]
            texts.append(torch.tensor(rows, dtype=torch.int32))
            tokens[state, : len(own)] = torch.tensor(own)
            lengths[state] = len(own)
            others[request] = torch.tensor([texts[-1].data_ptr(), len(rows)])
            sampled.append(int(draws.random() < 0.8))
            out = np.zeros(k, np.int32)
            count, _ = draft(np.array(own, np.int32), np.array(rows, np.int32), shortest, out)
            count *= sampled[-1]
            found += count
            expected.append([*out[:count].tolist(), *[100 + state] * (k - count)])
        longest = max(map(len, texts))
        scores = torch.full((requests, suffix.score_blocks(OWN, longest) + 1), -1)
        drafts = torch.full((requests, k), -1)
        suffix.draft(
            tokens, states, lengths, torch.tensor(sampled, dtype=torch.int32), last_sampled,
            others, longest, scores, drafts, shortest,
        )  # fmt: skip
        assert drafts.tolist() == expected, (round_, drafts.tolist(), expected)
    assert found > ROUNDS
    print("equal")


if __name__ == "__main__":
    main()
