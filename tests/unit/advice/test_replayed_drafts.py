"""What drafts would have given to the texts of earlier rollouts."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from pat_vllm.advice.lengths import read_rollouts
from pat_vllm.advice.replayed_drafts import Text, acceptance_of, drafts_give
from pat_vllm.cli.advise import AdviseOptions, advice_for
from pat_vllm.drafts.replay import replay
from tests.unit.advice.test_lengths import words


def text(prompt: int, seed: int, length: int = 60) -> Text:
    """A response in which no token comes twice."""
    tokens = random.Random(seed).sample(range(100, 100_000), length)
    return Text(np.array([prompt, 99], np.int32), np.array(tokens, np.int32))


def test_what_was_said_before_is_drafted() -> None:
    first = [text(prompt, seed=prompt) for prompt in range(6)]
    said_again = drafts_give([first, first], 7)
    assert said_again.responses == 6 and said_again.repeated == 1
    assert said_again.own == 1  # no token comes twice
    assert said_again.earlier > 7 and said_again.acceptance > 0.97
    other = [text(prompt, seed=100 + prompt) for prompt in range(6)]
    for iterations in ([other, first], [first]):
        assert drafts_give(iterations, 7).earlier == 1
        assert drafts_give(iterations, 7).acceptance == 0
    # Another prompt's responses are none of this one's.
    moved = [
        Text(np.array([50 + i, 99], np.int32), sample.response) for i, sample in enumerate(first)
    ]
    assert drafts_give([moved, first], 7) == drafts_give([first], 7)


def test_siblings_that_have_ended_are_drafted_from() -> None:
    short, whole = text(1, seed=0, length=20), text(1, seed=0, length=20)
    longer = Text(whole.prompt, np.concatenate([text(1, seed=1).response, whole.response]))
    give = drafts_give([[short, longer]], 4)
    assert give.repeated == 0 and give.own == 1 < give.earlier


def test_a_step_ends_at_its_first_wrong_draft() -> None:
    prompt, said = np.array([1, 2], np.int32), np.arange(10, 18, dtype=np.int32)
    now = said.copy()
    now[3] = 99  # 10 | 11 12 and 99 | 14 | 15 16 and 17
    done = replay(prompt, [now], [said], 4)
    assert (done.steps.tolist(), done.accepted.tolist()) == ([3], [5])
    assert done.tokens_per_step == 7 / 3


@pytest.mark.parametrize("siblings", [False, True])
@pytest.mark.parametrize("visits", [0, 2])
def test_a_replay_gives_every_token_once(siblings: bool, visits: int) -> None:
    rng = np.random.default_rng(0)
    prompt, *said = (rng.integers(4, size=size, dtype=np.int32) for size in (5, 30, 1, 17, 9, 25))
    done = replay(prompt, said, said[:visits], 4, siblings=siblings)
    # The last step of a response may lack its bonus token, no other.
    assert set((done.steps + done.accepted - done.tokens).tolist()) <= {0, 1}
    assert (done.accepted <= done.drafted).all() and done.accepted.any()
    assert (done.drafted <= 4 * done.steps).all()


def test_large_rollouts_are_drawn_from() -> None:
    many = [text(prompt, seed=prompt, length=20_000) for prompt in range(40)]
    assert 5 < drafts_give([many], 2).responses < 20


@pytest.mark.parametrize("k", [1, 4, 7])
@pytest.mark.parametrize("acceptance", [0.0, 0.3, 0.9])
def test_acceptance_is_that_of_tokens_per_step(acceptance: float, k: int) -> None:
    given = sum(acceptance**i for i in range(k + 1))
    assert acceptance_of(given, k) == pytest.approx(acceptance, abs=1e-6)


@pytest.fixture
def dumps(tmp_path: Path) -> Path:
    """Two steps of VeRL's, whose responses to a prompt are the same."""
    for step in (1, 2):
        lines = [
            {"input": f"prompt {i}", "output": " ".join(map(str, range(i, 90 + i))), "step": step}
            for i in range(20)
        ]
        (tmp_path / f"{step}.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return tmp_path


def test_dumps_of_trainers_hold_texts(dumps: Path) -> None:
    texts = read_rollouts(dumps, words).texts
    assert [len(iteration) for iteration in texts] == [20, 20]
    assert drafts_give(texts, 7).repeated == 1


def test_acceptance_is_taken_from_texts(dumps: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pat_vllm.advice.batches._tokenizer", lambda options: words)
    options = AdviseOptions("qwen3-8b", "H100", 8, responses=64, lengths=dumps)
    advice, give = advice_for(options)
    assert give is not None and give.acceptance > 0.9
    assert advice.engines.draft_lengths[-1] == give.k
    # What is asked for counts.
    asked, none = advice_for(replace(options, acceptance=0.0))
    assert none is None and asked.engines.draft_lengths == (0,)
