"""Images of requests, as the schedulers see them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core.sched import scheduler as vllm_scheduler
from vllm.v1.core.sched.output import SchedulerOutput

from pat_vllm.patches.schedulers import multimodal_budgets_from
from pat_vllm.scheduler.images import Budgets, encoder_inputs_to_send, has_images
from pat_vllm.scheduler.replica import is_empty_step
from pat_vllm.scheduler.replica_set import ReplicaSet
from pat_vllm.scheduler.requests import prompt_key


def image(identifier: str, offset: int = 4, data: Any = "pixels") -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(data, "image", identifier, PlaceholderRange(offset, 6))


def request(*images: MultiModalFeatureSpec, preemptions: int = 0) -> Any:
    return SimpleNamespace(
        prompt_token_ids=[*range(20)],
        prompt_embeds=None,
        mm_features=list(images),
        num_preemptions=preemptions,
    )


def test_prompts_are_told_apart_by_their_images() -> None:
    keys = {prompt_key(request(*images)) for images in ((), (image("a"),), (image("b"),))}
    assert len(keys) == 3
    assert prompt_key(request(image("a"))) == prompt_key(request(image("a")))


def test_a_number_of_a_request_is_no_name_of_an_image() -> None:
    """Without caches vLLM names images so, and samples of one prompt would not be known as such."""
    of_requests = [request(image(f"renderer-1-mm-{i}-image-0")) for i in (7, 8)]
    assert prompt_key(of_requests[0]) == prompt_key(of_requests[1]) == prompt_key(request())


def test_the_part_that_is_computed_has_an_image() -> None:
    assert not has_images(request(image("a")), 4)
    assert has_images(request(image("a")), 5)


def test_runners_get_what_they_lack() -> None:
    """V1's have what came with a request. After a switch or a preemption they may have nothing."""
    requests = {
        "new": request(image("a")),
        "back": request(image("a"), image("b", 12), preemptions=1),
        "by name": request(image("c", data=None), preemptions=1),
    }
    step = SchedulerOutput.make_empty()
    assert encoder_inputs_to_send(step, requests) is None
    step.scheduled_encoder_inputs = {"new": [0], "back": [1], "by name": [0]}
    assert encoder_inputs_to_send(step, requests) == {"back": {1: "pixels"}, "by name": {}}
    step.scheduled_encoder_inputs = {"new": [0]}
    assert encoder_inputs_to_send(step, requests) is None


def test_workers_hear_what_is_evicted() -> None:
    step = SchedulerOutput.make_empty()
    assert is_empty_step(step)
    step.free_encoder_mm_hashes = ["a"]
    assert not is_empty_step(step)


def test_new_weights_end_what_was_encoded() -> None:
    """In the schedulers and the runners; text alone has none, and nobody is called."""
    replica = SimpleNamespace(scheduler=Mock())
    of: Any = SimpleNamespace(
        _takes_images=True,
        _encoded_with=0,
        executor=Mock(weights_version=1),
        replicas=[replica],
    )
    of.reset_encoder_cache = lambda: ReplicaSet.reset_encoder_cache(of)
    for _ in range(2):
        ReplicaSet._forget_stale_images(of)
        replica.scheduler.reset_encoder_cache.assert_called_once_with()
        of.executor.reset_encoder_cache.assert_called_once_with()
    of._takes_images, of.executor.weights_version = False, 2
    ReplicaSet._forget_stale_images(of)
    of.executor.reset_encoder_cache.assert_called_once_with()


def test_a_layout_has_one_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []

    class Budget:
        def __init__(self, *args: Any, **options: Any) -> None:
            made.append(args[0])

    monkeypatch.setattr("vllm.multimodal.encoder_budget.MultiModalBudget", Budget)
    configs: list[Any] = [SimpleNamespace(), SimpleNamespace()]
    kept, registry = Budgets(), SimpleNamespace()
    for config in (*configs, *configs):
        with multimodal_budgets_from(kept.take):
            vllm_scheduler.MultiModalBudget(config, registry)  # type: ignore[arg-type]
    assert made == configs
