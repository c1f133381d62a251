"""New weights of a mixture of experts reach every layout, of both kinds, however they arrive."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pat_vllm
from tests.engines import Outcome, engine, run
from tests.models import random_model
from tests.test_switch import PLAIN_TOLERANCE
from tests.test_weight_updates import (
    PLAIN,
    UPDATES,
    assert_same,
    batch,
    check_any_order,
    update,
)

pytestmark = pytest.mark.slow

OLD, NEW = "qwen3_moe", "qwen3_moe_updated"


@pytest.fixture(scope="module")
def expected() -> dict[str, dict[str, Outcome]]:
    """What stock vLLM generates with each of the weights."""
    outcomes = {}
    for model in (OLD, NEW):
        with engine(model, 1, None, **PLAIN) as llm:
            outcomes[model] = run(llm, batch())
    assert outcomes[OLD] != outcomes[NEW]
    return outcomes


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    with engine(OLD, 2, {"weights": "inplace"}, **PLAIN) as llm:
        yield llm


def load_fused(llm: Any, model: str) -> None:
    """The experts of a layer as one tensor each of gate and up, and of down."""
    from safetensors.torch import load_file

    whole = load_file(random_model(model) / "model.safetensors")
    fused: dict[str, torch.Tensor] = {}
    experts = 1 + max(int(n.split(".experts.")[1].split(".")[0]) for n in whole if ".experts." in n)
    for name, weight in whole.items():
        layer, found, rest = name.partition(".experts.")
        if not found:
            fused[name] = weight
        elif rest.startswith("0."):

            def part(kind: str, layer: str = layer) -> torch.Tensor:
                names = [f"{layer}.experts.{i}.{kind}_proj.weight" for i in range(experts)]
                return torch.stack([whole[name] for name in names])

            fused[f"{layer}.experts.gate_up_proj"] = torch.cat([part("gate"), part("up")], dim=1)
            fused[f"{layer}.experts.down_proj"] = part("down")
    assert len(fused) < len(whole)
    for name, weight in fused.items():
        llm.collective_rpc("load_one", args=(name, weight))


def layouts(llm: Any) -> list[str]:
    return [str(layout) for layout in pat_vllm.report(llm).layouts]


@pytest.mark.parametrize("how", [*UPDATES, load_fused])
def test_an_update_reaches_both_kinds(llm: Any, expected: Any, how: Any) -> None:
    """It arrives in a layout that is not the base layout, and is used in all."""
    for model, at in ((NEW, "tp2dp1ep"), (OLD, "tp2dp1")):
        assert pat_vllm.switch(llm, tp=at)
        update(llm, model, how)
        assert str(pat_vllm.report(llm).layout) == at
        for name in (at, *layouts(llm)):

            def before_step(step: int, name: str = name) -> None:
                if step == 0:
                    assert pat_vllm.switch(llm, tp=name)

            assert_same(
                run(llm, batch(), before_step=before_step), expected[model], PLAIN_TOLERANCE
            )


def test_updates_sleep_and_switches_in_any_order(llm: Any, expected: Any) -> None:
    names = layouts(llm)
    assert names == ["tp1dp2", "tp2dp1", "tp2dp1ep"]
    updates = (*UPDATES, load_fused)
    check_any_order(llm, expected, (OLD, NEW), names, updates, PLAIN_TOLERANCE)
