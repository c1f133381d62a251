"""Options: every mistake is a ValueError that names the option, its value and what is allowed."""

import pytest

from pat_vllm.config import PATConfig
from pat_vllm.layout import Layout
from pat_vllm.mixture import Mixture
from pat_vllm.predictor.cost import CostModel
from pat_vllm.predictor.state import LiveState
from pat_vllm.scheduler.make_policy import make_policy


def layouts(options, world_size=4):
    return [str(layout) for layout in PATConfig.parse(options).resolve_layouts(world_size)]


def test_default_layouts_are_the_powers_of_two_and_the_whole_group():
    assert layouts(None) == ["tp1dp4", "tp2dp2", "tp4dp1"]
    assert layouts({}, 6) == ["tp1dp6", "tp2dp3", "tp6dp1"]
    assert layouts({"base_tp": 2}) == ["tp2dp2", "tp4dp1"]
    assert layouts({"layouts": [4, 1]}) == ["tp1dp4", "tp4dp1"]
    assert layouts({"layouts": [3]}, 6) == ["tp1dp6", "tp3dp2"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([1], "must be a dict of options"),
        ({"layout": [1]}, "unknown option 'layout' .*allowed: layouts, base_tp"),
        ({"base_tp": 0}, "'base_tp' has value 0"),
        ({"layouts": "x"}, "'layouts' has value 'x'"),
        ({"kv_transfer": "teleport"}, "'kv_transfer' has value 'teleport'.*migrate"),
        ({"weights": "lazy"}, "'weights' has value 'lazy'"),
        ({"policy": {"kind": "magic"}}, "policy.*magic.*static"),
        ({"policy": {"tp": 2}}, "policy"),
        ({"policy": {"kind": "static"}}, "policy.static.tp"),
        ({"policy": {"kind": "static", "tp": 2, "x": 1}}, "unknown option 'policy.static.x'"),
        ({"policy": {"kind": "schedule", "switch_at": {}}}, "switch_at"),
        ({"policy": {"kind": "schedule", "switch_at": {"0": 2}}}, "live requests"),
        ({"policy": {"kind": "schedule", "switch_at": {"a": 2}}}, "switch_at"),
    ],
)
def test_malformed_options(options, message):
    with pytest.raises(ValueError, match=f'(?s)additional_config\\["pat"\\].*{message}'):
        PATConfig.parse(options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layouts": [3]}, "pat.layouts names tp=3, which does not divide.*=4.*1, 2, 4"),
        ({"layouts": [0]}, "pat.layouts names tp=0"),
        ({"layouts": []}, "pat.layouts is empty"),
        ({"base_tp": 3}, "pat.base_tp names tp=3"),
        ({"base_tp": 8}, "pat.base_tp names tp=8"),
        ({"base_tp": 2, "layouts": [1, 4]}, "tp=1, smaller than pat.base_tp=2"),
        ({"policy": {"kind": "static", "tp": 3}}, "pat.policy names tp=3"),
        ({"layouts": [4], "policy": {"kind": "static", "tp": 2}}, "pat.policy names tp=2"),
    ],
)
def test_options_that_do_not_fit_the_engine(options, message):
    with pytest.raises(ValueError, match=message):
        PATConfig.parse(options).resolve_layouts(4)


MIXTURE = Mixture(num_experts=8, intermediate=64)


def test_experts_cut_spread_or_either():
    def of(**options):
        config = PATConfig.parse(options)
        config.check_layouts(4)
        return [str(layout) for layout in config.resolve_layouts(4, MIXTURE)]

    assert of() == ["tp1dp4", "tp2dp2", "tp2dp2ep", "tp4dp1", "tp4dp1ep"]
    assert of(experts="ep", layouts=[4]) == ["tp1dp4", "tp4dp1ep"]
    assert of(experts="tp") == of(base_tp=1, experts="tp") == ["tp1dp4", "tp2dp2", "tp4dp1"]
    assert of(policy={"kind": "static", "tp": "tp4dp1ep"}) == of()
    with pytest.raises(ValueError, match="tp4dp1ep, which is not among the layouts tp1dp4, tp2dp2"):
        of(experts="tp", policy={"kind": "static", "tp": "tp4dp1ep"})
    with pytest.raises(ValueError, match=r"pat.experts is 'ep', but the model has no experts"):
        PATConfig.parse({"experts": "ep"}).resolve_layouts(4)


@pytest.mark.parametrize("name", ["tp4dp2", "tp1dp4ep", "tp3dp1", "wide", 3, 0])
def test_names_of_no_layout(name):
    with pytest.raises(ValueError, match=str(name)):
        PATConfig.parse({"policy": {"kind": "static", "tp": name}}).check_layouts(4)


def test_a_number_stands_for_cut_experts():
    layouts = PATConfig.parse({}).resolve_layouts(4, MIXTURE)
    assert [str(Layout.find(tp, layouts)) for tp in (1, 2, 4)] == ["tp1dp4", "tp2dp2", "tp4dp1"]
    spread = PATConfig.parse({"experts": "ep"}).resolve_layouts(4, MIXTURE)
    assert [str(Layout.find(tp, spread)) for tp in (1, 2, 4)] == ["tp1dp4", "tp2dp2ep", "tp4dp1ep"]
    schedule = {"kind": "schedule", "switch_at": {8: "tp2dp2ep", 2: 4}}
    config = PATConfig.parse({"policy": schedule})
    policy = make_policy(config, layouts, profile=unused, costs=CostModel(), bound=512)
    chosen = [str(policy.choose(state(1, live))) for live in (9, 8, 3, 2)]
    assert chosen == ["tp1dp4", "tp2dp2ep", "tp2dp2ep", "tp4dp1"]
    assert config.largest_batch(layouts[2]) == config.largest_batch(layouts[1]) == 8


def test_layouts_are_multiples_of_the_base_layout():
    with pytest.raises(ValueError, match=r"tp=3, .* no multiple of pat\.base_tp=2"):
        PATConfig.parse({"base_tp": 2, "layouts": [3]}).resolve_layouts(6)


def state(layout, live, quiet=1.0):
    return LiveState(0.0, Layout.of(layout, 4), live, quiet, requests=unused)


def unused(*_):
    raise AssertionError("only a predicting policy asks for this")


def policy_of(options):
    config = PATConfig.parse({"policy": options})
    return make_policy(
        config, config.resolve_layouts(4), profile=unused, costs=CostModel(), bound=512
    )


def test_schedule_policy_follows_its_table_both_ways():
    policy = policy_of({"kind": "schedule", "switch_at": {"8": 2, "2": 4}})
    assert str(policy.home) == "tp1dp4"
    chosen = [policy.choose(state(1, live)).tp for live in (100, 9, 8, 3, 2, 1)]
    assert chosen == [1, 1, 2, 2, 4, 4]
    assert policy.choose(state(4, 50)).tp == 1


def test_schedule_policy_waits_for_the_batch_to_be_complete():
    policy = policy_of({"kind": "schedule", "switch_at": {"8": 4}})
    assert policy.choose(state(1, 1, quiet=0.001)).tp == 1
    assert policy.choose(state(4, 100, quiet=0.001)).tp == 4
    assert policy.choose(state(1, 1, quiet=0.2)).tp == 4


def test_static_policy_stays_at_its_layout():
    policy = policy_of({"kind": "static", "tp": 2})
    assert policy.home.tp == 2
    assert policy.choose(state(2, 1)).tp == 2
    assert policy.choose(state(4, 1)).tp == 4, "a forced switch holds until the engine is idle"
