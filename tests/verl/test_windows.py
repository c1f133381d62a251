"""Models with sliding windows under verl's server and weight push."""

from __future__ import annotations

import pytest

pytest.importorskip("verl")

from tests.verl.models import few_tokens
from tests.verl.reference import CLOSE, Reference
from tests.verl.servers import server
from tests.verl.test_server import PROMPTS, in_layout, regrouped

IN_PLACE = {"gpt_oss": ("engine_kwargs.vllm.additional_config.pat.weights=inplace",)}
"""Copies of experts cannot be updated on CPU, where vLLM packs them."""


@pytest.mark.parametrize(("arch", "close"), [("gemma3_text", CLOSE), ("gpt_oss", 1e-3)])
def test_weights_pushed_between_regroups(arch: str, close: float) -> None:
    """Responses are longer than the windows. New weights come in either layout, and reach both."""
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
