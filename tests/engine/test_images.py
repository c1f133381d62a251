"""Images and videos through switches: tokens and log-probabilities are stock vLLM's."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest

import pat_vllm
from tests.engine.specs import IMAGES, IMAGES_V2, OF_IMAGES
from tests.engine.test_weight_updates import PLAIN, load_all
from tests.engine.v2.batch import kv_carried, sizes_of, tour
from tests.support.engines import Job, Outcome, run, scheduler_of
from tests.support.pool import EngineSpec, go_home
from tests.support.same import PLAIN_TOLERANCE, TOLERANCE, assert_same
from tests.support.stock import stock_answers
from tests.support.vision import PLACE, PLACE_OF_GEMMA

pytestmark = pytest.mark.engine(IMAGES, IMAGES_V2)
ENGINES = {
    "test_images_are_encoded_again_where_no_kv_moves": [IMAGES],
    "test_an_image_seen_before_an_update_is_encoded_again": [IMAGES],
}

GREEDY = {"temperature": 0.0, "logprobs": 0, "ignore_eos": True}
PATCHES_OF_14 = "qwen2_5_vl"
"""The class whose tokens have 28 pixels a side; others have 32, or one size for all images."""


def batch(model: str) -> dict[str, Job]:
    """Two prompts that differ by an image alone; several images; a video; text; one that finds an
    image in the prefix cache."""
    rng, side = random.Random(1), 28 if model == PATCHES_OF_14 else 32
    of_gemma = model.startswith("gemma")
    place = PLACE_OF_GEMMA if of_gemma else PLACE["image"]

    def text(tokens: int) -> list[int]:
        return [rng.randrange(3, 400) for _ in range(tokens)]

    def image(seed: int, columns: int = 8, rows: int = 8) -> tuple[str, int, int, int]:
        return "image", seed, columns * side, rows * side

    begin, end = text(20), text(7)
    one = [*begin, *place, *end]
    two = [*text(60), *place, *text(5), *place, *text(3)]
    video = [*text(30), *PLACE["video"], *text(4)]
    jobs = {
        "one": Job(one, GREEDY, media=(image(1),)),
        "another": Job(one, GREEDY, media=(image(2),)),
        "two": Job(two, GREEDY, media=(image(3), image(4, 3, 2))),
        "video": Job(video, GREEDY, media=(("video", 5, 4 * side, 2 * side),)),
        "text": Job(text(40), GREEDY),
        "late": Job([*one, *text(9)], GREEDY, arrives=9, media=(image(1),)),
        "same images": Job(two, GREEDY, arrives=12, media=(image(3), image(4, 3, 2))),
    }
    if of_gemma:
        del jobs["video"]
    return {
        name: Job(job.prompt, job.sampling | {"max_tokens": 26}, job.arrives, media=job.media)
        for name, job in jobs.items()
    }


def expected_of(model: str) -> dict[str, Outcome]:
    """What stock vLLM gives."""
    with pytest.MonkeyPatch.context() as patch:
        # This process has no interpreter of Triton's, and runs a stock engine's only rank.
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        return stock_answers(model, batch(model.removesuffix("_updated")), **PLAIN, **OF_IMAGES)


def within_an_image(llm: Any) -> bool:
    """Whether a request is computed up to the middle of an image."""
    return any(
        feature.mm_position.offset
        < request.num_computed_tokens
        < feature.mm_position.offset + feature.mm_position.length
        for replica in scheduler_of(llm).replica_set.replicas
        for request in replica.scheduler.requests.values()
        for feature in request.mm_features
    )


def at_every(llm: Any, steps: int, seen: list[bool]) -> Callable[[int], None]:
    """For `run`: switches through every ordered pair of layouts twice, one each so many steps;
    notes whether some image is half computed then."""
    way = 2 * tour(sizes_of(llm))[1:]

    def before_step(step: int) -> None:
        if way and step and step % steps == 0:
            seen.append(within_an_image(llm))
            assert pat_vllm.switch(llm, tp=way.pop(0))

    return before_step


def check_switches(llm: Any, spec: EngineSpec) -> dict[str, Outcome]:
    """Switches between any steps, also within images, change nothing."""
    expected = expected_of(spec.model)
    seen: list[bool] = []
    for steps in (2,) if spec.model_runner_v2 else (2, 3, 5):
        go_home(llm)
        outcomes = run(llm, batch(spec.model), at_every(llm, steps, seen))
        assert_same(outcomes, expected, TOLERANCE)
    assert any(seen) or spec.model.startswith("gemma"), "no switch was within an image"
    return outcomes


def test_text_is_that_without_switches(llm: Any, spec: EngineSpec) -> None:
    """Requests with images migrate, whatever is cheaper."""
    with kv_carried(llm, lambda: "recompute"):
        outcomes = check_switches(llm, spec)
    assert not llm.llm_engine.vllm_config.cache_config.enable_prefix_caching or (
        outcomes["late"].num_cached_tokens
    )


def test_images_are_encoded_again_where_no_kv_moves(
    llm: Any, spec: EngineSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that a hit in the prefix cache had covered, which no worker was sent."""
    monkeypatch.setattr(scheduler_of(llm).controller.costs, "mode", "recompute")
    check_switches(llm, spec)


def test_an_image_seen_before_an_update_is_encoded_again(llm: Any, spec: EngineSpec) -> None:
    """A trainer resets the prefix cache, and may forget those of towers."""
    go_home(llm)
    try:
        for model in (spec.model, f"{spec.model}_updated"):
            load_all(llm, model)
            llm.reset_prefix_cache()
            for _ in range(2):  # the second time from the cache of the tower's
                outcomes = run(llm, batch(spec.model))
                assert_same(outcomes, expected_of(model), PLAIN_TOLERANCE)
                llm.reset_prefix_cache()
    finally:
        load_all(llm, spec.model)
        go_home(llm)
