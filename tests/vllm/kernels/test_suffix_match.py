"""The drafter's Triton kernels against the drafter for one request, in Triton's interpreter."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams

from pat_vllm.drafts.corpus import BETWEEN_ROWS
from pat_vllm.drafts.shelf import RowUpdate, Shelf
from pat_vllm.drafts.suffix import draft
from pat_vllm.worker.drafters.proposer import SuffixProposer
from tests.vllm.kernels.triton_kernels import in_interpreter, needs_triton

ROUNDS = 12
FILL = 3
CASES: Sequence[tuple[list[int], list[list[int]]]] = (
    # Before the text there is `FILL`, which would make the match at its beginning longer.
    ([FILL, 7, 8, FILL, FILL], []),
    # The draft ends with the first row, though there is more behind it.
    ([1, 2], [[1, 2, 9], [4, 4]]),
)
"""Own texts and rows."""
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


def drafts_of_v1(own: list[int], prompt: int, k: int, min_tokens: int = 0) -> list[int]:
    """Of Model Runner V1's drafter, in contexts of 20 tokens; `prompt`: tokens of it in `own`."""
    drafter: Any = object.__new__(SuffixProposer)
    request = SimpleNamespace(
        num_prompt_tokens=prompt, sampling_params=SamplingParams(min_tokens=min_tokens)
    )
    drafter._runner = SimpleNamespace(
        requests={"a": request, "b": request}, input_batch=SimpleNamespace(req_ids=["b", "a"])
    )
    drafter._shelf, drafter._out = Shelf(), np.empty(8, np.int32)
    drafter._shelf.take(
        RowUpdate(rows={0: np.array([-1, 5, 6, 7, 8, 9, 10], np.int32)}, of_requests={"a": (0,)})
    )
    drafter.k, drafter.min_n, drafter.max_model_len = 8, 2, 20
    tokens = np.zeros((2, 20), np.int32)
    tokens[1, : len(own)] = own
    nothing, drafts = drafter.batch_propose(2, [1], np.array([4, len(own)]), tokens, k)
    assert nothing == []
    return drafts


def test_drafts_of_model_runner_v1() -> None:
    """No more than are asked for, than the match has, than the context takes, or than `min_tokens`
    allows."""
    assert drafts_of_v1([1, 5, 6, 7], 2, k=8) == [8, 9, 10]
    assert drafts_of_v1([1, 5, 6, 7], 2, k=2) == [8, 9]
    assert drafts_of_v1([1, 2, 5, 6], 2, k=8) == [7, 8], "as the match"
    assert drafts_of_v1([1, 2, 3, 6], 2, k=3) == [], "one token is no match"
    assert drafts_of_v1([1] * 15 + [5, 6, 7], 2, k=8) == [8, 9]
    # Behind the drafts comes a token of which vLLM thinks that it is the fourth.
    assert drafts_of_v1([1, 5, 6, 7], 2, k=8, min_tokens=5) == [8, 9]
    assert drafts_of_v1([1, 5, 6, 7], 2, k=8, min_tokens=3) == []
    assert drafts_of_v1([1, 5, 6, 7], 2, k=8, min_tokens=2) == [8, 9, 10]


def test_texts_are_not_looked_through_for_no_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Shelf, "text_of", None)
    assert drafts_of_v1([1, 2, 5, 6], 2, k=0) == []
    assert drafts_of_v1([1, 2, 5, 6], 2, k=8, min_tokens=3) == []


def main() -> None:
    from pat_vllm.kernels import suffix_match

    draws, num_drafts = random.Random(5), 0
    for round_ in range(ROUNDS):
        requests, k, shortest = draws.randint(1, 5), draws.randint(1, 9), draws.randint(1, 3)
        if round_ < len(CASES):
            k, shortest = 4, 1
        states = torch.tensor(draws.sample(range(1, 8), requests), dtype=torch.int32)
        tokens = torch.full((8, OWN), FILL, dtype=torch.int32)
        lengths, sampled = torch.ones(8, dtype=torch.int32), []
        last_sampled = torch.arange(100, 108)
        others, texts, expected = torch.zeros((requests + 1, 2), dtype=torch.int64), [], []
        for request, state in enumerate(states.tolist()):
            own = random_text(draws, draws.choice([1, 2, 40, 1025, OWN]), 2 + round_)
            rows: list[int] = []
            if not request and round_ < len(CASES):
                own, case = CASES[round_]
                rows = [token for row in case for token in (BETWEEN_ROWS, *row)]
            while (
                (request or round_ >= len(CASES))
                and draws.random() < 0.7
                and len(rows) < OTHER // 2
            ):
                row = random_text(draws, draws.choice([1, 50, OTHER // 2]), 2 + round_)
                rows += [BETWEEN_ROWS, *row]
            texts.append(torch.tensor(rows, dtype=torch.int32))
            tokens[state, : len(own)] = torch.tensor(own)
            lengths[state] = len(own)
            others[request] = torch.tensor([texts[-1].data_ptr(), len(rows)])
            sampled.append(int(not request or draws.random() < 0.8))
            out = np.zeros(k, np.int32)
            count, _ = draft(np.array(own, np.int32), np.array(rows, np.int32), shortest, out)
            count *= sampled[-1]
            num_drafts += count
            expected.append([*out[:count].tolist(), *[100 + state] * (k - count)])
        longest = max(map(len, texts))
        scores = torch.full((requests, suffix_match.score_blocks(OWN, longest) + 1), -1)
        drafts = torch.full((requests, k), -1)
        suffix_match.draft(
            tokens, states, lengths, torch.tensor(sampled, dtype=torch.int32), last_sampled,
            others, longest, scores, drafts, shortest,
        )  # fmt: skip
        assert drafts.tolist() == expected, (round_, drafts.tolist(), expected)
    assert num_drafts > ROUNDS
    print("equal")


if __name__ == "__main__":
    main()
