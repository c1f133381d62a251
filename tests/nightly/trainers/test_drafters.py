"""Drafters with weights, which NeMo-RL's worker extension refits with their target.

It looks for them as Model Runner V1 has them. EAGLE-3's weights come by names of their own; an MTP
module takes its own from among the model's.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import pytest

import pat_vllm
from tests.engine.v2.test_drafters import take_tour, verified, without_drafts
from tests.nightly.trainers import need
from tests.nightly.trainers.test_worker_extensions import by_nemo_rl
from tests.support.engines import engine
from tests.support.models import random_model
from tests.support.same import PLAIN_TOLERANCE, assert_same
from tests.support.v2_on_cpu.v2_on_cpu import model_runner_v2

need("nemo_rl")
engine_options = import_module("tests.nightly.trainers.nemo_rl_on_cpu").engine_options


@pytest.mark.parametrize(
    ("target", "drafts", "drafter"),
    [
        ("repeating", {"method": "eagle3", "model": "eagle3"}, "eagle3"),
        ("mimo", {"method": "mtp"}, ""),
    ],
    ids=["eagle3", "mtp"],
)
def test_refits(target: str, drafts: dict[str, Any], drafter: str) -> None:
    """From noise: what drafts right after it has come by the refit.

    NeMo-RL's Ray has PAT's local processes in its place.
    """
    pat = {"weights": "inplace", "enabled": True, "launcher": "mp"}
    drafts = {**drafts, "num_speculative_tokens": 2}
    options = engine_options(str(random_model(target)), 2, pat, speculative_config=drafts)
    options |= {"load_format": "dummy"}
    shares = []
    with model_runner_v2(), engine(target, 2, pat, **options) as llm:
        alone = {"mimo": "repeating_qwen2"}.get(target, target)
        for model, draft in ((alone, ""), (target, drafter), (f"{target}_updated", drafter)):
            by_nemo_rl(llm, model, draft and model.replace(target, draft))
            with verified() as seen:
                outcomes = take_tour(llm, model)
                drafted, accepted = seen.take()
            assert_same(outcomes, without_drafts(model), PLAIN_TOLERANCE)
            assert pat_vllm.report(llm).drafter_is_stale == (not shares)
            shares.append(accepted / drafted)
    assert shares[0] < 0.05 and min(shares[1:]) > 0.1, shares
