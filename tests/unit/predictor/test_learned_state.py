"""What engines keep between them: lengths, and what drafts were worth, in one file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pat_vllm.files.reading import FileError
from pat_vllm.modelled.hardware import modelled_profile
from pat_vllm.predictor import learned_state
from pat_vllm.predictor.acceptance import Acceptance
from pat_vllm.predictor.adaptive import AdaptivePolicy
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
    path = tmp_path / "lengths.json"
    before = learnt(accepted)
    learned_state.save(path, some_lengths(), before)
    lengths, after = learned_state.load(path, draft_lengths=LENGTHS)
    assert (lengths.batches, lengths.responses) == (1, 32)
    # In the direction of what was seen, and less sure of it.
    low, high = sorted((tokens_of(before), tokens_of(Acceptance(LENGTHS))))
    assert low < tokens_of(after) < high
    # Some steps with the new weights correct it.
    for _ in range(30):
        after.observe(4, 8, np.full(8, 4 - accepted))
    assert abs(tokens_of(after) - tokens_of(learnt(4 - accepted))) < 0.5


def test_engines_without_drafts(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    learned_state.save(path, some_lengths())
    lengths, acceptance = learned_state.load(path, draft_lengths=LENGTHS)
    assert lengths.responses == 32
    assert tokens_of(acceptance) == tokens_of(Acceptance(LENGTHS))
    learned_state.save(path, lengths, learnt(4))
    assert tokens_of(learned_state.load(path)[1]) == 1.0


def test_a_policy_keeps_and_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    profile = modelled_profile("llama-3.1-8b", "H100", 4, draft_lengths=LENGTHS[1:])  # modelled
    first = AdaptivePolicy(profile, bound=1000, lengths_file=path, draft_lengths=LENGTHS)
    for step in range(500):
        first.drafted(float(step), 4, 8, np.full(8, 4))
    first.finished(2000.0, 50, True)
    first.idle(2000.0)
    second = AdaptivePolicy(profile, bound=1000, lengths_file=path, draft_lengths=LENGTHS)
    assert second._acceptance is not None
    assert tokens_of(second._acceptance.of_new) > tokens_of(Acceptance(LENGTHS))
    assert second.report().responses == 1


def drafts(tried: Any, succeeded: Any, format: int = 1) -> dict[str, Any]:
    return {"acceptance": {"format": format, "tried": tried, "succeeded": succeeded}}


@pytest.mark.parametrize(
    "wrong",
    [
        *({"ends": [-1.0]}, {"ends": [math.nan]}, {"tokens": []}, {"ends": [2.0], "tokens": [1.0]}),
        *({"batches": -1}, {"bound": 0}, {"acceptance": {}}, drafts([1.0], [1.0], format=0)),
        *(drafts([1.0], None), drafts([1.0], [2.0]), drafts([1.0, 2.0], [1.0])),
        *(drafts([math.inf], [1.0]), drafts(["many"], [1.0])),
    ],
    ids=str,
)
def test_what_no_engine_has_learnt_is_refused(wrong: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "lengths.json"
    learned_state.save(path, some_lengths(), learnt(4))
    content = json.loads(path.read_text()) | wrong
    del content["digest"]
    path.write_text(json.dumps({"digest": learned_state._digest(content), **content}))
    with pytest.raises(FileError, match="holds no length history"):
        learned_state.load(path)
