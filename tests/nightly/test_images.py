"""Images through switches: every class that is served, both model runners, storms."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

import pat_vllm
from tests.engine.specs import IN_PLACE, MIGRATE, OF_IMAGES, UPDATES, WITHOUT_CACHE
from tests.engine.test_images import (  # noqa: F401
    batch,
    expected_of,
    test_an_image_seen_before_an_update_is_encoded_again,
    test_images_are_encoded_again_where_no_kv_moves,
    test_text_is_that_without_switches,
)
from tests.engine.test_memory import (  # noqa: F401
    LARGE,
    test_an_engine_allocates_what_is_computed,
)
from tests.engine.v2.batch import sizes_of
from tests.support.engines import Job, Outcome, run
from tests.support.pool import EngineSpec, go_home
from tests.support.same import PLAIN_TOLERANCE, assert_same, of_batch


def engine(name: str, model: str, ranks: int = 2, **options: Any) -> EngineSpec:
    """In place, with plain weights, which can be updated."""
    return EngineSpec(name, model, ranks, IN_PLACE, UPDATES | OF_IMAGES, **options)


FOUR = engine("Qwen2.5-VL, four ranks", "qwen2_5_vl", 4)
QWEN3 = engine("Qwen3-VL", "qwen3_vl")
QWEN2_5_V2 = engine("Qwen2.5-VL, V2", "qwen2_5_vl", model_runner_v2=True)
COPIES = EngineSpec(
    "Qwen3-VL, copies", "qwen3_vl", 2, MIGRATE | {"weights": "materialized"}, OF_IMAGES
)
MIXTURE = EngineSpec("Qwen3-VL-MoE", "qwen3_vl_moe", 2, IN_PLACE, OF_IMAGES)
LINEAR, LINEAR_MIXTURE = (
    EngineSpec(name, model, 2, IN_PLACE, WITHOUT_CACHE | OF_IMAGES)
    for name, model in (("Qwen3.5", "qwen3_5_vl"), ("Qwen3.5-MoE", "qwen3_5_moe_vl"))
)
# Its tower is cut. On CPU vLLM has its images attend as text does, in every engine.
GEMMA = EngineSpec(
    "Gemma 3",
    "gemma3_vl",
    2,
    MIGRATE | {"weights": "materialized"},
    OF_IMAGES | {"limit_mm_per_prompt": {"image": 4}, "prefix_cache_retention_interval": 32},
)
# Fewer embeddings than the images of a batch have: outputs are evicted, also by steps without any
# token.
FEW = EngineSpec(
    "few embeddings",
    "qwen2_5_vl",
    2,
    IN_PLACE,
    OF_IMAGES | {"max_num_batched_tokens": 80, "max_num_seqs": 4},
)
LARGE_IMAGES = EngineSpec(
    "large, of images", "qwen3_vl", 2, IN_PLACE, LARGE | {"language_model_only": False}
)
pytestmark = pytest.mark.engine(
    FOUR, QWEN3, QWEN2_5_V2, COPIES, MIXTURE, LINEAR, LINEAR_MIXTURE, FEW, GEMMA
)
ENGINES = {
    "test_an_image_seen_before_an_update_is_encoded_again": [FOUR, QWEN3, QWEN2_5_V2],
    "test_an_engine_allocates_what_is_computed": [LARGE_IMAGES],
    "test_storm": [FOUR, QWEN3, QWEN2_5_V2, LINEAR, FEW, GEMMA],
}


def test_storm(llm: Any, spec: EngineSpec) -> None:
    """Random switches under requests that come, go and are given up: no token is lost."""
    go_home(llm)
    rng, expected = random.Random(2), expected_of(spec.model)
    jobs: dict[str, Job] = {
        f"{name}/{copy}": replace(job, arrives=rng.randint(0, 60))
        for copy in range(4)
        for name, job in batch(spec.model).items()
    }
    given_up = {name: rng.randint(1, 20) for name in rng.sample(sorted(jobs), 6)}
    waiting, due = dict(given_up), 2
    seen: dict[str, Outcome] = {}

    def before_step(step: int) -> None:
        nonlocal due
        for name, tokens in list(waiting.items()):
            if name in seen and len(seen[name].token_ids) >= tokens:
                del waiting[name]
                llm.llm_engine.abort_request([name])
        if step >= due:
            due += rng.randint(2, 9)
            here = pat_vllm.report(llm).layout.tp
            assert pat_vllm.switch(llm, tp=rng.choice([tp for tp in sizes_of(llm) if tp != here]))

    from vllm.sampling_params import RequestOutputKind

    delta = {"output_kind": RequestOutputKind.DELTA}
    streamed = {n: replace(job, sampling=job.sampling | delta) for n, job in jobs.items()}
    finished = run(llm, streamed, before_step, seen)
    for name in given_up:
        tokens = seen[name].token_ids
        assert tokens == expected[of_batch(name)].token_ids[: len(tokens)], name
    done = {name: outcome for name, outcome in finished.items() if name not in given_up}
    assert_same(done, {name: expected[of_batch(name)] for name in done}, PLAIN_TOLERANCE)
    assert not llm.llm_engine.has_unfinished_requests()
