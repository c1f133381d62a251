"""Drafters of further models, and drafts of Mamba2: text is that without them, over every ordered
pair of layouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import pat_vllm
from tests.engine.specs import (
    CUT,
    IN_PLACE,
    MIGRATE,
    MTP_LINEAR,
    SPREAD,
    V2_EAGLE3,
    V2_MTP,
    V2_NGRAM,
)
from tests.engine.test_drafters import (  # noqa: F401
    GREEDY,
    take_tour,
    test_text_is_that_without_drafts,
    verified,
    without_drafts,
)
from tests.engine.v2.test_drafters import (  # noqa: F401
    test_linear_attention_goes_on_from_the_last_accepted_token,
)
from tests.support.engines import Job, run
from tests.support.models import random_model
from tests.support.pool import EngineSpec
from tests.support.same import PLAIN_TOLERANCE, assert_same

_TWO: dict[str, Any] = {"num_speculative_tokens": 2}
EAGLE = EngineSpec(
    "V2 eagle",
    "repeating",
    2,
    IN_PLACE | {"draft_history_bytes": 0},
    {**V2_EAGLE3.options, "speculative_config": {"method": "eagle", "model": "eagle", **_TWO}},
    model_runner_v2=True,
)
# An MTP module that is one more layer, of latent attention and of plain one, with experts. vLLM's
# latent attention for CPU takes drafts for parts of prompts, of which it reads lengths that are too
# long while another step is in flight, also without PAT; that for GPUs takes them for decoding.
DEEPSEEK, GLM = (
    EngineSpec(
        f"V2 mtp of {name}",
        model,
        2,
        IN_PLACE | experts | {"draft_history_bytes": 0},
        V2_MTP.options,
        model_runner_v2=True,
        without_async_scheduling=experts is SPREAD,
    )
    for name, model, experts in (
        ("DeepSeek", "deepseek_mtp", SPREAD),
        ("GLM-4.5", "glm_mtp", CUT),
    )
)
MTP_MAMBA = EngineSpec(
    "V2 mtp of Mamba2", "nemotron_h_mtp", 2, IN_PLACE, MTP_LINEAR.options, model_runner_v2=True
)
QWEN3_5 = EngineSpec(
    "V2 mtp of Qwen3.5", "qwen3_5_mtp", 2, IN_PLACE, MTP_LINEAR.options, model_runner_v2=True
)
NGRAM_MAMBA = EngineSpec(
    "V2 n-grams of Mamba2",
    "nemotron_h_mtp",
    2,
    MIGRATE | {"weights": "materialized"},
    {**MTP_LINEAR.options, "speculative_config": V2_NGRAM, "enable_prefix_caching": False},
    model_runner_v2=True,
)
# A drafter of attention alone for a target with states.
DRAFT_MODEL_OF_LINEAR, EAGLE_OF_LINEAR = (
    EngineSpec(
        f"V2 {method} of linear attention",
        "interrupted_next",
        2,
        IN_PLACE | SPREAD | {"draft_history_bytes": 0},
        {
            **MTP_LINEAR.options,
            "speculative_config": {"method": method, "model": drafter, **_TWO},
        },
        model_runner_v2=True,
    )
    for method, drafter in (("draft_model", "next_draft"), ("eagle", "next_eagle"))
)
pytestmark = pytest.mark.engine(
    EAGLE, DEEPSEEK, GLM, MTP_MAMBA, QWEN3_5, DRAFT_MODEL_OF_LINEAR, EAGLE_OF_LINEAR
)

ENGINES = {
    "test_new_weights_come_in_parts": [DEEPSEEK],
    "test_short_prompts_come_beside_requests_that_stop_drafting": [MTP_MAMBA],
    "test_linear_attention_goes_on_from_the_last_accepted_token": [MTP_MAMBA, NGRAM_MAMBA],
}


def load_layer_by_layer(worker: Any, path: str) -> None:
    """Give the target and the drafter each layer by itself, most of which the drafter has not."""
    from safetensors.torch import load_file

    parts: dict[str, list[Any]] = {}
    for name, weight in load_file(Path(path) / "model.safetensors").items():
        layer = name.split(".")[2] if ".layers." in name else "others"
        parts.setdefault(layer, []).append((name, weight))
    assert len(parts) > 3
    for part in parts.values():
        worker.model_runner.model.load_weights(part)
        worker.model_runner.drafter.model.load_weights(part)


def test_new_weights_come_in_parts(llm: Any, spec: EngineSpec) -> None:
    """As trainers send them. vLLM's MTP module of DeepSeek misses its layer in each other part."""
    new = f"{spec.model}_updated"
    try:
        llm.collective_rpc(load_layer_by_layer, args=(str(random_model(new)),))
        with verified() as seen:
            outcomes = take_tour(llm, spec.model)
            drafted, accepted = seen.take()
        assert_same(outcomes, without_drafts(new), PLAIN_TOLERANCE)
        assert not pat_vllm.report(llm).drafter_is_stale
        assert 0.1 * drafted < accepted, (drafted, accepted)
    finally:
        llm.collective_rpc(load_layer_by_layer, args=(str(random_model(spec.model)),))


def test_short_prompts_come_beside_requests_that_stop_drafting(llm: Any, spec: EngineSpec) -> None:
    """Of as many tokens as a step verifies, and of one, when drafts were accepted in the step
    before and this one has none."""
    few = GREEDY | {"max_tokens": 60}
    jobs = {f"long{n}": Job([*range(100, 100 + n), *range(3, 19)], few) for n in (20, 31, 45)}
    for step in range(6, 40):
        prompt = [200 + step, 5, 6][: 3 if step % 3 else 1]
        jobs[f"short{step}"] = Job(prompt, GREEDY | {"max_tokens": 2}, arrives=step)

    def before_step(step: int) -> None:
        pat_vllm.speculate(llm, 0 if step % 4 > 1 else 2)

    with verified() as seen:
        outcomes = run(llm, jobs, before_step)
        drafted, accepted = seen.take()
    assert_same(outcomes, without_drafts(spec.model, jobs), PLAIN_TOLERANCE)
    assert 10 < accepted < drafted, (drafted, accepted)
