"""New weights of a mixture of experts reach every layout, of both kinds, however they arrive."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pat_vllm
from tests.engines import Outcome, engine, run
from tests.models import random_model
from tests.test_switch import PLAIN_TOLERANCE
from tests.test_weight_updates import PLAIN, UPDATES, batch, load_all, update

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


def assert_same(outcomes: dict[str, Outcome], expected: dict[str, Outcome]) -> None:
    assert outcomes.keys() == expected.keys()
    for name, outcome in outcomes.items():
        assert outcome.token_ids == expected[name].token_ids, name
        assert outcome.logprobs == pytest.approx(expected[name].logprobs, abs=PLAIN_TOLERANCE)


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

            assert_same(run(llm, batch(), before_step=before_step), expected[model])


def test_updates_sleep_and_switches_in_any_order(llm: Any, expected: Any) -> None:
    rng = random.Random(3)
    model = OLD
    update(llm, model)
    names = layouts(llm)
    assert names == ["tp1dp2", "tp2dp1", "tp2dp1ep"]
    for _ in range(10):
        for _ in range(rng.randint(0, 4)):
            match rng.choice(("switch", "switch", "update", "update", "doze", "sleep")):
                case "switch":
                    pat_vllm.switch(llm, tp=rng.choice(names))
                case "update":
                    model = rng.choice((OLD, NEW))
                    update(llm, model, rng.choice((*UPDATES, load_fused)))
                case "doze":
                    llm.sleep(level=1)
                    llm.wake_up()
                case "sleep":
                    model = rng.choice((OLD, NEW))
                    llm.sleep(level=2)
                    llm.collective_rpc("lose_weights")
                    llm.wake_up(["weights"])
                    load_all(llm, model)
                    llm.wake_up(["kv_cache"])

        def before_step(step: int) -> None:
            if rng.random() < 0.2:
                assert pat_vllm.switch(llm, tp=rng.choice(names))

        assert_same(run(llm, batch(), before_step=before_step), expected[model])
    update(llm, OLD)
