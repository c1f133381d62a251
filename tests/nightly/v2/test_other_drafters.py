"""Drafters of further models, and drafts of Mamba2: text is that without them, over every ordered
pair of layouts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.specs import (
    CUT,
    EAGLE3,
    IN_PLACE,
    MIGRATE,
    MTP,
    MTP_LINEAR,
    SPREAD,
    V2_NGRAM,
)
from tests.engine.v2.test_drafters import (  # noqa: F401
    test_linear_attention_goes_on_from_the_last_accepted_token,
    test_text_is_that_without_drafts,
)
from tests.support.pool import EngineSpec

_TWO: dict[str, Any] = {"num_speculative_tokens": 2}
EAGLE = EngineSpec(
    "V2 eagle",
    "repeating",
    2,
    IN_PLACE | {"draft_history_bytes": 0},
    {**EAGLE3.options, "speculative_config": {"method": "eagle", "model": "eagle", **_TWO}},
    model_runner_v2=True,
)
# An MTP module that is one more layer, of latent attention and of plain one, with experts.
DEEPSEEK, GLM = (
    EngineSpec(
        f"V2 mtp of {name}",
        model,
        2,
        IN_PLACE | experts | {"draft_history_bytes": 0},
        MTP.options,
        model_runner_v2=True,
    )
    for name, model, experts in (
        ("DeepSeek", "deepseek_mtp", SPREAD),
        ("GLM-4.5", "glm_mtp", CUT),
    )
)
MTP_MAMBA = EngineSpec(
    "V2 mtp of Mamba2", "nemotron_h_mtp", 2, IN_PLACE, MTP_LINEAR.options, model_runner_v2=True
)
NGRAM_MAMBA = EngineSpec(
    "V2 n-grams of Mamba2",
    "nemotron_h_mtp",
    2,
    MIGRATE | {"weights": "materialized"},
    {**MTP_LINEAR.options, "speculative_config": V2_NGRAM, "enable_prefix_caching": False},
    model_runner_v2=True,
)
pytestmark = pytest.mark.engine(EAGLE, DEEPSEEK, GLM, MTP_MAMBA)

ENGINES = {
    "test_linear_attention_goes_on_from_the_last_accepted_token": [MTP_MAMBA, NGRAM_MAMBA],
}
