"""Drafters with weights, which trainers' worker extensions update with their target.

NeMo-RL looks for them as Model Runner V1 has them. EAGLE-3's weights come by names of their own; an
MTP module takes its own from among the model's. SkyRL sends an MTP module's by vLLM's own transfer.
NeMo-RL's Ray has PAT's local processes in its place.
"""

from __future__ import annotations

from typing import Any

import pytest

import pat_vllm
from tests.engine.test_drafters import take_tour, verified, without_drafts
from tests.nightly.trainers import need
from tests.nightly.trainers.test_worker_extensions import EXTENSIONS
from tests.support.engines import engine
from tests.support.models import random_model
from tests.support.same import PLAIN_TOLERANCE, assert_same
from tests.support.v2_on_cpu.v2_on_cpu import model_runner_v2

PAT = {"weights": "inplace", "enabled": True, "launcher": "mp"}
EAGLE3: dict[str, Any] = {
    "method": "eagle3",
    "model": "eagle3_of_another",
    "num_speculative_tokens": 2,
}
MTP: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 2}
NEW_EAGLE3 = [
    ("repeating_updated", ""),
    ("repeating_updated", "eagle3_updated"),
    ("repeating", "eagle3"),
]
CASES: dict[str, tuple[str, dict[str, Any], list[tuple[str, str]]]] = {
    "nemo_rl eagle3": ("nemo_rl", EAGLE3, NEW_EAGLE3),
    "nemo_rl mtp": ("nemo_rl", MTP, [("repeating_qwen2", ""), ("mimo", ""), ("mimo_updated", "")]),
    "skyrl mtp": (
        "skyrl ipc",
        MTP,
        [("repeating_qwen2", ""), ("mimo", "mimo"), ("mimo_updated", "mimo_updated")],
    ),
}
"""A trainer's extension, how the engine drafts, and from which models the weights of each update
come: those of the target, and those that are sent beside them. The first brings the drafter none.
"""


def options_of(extension: str, model: str, drafts: dict[str, Any]) -> dict[str, Any]:
    """An engine's options."""
    if extension == "nemo_rl":
        from tests.nightly.trainers.nemo_rl_on_cpu import engine_options

        options = engine_options(str(random_model(model)), 2, PAT, speculative_config=drafts)
    else:
        name, _, more = EXTENSIONS[extension]
        options = more | {"worker_extension_cls": name, "speculative_config": drafts}
    # An MTP module drafts by the target's embeddings and head: that its own weights have come shows
    # only if there was noise before.
    return options | {"load_format": "dummy" if drafts is MTP else "auto"}


@pytest.mark.parametrize("case", CASES)
def test_updates(case: str) -> None:
    """The first brings the drafter none: its drafts are wrong, and the report says why."""
    extension, drafts, updates = CASES[case]
    need(extension.partition(" ")[0])
    model = updates[-1][0].removesuffix("_updated")
    update: Any = EXTENSIONS[extension][1]
    options = options_of(extension, model, drafts)
    shares: list[float] = []
    with model_runner_v2(), engine(model, 2, PAT, **options) as llm:
        for target, drafter in updates:
            update(llm, target, drafter)
            with verified() as seen:
                outcomes = take_tour(llm, target)
                drafted, accepted = seen.take()
            assert_same(outcomes, without_drafts(target), PLAIN_TOLERANCE)
            assert pat_vllm.report(llm).drafter_is_stale == (not shares)
            shares.append(accepted / drafted)
    assert shares[0] < 0.05 and min(shares[1:]) > 0.1, shares
