"""What engines keep between them: lengths, and what drafts were worth, in one file."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pat_vllm.predictor import kept
from pat_vllm.predictor.acceptance import Acceptance
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.lengths import LengthModel
from pat_vllm.simulator.modelled.hardware import named_profile
from tests.support.mutation import mutated

LENGTHS = (0, 1, 2, 4)


def learnt(accepted: int, length: int = 4, steps: int = 2000) -> Acceptance:
    """After steps of 8 requests, of whose drafts so many each were accepted."""
    model = Acceptance(LENGTHS)
    for _ in range(steps):
        model.observe(length, 8, np.full(8, accepted))
    return model


def a_length_model() -> LengthModel:
    model = LengthModel(1000)
    for length in range(1, 33):
        model.finished(10 * length, True)
    model.end_of_batch()
    return model


def check_both_parts(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    good, poor = learnt(4), learnt(0)
    for before in (good, poor):
        kept.save(path, a_length_model(), before)
        lengths, after = kept.load(path, draft_lengths=LENGTHS)
        assert (lengths.batches, lengths.responses) == (1, 32)
        unknown = Acceptance(LENGTHS).expected().tokens[-1]
        tokens, known = after.expected().tokens[-1], before.expected().tokens[-1]
        # In the direction of what was seen, and less sure of it.
        assert min(known, unknown) < tokens < max(known, unknown)
        # It counts as with other weights: some steps of these correct it.
        for _ in range(30):
            after.observe(4, 8, np.full(8, 4 if before is poor else 0))
        other = good if before is poor else poor
        assert abs(after.expected().tokens[-1] - other.expected().tokens[-1]) < 0.5


def test_both_parts(tmp_path: Path) -> None:
    check_both_parts(tmp_path)


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        (kept.load, {"acceptance.weights_changed()": "pass"}),
        (kept.load, {'if "acceptance" in content': "if False"}),
        (kept.save, {"if acceptance is not None": "if False"}),
    ],
    ids=["as sure as before", "not read", "not written"],
)
def test_mistakes_are_seen(
    function: Callable[..., Any], changes: dict[str, str], tmp_path: Path
) -> None:
    with mutated(function, changes), pytest.raises(AssertionError):
        check_both_parts(tmp_path)


def test_older_files_and_engines_without_drafts(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps(a_length_model().to_json()))
    lengths, acceptance = kept.load(path, draft_lengths=LENGTHS)
    assert lengths.responses == 32
    expected = Acceptance(LENGTHS).expected()
    np.testing.assert_array_equal(acceptance.expected().tokens, expected.tokens)
    # A file with more in it is still one of lengths, for older versions too.
    kept.save(path, lengths, learnt(4))
    assert LengthModel.from_json(json.loads(path.read_text())).responses == 32
    assert kept.load(path)[1].expected().tokens.tolist() == [1.0]


@pytest.mark.parametrize("lengths", [(0, 1), (0, 1, 2, 4, 8), (0, 7)])
def test_other_draft_lengths(tmp_path: Path, lengths: tuple[int, ...]) -> None:
    path = tmp_path / "lengths.json"
    kept.save(path, a_length_model(), learnt(4))
    acceptance = kept.load(path, draft_lengths=lengths)[1]
    assert acceptance.expected().lengths.tolist() == list(lengths)
    assert acceptance.expected().tokens[1] > Acceptance(lengths).expected().tokens[1]


@pytest.mark.parametrize("part", [{}, {"format": 1}, {"format": 2}, None, [1]])
def test_a_damaged_part_names_the_file(tmp_path: Path, part: object) -> None:
    path = tmp_path / "lengths.json"
    path.write_text(json.dumps({**a_length_model().to_json(), "acceptance": part}))
    with pytest.raises(ValueError, match=r"lengths\.json .*delete it"):
        kept.load(path, draft_lengths=LENGTHS)


def test_a_policy_keeps_and_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    profile = named_profile("llama-3.1-8b", "H100", 4, draft_lengths=LENGTHS[1:])  # modelled
    first = AdaptivePolicy(profile, bound=1000, lengths_file=path, draft_lengths=LENGTHS)
    for step in range(2000):
        first.drafted(float(step), 4, 8, np.full(8, 4))
    first.finished(2000.0, 0, 50, True)
    first.idle(2000.0)
    second = AdaptivePolicy(profile, bound=1000, lengths_file=path, draft_lengths=LENGTHS)
    assert second._acceptance is not None
    tokens = second._acceptance.expected().tokens[-1]
    assert tokens > Acceptance(LENGTHS).expected().tokens[-1]
    assert second.report().responses == 1
