"""Options: every mistake is a ValueError that names the option, its value and what is allowed."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.config import PATConfig, of_one_engine
from pat_vllm.layout import Layout
from pat_vllm.models.moe_config import MoEConfig
from pat_vllm.predictor.cost import CostModel
from pat_vllm.predictor.state import LiveState
from pat_vllm.scheduler.make_policy import make_policy

MIXTURE = MoEConfig(num_experts=8, intermediate=64)
ALL = "allowed: layouts, base_tp"
FOUR_RANKS = ["4 ranks", "tensor_parallel_size=4", "tp=1, 2, 4;"]


def layouts(options: Any, ranks: int = 4) -> list[str]:
    return [str(layout) for layout in PATConfig.parse(options).resolve_layouts(ranks)]


def experts(options: Any, mixture: MoEConfig | None) -> str | None:
    config = PATConfig.parse(options)
    return config.resolve_experts(mixture, config.resolve_layouts(4))


def static(tp: Any, **more: Any) -> dict[str, Any]:
    return {"policy": {"kind": "static", "tp": tp, **more}}


def schedule(**fields: Any) -> dict[str, Any]:
    return {"policy": {"kind": "schedule", **fields}}


# What a user may get wrong: options, number of ranks, and what the message has.
REFUSED: list[tuple[Any, int, list[str]]] = [
    (7, 4, ['additional_config["pat"]', "a dict", "7", "layouts, base_tp"]),
    ({"layout": [1, 2]}, 4, ["'layout'", "[1, 2]", ALL]),
    ({"base_tp": 0}, 4, ["'base_tp'", "0", "greater than or equal to 1"]),
    ({"layouts": "x"}, 4, ["'layouts'", "'x'", "tuple"]),
    ({"kv_transfer": "move"}, 4, ["'kv_transfer'", "'move'", "'auto', 'migrate' or 'recompute'"]),
    ({"weights": "lazy"}, 4, ["'weights'", "'lazy'", "'auto', 'inplace' or 'materialized'"]),
    ({"experts": "all"}, 4, ["'experts'", "'all'", "'auto', 'tp' or 'ep'"]),
    ({"limits_per": "engine"}, 4, ["'limits_per'", "'engine'", "'rank' or 'replica'"]),
    ({"launcher": "slurm"}, 4, ["'launcher'", "'slurm'", "'auto', 'mp' or 'ray'"]),
    ({"policy": "static"}, 4, ["'policy' has value 'static'", '{"kind": "predictor"}']),
    ({"policy": None}, 4, ["'policy' has value None", "an object with a 'kind'"]),
    ({"policy": {"tp": 2}}, 4, ["'policy'", "'tp': 2", "'kind'"]),
    ({"policy": {"kind": "magic"}}, 4, ["'policy'", "magic", "'static', 'schedule', 'predictor'"]),
    (static(2, at=1), 4, ["'policy.static.at'", "1", "allowed"]),
    (schedule(), 4, ["policy.schedule.switch_at", "required"]),
    (schedule(switch_at={}), 4, ["policy.schedule.switch_at", "{}", "at least 1"]),
    (schedule(switch_at={"0": 2}), 4, ["switch_at", "live requests (>= 1)", "'0'"]),
    (schedule(switch_at={"few": 2}), 4, ["switch_at", "live requests (>= 1)", "'few'"]),
    (
        schedule(switch_at={2: 2}, num_speculative_tokens={2: -1}),
        4,
        ["num_speculative_tokens", "-1", "greater than or equal to 0"],
    ),
    ({"policy": {"kind": "predictor", "length_bound": 0}}, 4, ["length_bound", "0", "equal to 1"]),
    # Neither truth values nor digits are numbers, and nothing is said twice.
    ({"base_tp": True}, 4, ["base_tp", "True", "integer"]),
    ({"layouts": ["2"]}, 4, ["layouts", "'2'", "integer"]),
    ({"policy": {"kind": "predictor", "length_bound": True}}, 4, ["length_bound", "True"]),
    (schedule(switch_at={1: 2, "1": 1}), 4, ["switch_at", "names 1 more than once"]),
    (
        schedule(switch_at={2: 2}, num_speculative_tokens={2: 1, "2": 2}),
        4,
        ["num_speculative_tokens", "names 2 more than once"],
    ),
    ({"policy": {"kind": "predictor", "profile": ""}}, 4, ["profile", "at least 1 character"]),
    ({"state_dir": 1}, 4, ["state_dir", "1", "string"]),
    ({"layouts": [3]}, 4, ["pat.layouts", "tp=3", "tensor_parallel_size=4", "[1, 2, 4]"]),
    ({"layouts": [0]}, 6, ["pat.layouts", "tp=0", "[1, 2, 3, 6]"]),
    ({"layouts": []}, 4, ["pat.layouts", "empty", "at least one"]),
    ({"base_tp": 3}, 4, ["pat.base_tp", "tp=3", "tensor_parallel_size=4", "[1, 2, 4]"]),
    ({"base_tp": 8}, 4, ["pat.base_tp", "tp=8", "[1, 2, 4]"]),
    ({"base_tp": 2, "layouts": [1, 4]}, 4, ["pat.layouts", "tp=1", "pat.base_tp=2", "smallest"]),
    ({"base_tp": 2, "layouts": [3]}, 6, ["pat.layouts", "tp=3", "multiple of pat.base_tp=2"]),
    (static(3), 4, ["pat.policy", "tp=3", *FOUR_RANKS]),
    (static(8), 2, ["pat.policy", "tp=8", "2 ranks", "tensor_parallel_size=2", "tp=1, 2;"]),
    (static(2) | {"layouts": [1, 4]}, 4, ["pat.policy", "tp=2", "tp1dp4, tp4dp1", "pat.layouts"]),
    (schedule(switch_at={2: 3}), 4, ["pat.policy", "tp=3", *FOUR_RANKS]),
    (
        schedule(switch_at={2: 2}, num_speculative_tokens={8: 1}),
        4,
        ["pat.policy", "tp=8", *FOUR_RANKS],
    ),
    *((static(tp), 4, ["policy", "tp of a layout", str(tp)]) for tp in ("wide", "tp2dp2", 0, True)),
]


@pytest.mark.parametrize(("options", "ranks", "words"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused(options: Any, ranks: int, words: list[str]) -> None:
    with pytest.raises(ValueError) as error:
        PATConfig.parse(options).resolve_layouts(ranks)
    assert not [word for word in words if word not in str(error.value)], str(error.value)


LEAVES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20), st.just("x" * 10**6)
)
NAMES = st.sampled_from([*PATConfig.model_fields, "kind", "tp", "switch_at", "1", "y" * 10**6])
VALUES = st.recursive(
    st.one_of(LEAVES, st.sampled_from([10**400, [[[[[]]]]], "predictor", "schedule", "tp2dp2"])),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.one_of(NAMES, LEAVES), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(st.one_of(VALUES, st.dictionaries(NAMES, VALUES, max_size=3)))
@settings(max_examples=150, deadline=None)
def test_whatever_is_given_is_taken_or_refused_in_a_few_words(options: Any) -> None:
    try:
        PATConfig.parse(options).resolve_layouts(4)
    except ValueError as error:
        assert len(str(error)) < 5000


def test_default_layouts_are_the_powers_of_two_and_the_whole_group() -> None:
    assert layouts(None) == ["tp1dp4", "tp2dp2", "tp4dp1"]
    assert layouts({}, 6) == ["tp1dp6", "tp2dp3", "tp6dp1"]
    assert layouts({"base_tp": 2}) == ["tp2dp2", "tp4dp1"]
    assert layouts({"layouts": [4, 1]}) == ["tp1dp4", "tp4dp1"]
    assert layouts({"layouts": [3], "base_tp": 1}, 6) == ["tp1dp6", "tp3dp2"]
    assert layouts({"layouts": "auto", "base_tp": "auto"}) == layouts(None)


def test_named_layouts_have_the_base_layout_that_they_have_in_common() -> None:
    assert layouts({"layouts": [8, 4]}, 8) == ["tp4dp2", "tp8dp1"]
    assert layouts({"layouts": [4, 6]}, 12) == ["tp2dp6", "tp4dp3", "tp6dp2"]
    assert layouts({"layouts": [2, 3], "base_tp": "auto"}, 6) == ["tp1dp6", "tp2dp3", "tp3dp2"]


def test_experts_are_cut_where_they_can_be_or_as_asked_for() -> None:
    assert experts({}, MIXTURE) == experts({"experts": "tp"}, MIXTURE) == "tp"
    assert experts({"experts": "ep", "layouts": [1, 4]}, MIXTURE) == "ep"
    assert experts({}, MoEConfig(num_experts=8, intermediate=6)) == "ep"
    assert experts({}, None) is None
    with pytest.raises(ValueError, match=r"pat.experts is 'ep', but .* no experts; .* 'auto'"):
        experts({"experts": "ep"}, None)


def test_an_engine_starts_in_its_base_layout_or_where_it_stays() -> None:
    def home(options: dict[str, Any]) -> str:
        config = PATConfig.parse(options)
        return str(config.default_layout(config.resolve_layouts(4)))

    assert home({}) == home(schedule(switch_at={4: 4})) == "tp1dp4"
    assert (
        home({"base_tp": 2, "policy": {"kind": "static"}})
        == home({"base_tp": 2})
        == home(static(2))
        == "tp2dp2"
    )


# ---------------------------------------------------------------- what the policies do


def unused(*_: Any) -> Any:
    raise AssertionError("only a predicting policy asks for this")


def state(tp: int, live: int, quiet: float = 1.0) -> LiveState:
    return LiveState(0.0, Layout.of(tp, 4), live, quiet, requests=unused)


def policy_of(options: dict[str, Any]) -> Any:
    config = PATConfig.parse(options)
    ready = config.resolve_layouts(4)
    return make_policy(config, ready, profile=unused, costs=CostModel(), bound=512)


def test_schedule_policy_follows_its_table_both_ways() -> None:
    policy = policy_of(schedule(switch_at={"8": 2, "2": 4}))
    assert str(policy.default_layout) == "tp1dp4"
    chosen = [policy.choose(state(1, live)).tp for live in (100, 9, 8, 3, 2, 1)]
    assert chosen == [1, 1, 2, 2, 4, 4]
    assert policy.choose(state(4, 50)).tp == 1


def test_the_largest_batch_of_a_layout_is_where_the_schedule_enters_it() -> None:
    config = PATConfig.parse(schedule(switch_at={64: 1, 8: 2, 4: 2, 2: 4}))
    limits = [config.largest_batch(layout) for layout in config.resolve_layouts(4)]
    assert limits == [None, 8, 2], "none for the base layout"


def test_schedule_policy_waits_for_the_batch_to_be_complete() -> None:
    policy = policy_of(schedule(switch_at={"8": 4}))
    assert policy.choose(state(1, 1, quiet=0.001)).tp == 1
    assert policy.choose(state(4, 100, quiet=0.001)).tp == 4
    assert policy.choose(state(1, 1, quiet=0.2)).tp == 4


def test_static_policy_stays_at_its_layout() -> None:
    policy = policy_of(static(2))
    assert policy.default_layout.tp == 2
    assert policy.choose(state(2, 1)).tp == 2
    assert policy.choose(state(4, 1)).tp == 4, "a forced switch holds until the engine is idle"


def test_each_of_several_engines_has_a_directory_of_its_own() -> None:
    options = {"policy": {"kind": "predictor", "profile": "p.json"}, "state_dir": "/kept"}
    before = copy.deepcopy(options)
    assert of_one_engine(options, 12) == {**before, "state_dir": "/kept/engine-12"}
    assert options == before
    for none in ({}, {"state_dir": None}):
        assert of_one_engine(none, 1) == none
