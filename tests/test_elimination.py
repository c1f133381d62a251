"""Backward elimination: what is dropped, in which order, and what stays."""

import pytest

from benchmarks import elimination
from benchmarks.elimination import Elimination, Scenario, seconds
from pat_vllm.layout import Layout

RIGHT = [
    Scenario("8 x H100", workload, seed) for workload in ("uniform", "GRPO") for seed in (0, 1)
]
WRONG = [Scenario("8 x H100", "uniform", 0, (Layout(1, 8), 2.0))]


def path(monkeypatch, lost, parts):
    """The path where `lost(scenario, without)` is what is lost."""
    monkeypatch.setattr(elimination, "PARTS", dict.fromkeys(parts))
    monkeypatch.setattr(elimination, "seconds", lambda s, without: 100 * (1 + lost(s, without)))
    found = Elimination([*RIGHT, *WRONG]).path(lambda text: None)
    return [(part, dropped) for part, dropped, _ in found]


def test_what_costs_least_goes_first_and_what_costs_too_much_stays(monkeypatch):
    cost = {"idle": -0.001, "cheap": 0.004, "dear": 0.02}
    found = path(monkeypatch, lambda s, without: sum(cost[one] for one in without), cost)
    assert found == [("", True), ("idle", True), ("cheap", True), ("dear", False)]


def test_parts_that_stand_in_for_each_other_do_not_both_go(monkeypatch):
    found = path(monkeypatch, lambda s, without: 0.05 * (len(without) == 2), ("one", "two"))
    assert found == [("", True), ("one", True), ("two", False)]


def test_one_workload_or_a_wrong_profile_is_enough_to_stay(monkeypatch):
    def lost(s, without):
        one = 0.03 * ("one" in without and s.workload == "GRPO")
        return one + 0.06 * ("other" in without and s.wrong is not None)

    assert path(monkeypatch, lost, ("one", "other"))[1:] == [("other", False), ("one", False)]


@pytest.mark.parametrize("workload", ["shift", "staggered"])
def test_a_scenario_is_replayed_alike(workload):
    one = Scenario("pat_vllm/simulator/modelled/measured.json", workload, 0)
    whole = seconds(one, frozenset())
    assert whole == seconds(one, frozenset())
    everything = frozenset(elimination.PARTS)
    assert seconds(one, everything) == pytest.approx(whole, rel=0.5)
    assert whole == seconds(one, frozenset())
