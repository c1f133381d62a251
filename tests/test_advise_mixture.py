"""`pat-vllm advise` for mixtures of experts: what its sides are, and what it says to paste."""

from __future__ import annotations

import ast
from dataclasses import replace

import pytest

from pat_vllm.advice.settings import pat_options, settings
from pat_vllm.advice.sides import Side, Task
from pat_vllm.advice.verdict import Advice, Gain
from pat_vllm.cli.advise import Question, answer
from pat_vllm.layout import Layout

SMALL = Question(
    "qwen3-30b-a3b", "H200", 4, responses=64, max_tokens=512, shape="log-normal", iterations=2
)


@pytest.fixture(scope="module")
def mixture() -> Advice:
    return answer(SMALL)


def test_static_engines_have_both_kinds_and_their_own_memory(mixture: Advice) -> None:
    rollouts = mixture.rollouts
    names = [str(layout) for layout in rollouts.static.layouts]
    assert names == ["tp1dp4", "tp2dp2", "tp2dp2ep", "tp4dp1", "tp4dp1ep"]
    assert not rollouts.static.key.get("in_place") and rollouts.profile.key["in_place"]
    assert rollouts.profile.kv_tokens[4] < rollouts.static.kv_tokens[4]
    assert {*rollouts.profile.layouts} <= {*rollouts.static.layouts}
    for layout in rollouts.static.layouts:
        assert mixture.sides.static.result.seconds <= sum(
            run.seconds
            for chain in range(len(rollouts.chains))
            for run in rollouts.replay(Task(Side(layout), chain))
        )


def test_the_base_layout_is_the_one_with_which_pat_is_fastest() -> None:
    """On 80 GB all experts leave a tenth of the memory to KV, which a full batch does not fit."""
    of = {"gpu": "H100", "max_tokens": 8192, "shape": "uniform"}
    many, few = (replace(SMALL, responses=n, **of).rollouts() for n in (256, 8))  # type: ignore[arg-type]
    assert many.profile.layouts[0].tp > 1 == few.profile.layouts[0].tp


def test_settings_name_base_and_kind(mixture: Advice) -> None:
    profile = mixture.rollouts.profile

    def options(*names: str) -> dict[str, object]:
        layouts = tuple(Layout.parse(name) for name in names)
        steps = tuple(one for one in profile.steps if one.layout in layouts)
        engine = mixture.rollouts.static.model_copy(update={"layouts": layouts, "steps": steps})
        rollouts = replace(mixture.rollouts, profile=engine)
        found = pat_options(replace(mixture, rollouts=rollouts))
        return {name: value for name, value in found.items() if name != "policy"}

    assert options("tp1dp4", "tp2dp2", "tp2dp2ep", "tp4dp1", "tp4dp1ep") == {}
    assert options("tp1dp4", "tp2dp2", "tp4dp1") == {"experts": "tp"}
    assert options("tp1dp4", "tp2dp2ep", "tp4dp1ep") == {"experts": "ep"}
    assert options("tp2dp2", "tp4dp1") == {"base_tp": 2}
    assert options("tp2dp2ep", "tp4dp1ep") == {"base_tp": 2, "experts": "ep"}


@pytest.mark.parametrize("name", ["tp2dp2", "tp2dp2ep", "tp4dp1ep"])
def test_static_settings_keep_experts_where_they_were_simulated(mixture: Advice, name: str) -> None:
    layout = Layout.parse(name)
    side = replace(mixture.sides.static, side=Side(layout))
    told = replace(
        mixture, sides=replace(mixture.sides, static=side), gain=Gain(0.0, 0.0, 0.0, 0.0, 0.0)
    )
    forms = settings(told, "MODEL", 256)
    call = ast.parse(forms["LLM"]).body[0].value  # type: ignore[attr-defined]
    given = {one.arg: ast.literal_eval(one.value) for one in call.keywords}
    spread = layout.experts == "ep"
    assert given.get("enable_expert_parallel", False) == spread
    assert ("--enable-expert-parallel" in forms["vllm serve"]) == spread
    assert (f"expert_parallel_size={layout.tp}" in forms["VeRL"]) == spread
    # vLLM would cut or spread experts over data-parallel ranks, too.
    assert "data-parallel" not in forms["vllm serve"]
    assert forms["vllm serve"].startswith("# 2 engines" if layout.replicas == 2 else "vllm")


def test_the_benchmark_says_what_is_modelled_and_what_others_published() -> None:
    from benchmarks.mixture import Setting, run_setting, text

    setting = Setting("H200", 0.0, prompts=4, max_tokens=128)
    sides = run_setting(setting, seeds=1)
    assert [one.name for one in sides].count("static") == 7
    ours = [(one.name, one.layout[:3]) for one in sides if one.name != "static"]
    assert ours[:3] == [("cut", "tp1"), ("spread", "tp1"), ("both", "tp1")]
    assert {base for _, base in ours} == {"tp1", "tp2", "tp4"} and len(ours) == 7
    found = text([(setting, sides)], 1)
    assert "MODELLED" in found and "nothing measured" in found and "8 x H200 | grpo | 0" in found
    assert "Published by others" in found
