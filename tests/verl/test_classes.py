"""Models with sliding windows, latent and linear attention, text and images of vision-language
classes, under verl's server and weight push. More of them are nightly."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

pytest.importorskip("verl")

from tests.support.models import random_model
from tests.support.vision import PLACE, data_of
from tests.verl.models import few_tokens
from tests.verl.reference import CLOSE, Reference
from tests.verl.servers import Pictured, Response, server
from tests.verl.test_server import PROMPTS, in_layout, regrouped

_VLLM = "engine_kwargs.vllm"
IN_PLACE = ("engine_kwargs.vllm.additional_config.pat.weights=inplace",)
"""Copies of experts cannot be updated on CPU, where vLLM packs them."""


@pytest.mark.parametrize(("arch", "close"), [("gemma3_text", CLOSE), ("deepseek_v3", 1e-3)])
def test_weights_pushed_between_regroups(arch: str, close: float) -> None:
    check_pushes(arch, close)


@pytest.mark.parametrize(("name", "close"), [("qwen3_5_vl", 1e-3)])
def test_text_of_a_vision_language_class(name: str, close: float) -> None:
    check_text(name, close)


def test_images() -> None:
    check_images("qwen2_5_vl", 28, 1e-3)


def check_pushes(arch: str, close: float) -> None:
    """New weights come in either layout, and reach both. Responses are longer than the windows.

    Args:
        close: how close log-probabilities are to those of transformers.
    """
    in_place = () if arch == "gemma3_text" else IN_PLACE
    with server(few_tokens(arch, 0), *in_place) as pat:
        for step, tp in enumerate((1, 2, 1)):
            assert pat.call("pat_switch", tp)
            model = few_tokens(arch, step % 2)
            if step:
                pat.do(pat.push(model, step))
            expected = Reference(model)
            for layout in (1, 2):
                expected.check(in_layout(pat, layout), PROMPTS, close)
            expected.check(regrouped(pat), PROMPTS, close)


def check_text(name: str, close: float) -> None:
    """Weights come with the names that transformers gives them, in either layout."""
    models = [random_model(name), random_model(f"{name}_updated")]
    options = ("engine_kwargs.vllm.language_model_only=true", *IN_PLACE)
    with server(models[0], *options) as pat:
        for step, model in enumerate(models):
            if step:
                pat.do(pat.push(model, step))
            expected = Reference(model, known=512, images=True)
            for layout in (1, 2):
                expected.check(in_layout(pat, layout), PROMPTS, close)
            expected.check(regrouped(pat), PROMPTS, close)


def check_images(name: str, side: int, close: float) -> None:
    """Weights of tower and text come in either layout, the first ones to an engine with none. A
    second turn sends its images again.

    Args:
        side: pixels of a token's side.
    """
    models = [random_model(name), random_model(f"{name}_updated")]
    options = (f"{_VLLM}.mm_processor_cache_gb=0", "limit_images=2", *IN_PLACE)
    with server(models[0], *options, load_format="dummy") as pat:
        for step, model in enumerate(models):
            pat.do(pat.push(model, step))
            expected = Reference(model, known=512, images=True)
            for layout in (1, 2):
                prompts = pictured(side)
                for turn in range(2):
                    responses = in_layout(pat, layout, prompts)
                    expected.check(responses, prompts, close)
                    if not turn:
                        prompts = second_turn(prompts, responses, side)
            expected.check(regrouped(pat, prompts=prompts), prompts, close)


def pictured(side: int) -> list[Pictured]:
    """Prompts with an image each; the first two differ by it alone."""
    sizes = ((4, 3), (4, 3), (8, 8), (2, 5))
    return [
        Pictured([5, 6, *places, 7, 8 + index // 2], images)
        for index, size in enumerate(sizes)
        for places, images in [picture(index, *size, side)]
    ]


def second_turn(
    prompts: Sequence[Pictured], responses: Sequence[Response], side: int
) -> list[Pictured]:
    """What follows the responses: another image."""
    places, images = picture(9, 3, 3, side)
    return [
        Pictured([*prompt, *response.token_ids, *places, 9], prompt.images + images)
        for prompt, response in zip(prompts, responses, strict=True)
    ]


def picture(seed: int, columns: int, rows: int, side: int) -> tuple[list[int], list[Any]]:
    """An image of so many tokens, and their places in a prompt."""
    begin, pad, end = PLACE["image"]
    images = data_of([("image", seed, columns * side, rows * side)])["image"]
    return [begin, *[pad] * (columns * rows), end], images
