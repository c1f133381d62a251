"""The clairvoyant against simple schedules, and the policy of arXiv 2605.23945."""

from __future__ import annotations

import itertools
import statistics
from random import Random

from benchmarks.paper.clairvoyant import clairvoyant
from benchmarks.paper.policy import PaperPolicy
from pat_vllm.layout import Layout
from pat_vllm.predictor.policy import StayPolicy
from pat_vllm.profiling.profile import StepShape
from pat_vllm.simulator.replay import simulate, simulate_batches
from pat_vllm.simulator.truth import FixedSwitches
from tests.unit.simulator.simple import FREE, LAYOUTS, Linear, batch, follow


def test_clairvoyant_is_hardly_worse_than_simple_schedules() -> None:
    """It takes requests for evenly spread, which a few long ones are not always."""
    ratios = []
    for seed in range(3):
        random = Random(seed)
        trace = batch(*(min(400, round(random.lognormvariate(4, 1.2)) + 1) for _ in range(24)))
        truth = Linear(0.6, 0.5)
        best = min(
            simulate(trace, follow(low, (ended, high)), truth, FREE).seconds
            for low, high in itertools.combinations(LAYOUTS, 2)
            for ended in range(1, len(trace))
        )
        ratios.append(clairvoyant(trace, LAYOUTS, truth, FREE).seconds / best)
    assert statistics.mean(ratios) < 1.03, ratios


def test_clairvoyant_switches_where_it_pays() -> None:
    trace = batch(10, 20, 40, 60, 80, 100, 200, 400, 800, 900)
    truth = Linear(0.6, 0.5)
    best = clairvoyant(trace, LAYOUTS, truth, FREE)
    static = [simulate(trace, StayPolicy(layout), truth, FREE).seconds for layout in LAYOUTS]
    assert best.switches_on_the_way and best.seconds < min(static)
    assert not clairvoyant(trace, LAYOUTS, Linear(0.6, 1e6), FREE).switches_on_the_way


def step(layout: Layout, shape: StepShape) -> float:
    """The policy's belief about steps: the truth."""
    return Linear(0.6).step_seconds(layout, shape, 0.0)


def test_policy_of_the_paper_switches_at_most_once() -> None:
    lengths = [5, 8, 10, 12, 20, 30, 40, 60, 90, 150, 300, 900]

    def policy(cost: float) -> PaperPolicy:
        return PaperPolicy(LAYOUTS, step, lengths, requests=len(lengths), prompt=4, cost=cost)

    truth, paper = FixedSwitches(Linear(0.6), 5.0), policy(5.0)
    runs = simulate_batches([batch(*lengths)] * 3, paper, truth, FREE)
    assert [len(run.switches_on_the_way) for run in runs] == [1, 1, 1]
    assert all(run.switches[0].target.tp > paper.home.tp for run in runs)
    assert runs[0].seconds < simulate(batch(*lengths), StayPolicy(paper.home), truth, FREE).seconds
    # Nothing is worth a cost beyond all savings.
    assert not simulate(batch(*lengths), policy(1e6), truth, FREE).switches


def test_policy_of_the_paper_expects_the_mean_of_the_remaining() -> None:
    policy = PaperPolicy(LAYOUTS, step, [10, 20, 30], requests=3, prompt=4, cost=5.0)
    assert policy.remaining([0, 10, 15, 29, 30]).tolist() == [20.0, 15.0, 10.0, 1.0, 0.0]
