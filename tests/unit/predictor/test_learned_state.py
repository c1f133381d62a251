"""What engines keep between them: lengths, and what drafts were worth."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from pat_vllm.files.reading import FileError
from pat_vllm.predictor import learned_state
from pat_vllm.predictor.acceptance import Acceptance
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.learned_state import NAME, LearnedState, load, to_json
from tests.support.modelled_profile import modelled_profile
from tests.unit.predictor.examples import some_lengths

LENGTHS = (0, 1, 2, 4)


def tokens_of(model: Acceptance) -> float:
    """Tokens per step that the longest draft length is expected to give."""
    return float(model.expected().tokens[-1])


def learnt(accepted: int) -> Acceptance:
    """After steps of 8 requests, of whose 4 drafts so many each were accepted."""
    model = Acceptance(LENGTHS)
    for _ in range(2000):
        model.observe(4, 8, np.full(8, accepted))
    return model


@pytest.mark.parametrize("accepted", [4, 0])
def test_both_parts_are_kept_and_drafts_count_as_of_other_weights(
    accepted: int, tmp_path: Path
) -> None:
    before = learnt(accepted)
    LearnedState(tmp_path).save(some_lengths(), before)
    lengths, after = LearnedState(tmp_path).load(1000, LENGTHS)
    assert (lengths.batches, lengths.responses) == (1, 32)
    assert (lengths.history == some_lengths().history).all()
    # In the direction of what was seen, and less sure of it.
    low, high = sorted((tokens_of(before), tokens_of(Acceptance(LENGTHS))))
    assert low < tokens_of(after) < high
    # Some steps with the new weights correct it.
    for _ in range(30):
        after.observe(4, 8, np.full(8, 4 - accepted))
    assert abs(tokens_of(after) - tokens_of(learnt(4 - accepted))) < 0.5


def test_engines_without_drafts(tmp_path: Path) -> None:
    state = LearnedState(tmp_path)
    state.save(some_lengths(), None)
    lengths, acceptance = state.load(500, LENGTHS)
    assert (lengths.responses, lengths.bound) == (32, 500)
    assert tokens_of(acceptance) == tokens_of(Acceptance(LENGTHS))
    state.save(lengths, learnt(4))
    assert tokens_of(state.load(500, (0,))[1]) == 1.0


def test_a_policy_keeps_and_reads_it(tmp_path: Path) -> None:
    profile = modelled_profile("llama-3.1-8b", "H100", 4, draft_lengths=LENGTHS[1:])  # modelled
    state_dir = tmp_path / "made" / "when written"
    first = AdaptivePolicy(profile, bound=1000, state_dir=state_dir, draft_lengths=LENGTHS)
    for step in range(500):
        first.verified(float(step), 4, 8, np.full(8, 4))
    first.ended(2000.0, 50, True)
    first.batch_over(2000.0)
    second = AdaptivePolicy(profile, bound=1000, state_dir=state_dir, draft_lengths=LENGTHS)
    assert second._acceptance is not None
    assert tokens_of(second._acceptance.of_new) > tokens_of(Acceptance(LENGTHS))
    assert second.report().responses == 1


def test_no_damage_is_taken(tmp_path: Path) -> None:
    """Whatever is cut off, or which bit is flipped."""
    path, draw = tmp_path / NAME, random.Random(1)
    whole = to_json(some_lengths(), Acceptance((0, 2))).encode()
    for _ in range(400):
        at, bit = draw.randrange(len(whole)), 1 << draw.randrange(8)
        flipped = whole[:at] + bytes([whole[at] ^ bit]) + whole[at + 1 :]
        for damaged in (whole[:at], flipped):
            path.write_bytes(damaged)
            with pytest.raises(FileError, match=r"learnt\.json"):
                load(path)
    path.write_bytes(whole)
    assert load(path)[0].responses == 32


def test_another_format_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / NAME
    path.write_text(to_json(some_lengths()))
    monkeypatch.setattr(learned_state, "_FORMAT", 9)
    with pytest.raises(FileError, match="has another format; this version reads 9"):
        load(path)
