"""Models with sliding windows, latent and linear attention, and text of a vision-language class,
under verl's server and weight push. More of them are nightly."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

from tests.support.models import random_model
from tests.verl.models import few_tokens
from tests.verl.reference import CLOSE, Reference
from tests.verl.servers import server
from tests.verl.test_server import PROMPTS, in_layout, regrouped

IN_PLACE = ("engine_kwargs.vllm.additional_config.pat.weights=inplace",)
"""Copies of experts cannot be updated on CPU, where vLLM packs them."""


@pytest.mark.parametrize(("arch", "close"), [("gemma3_text", CLOSE), ("deepseek_v3", 1e-3)])
def test_weights_pushed_between_regroups(arch: str, close: float) -> None:
    check_pushes(arch, close)


@pytest.mark.parametrize(("name", "close"), [("qwen3_5_vl", 1e-3)])
def test_text_of_a_vision_language_class(name: str, close: float) -> None:
    check_text(name, close)


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
