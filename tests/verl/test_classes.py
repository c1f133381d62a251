"""Models with sliding windows, latent and linear attention, and text of a vision-language class,
under verl's server and weight push."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

from tests.support.models import random_model
from tests.support.vision import torchvision_stub
from tests.verl.models import few_tokens
from tests.verl.reference import CLOSE, Reference
from tests.verl.servers import server
from tests.verl.test_server import PROMPTS, in_layout, regrouped

_IN_PLACE = ("engine_kwargs.vllm.additional_config.pat.weights=inplace",)
IN_PLACE = dict.fromkeys(("gpt_oss", "deepseek_v3", "qwen3_next", "qwen3_5_vl"), _IN_PLACE)
"""Copies of experts cannot be updated on CPU, where vLLM packs them."""
CLASSES = {
    "gemma3_text": CLOSE,
    "gpt_oss": 1e-3,
    "deepseek_v3": 1e-3,
    "qwen3_next": 2e-4,
    "nemotron_h": 2e-4,
}
"""How close log-probabilities are. Of linear attention, measured: 4e-5."""
TEXTS = {"qwen2_5_vl": 1e-3, "qwen3_5_vl": 1e-3}
"""The same of vision-language classes. Of the first, stock vLLM's 3,840 tokens: one in 1,000 is off
by 1.8e-4, the worst by 3.1e-4."""


@pytest.mark.parametrize("arch", CLASSES)
def test_weights_pushed_between_regroups(arch: str) -> None:
    """New weights come in either layout, and reach both. Responses are longer than the windows."""
    close = CLASSES[arch]
    with server(few_tokens(arch, 0), *IN_PLACE.get(arch, ())) as pat:
        for step, tp in enumerate((1, 2, 1)):
            assert pat.call("pat_switch", tp)
            model = few_tokens(arch, step % 2)
            if step:
                pat.do(pat.push(model, step))
            expected = Reference(model)
            for layout in (1, 2):
                expected.check(in_layout(pat, layout), PROMPTS, close)
            expected.check(regrouped(pat), PROMPTS, close)


@pytest.mark.parametrize("name", TEXTS)
def test_text_of_a_vision_language_class(name: str) -> None:
    """Weights come with the names that transformers gives them, in either layout."""
    models = [random_model(name), random_model(f"{name}_updated")]
    options = ("engine_kwargs.vllm.language_model_only=true", *IN_PLACE.get(name, ()))
    with torchvision_stub(), server(models[0], *options) as pat:
        for step, model in enumerate(models):
            if step:
                pat.do(pat.push(model, step))
            expected = Reference(model, known=512, images=True)
            for layout in (1, 2):
                expected.check(in_layout(pat, layout), PROMPTS, TEXTS[name])
            expected.check(regrouped(pat), PROMPTS, TEXTS[name])
