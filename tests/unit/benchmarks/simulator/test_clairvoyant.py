"""What the predictor is held against: a planner that is told the truth."""

from __future__ import annotations

import random
import statistics
from itertools import combinations

from benchmarks.simulator.simulate import simulate
from tests.support.clairvoyant import clairvoyant
from tests.unit.benchmarks.simulator.simple import FREE, LAYOUTS, Linear, batch, follow


def test_the_clairvoyant_is_hardly_worse_than_simple_schedules() -> None:
    """It takes requests for evenly spread, which a few long ones are not always."""
    ratios = []
    for seed in range(3):
        rng = random.Random(seed)
        trace = batch(*(min(200, round(rng.lognormvariate(4, 1.2)) + 1) for _ in range(24)))
        truth = Linear(0.6, 0.5)
        best = min(
            simulate(trace, follow(low, (ended, high)), truth, FREE).seconds
            for low, high in combinations(LAYOUTS, 2)
            for ended in range(1, len(trace), 2)
        )
        ratios.append(clairvoyant(trace, LAYOUTS, truth, FREE).seconds / best)
    assert statistics.mean(ratios) < 1.03, ratios
