"""The measurement of skewed routing: whose routers are skewed, and what its table says."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.skewed_routing import decode_times, rows, shares, skew_routers
from pat_vllm.layout import Layout
from pat_vllm.profiling.profile import Profile, StepSample
from tests.models import random_model

CUT, SPREAD = Layout(2, 1), Layout(2, 1, "ep")


def test_popular_experts_come_first_and_nothing_else_changes(tmp_path: Path) -> None:
    even = random_model("qwen3_moe")
    skew_routers(even, tmp_path / "skewed", 1.0)
    before, after = (load_file(one / "model.safetensors") for one in (even, tmp_path / "skewed"))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed == {name for name in before if name.endswith(".mlp.gate.weight")}
    of_even, of_skewed = shares(even), shares(tmp_path / "skewed")
    assert sum(of_even) == pytest.approx(1) and sum(of_skewed) == pytest.approx(1)
    assert max(of_even) < 0.6
    assert of_skewed[0] > 0.65


def test_table_has_steps_of_one_group_with_the_shortest_contexts(mixture_profile: Profile) -> None:
    assert decode_times(mixture_profile) == {
        str(CUT): {1: 0.010, 8: 0.020},
        str(SPREAD): {1: 0.008, 8: 0.021, 16: 0.050},
    }
    times = decode_times(mixture_profile)
    assert rows([times]) == [["1", "10.0", "8.0", "0.80"], ["8", "20.0", "21.0", "1.05"]]


@pytest.fixture
def mixture_profile() -> Profile:
    def step(layout: Layout, batch: int, seconds: float, mean: int = 16, prefill: int = 0):
        return StepSample(
            layout=layout,
            batch=batch,
            context=batch * mean,
            longest=mean,
            prefill=prefill,
            seconds=seconds,
            low=seconds,
            high=seconds,
            repeats=1,
        )

    steps = [
        step(Layout(1, 2), 1, 0.1),
        step(CUT, 1, 0.010),
        step(CUT, 8, 0.030, mean=64),
        step(CUT, 8, 0.020),
        step(CUT, 8, 0.001, mean=8, prefill=4),
        step(SPREAD, 1, 0.008),
        step(SPREAD, 8, 0.021),
        step(SPREAD, 16, 0.050),
    ]
    return Profile.model_construct(steps=tuple(steps))
