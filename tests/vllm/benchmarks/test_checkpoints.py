"""Checkpoints that benchmarks make: with skewed routers, and with scattered phrases."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.bench.speculative import models
from benchmarks.skewed_routing import decode_times, rows, shares, skew_routers
from pat_vllm.layout import Layout
from pat_vllm.profiling.profile import Profile, StepSample, StepShape
from tests.support.models import random_model


def test_skewed_routers_are_all_that_changes(tmp_path: Path) -> None:
    """Popular experts come first."""
    even = random_model("qwen3_moe")
    skew_routers(even, tmp_path / "skewed", 1.0)
    before, after = (load_file(path / "model.safetensors") for path in (even, tmp_path / "skewed"))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed == {name for name in before if name.endswith(".mlp.gate.weight")}
    of_even, of_skewed = shares(even), shares(tmp_path / "skewed")
    assert sum(of_even) == pytest.approx(1) and sum(of_skewed) == pytest.approx(1)
    assert max(of_even) < 0.6
    assert of_skewed[0] > 0.65


def test_table_of_skewed_routing() -> None:
    """It has the steps of one group with the shortest contexts, and without prompts."""
    cut, spread = Layout(2, 1), Layout(2, 1, "ep")

    def step(layout: Layout, batch: int, seconds: float, mean: int = 16, prefill: int = 0):
        return StepSample.of(layout, StepShape(batch, batch * mean, mean, prefill), [seconds])

    steps = (
        step(Layout(1, 2), 1, 0.1),
        step(cut, 1, 0.010),
        step(cut, 8, 0.030, mean=64),
        step(cut, 8, 0.020),
        step(cut, 8, 0.001, mean=8, prefill=4),
        step(spread, 1, 0.008),
        step(spread, 8, 0.021),
        step(spread, 16, 0.050),
    )
    times = decode_times(Profile.model_construct(steps=steps))
    assert times == {str(cut): {1: 0.010, 8: 0.020}, str(spread): {1: 0.008, 8: 0.021, 16: 0.050}}
    assert rows([times]) == [["1", "10.0", "8.0", "0.80"], ["8", "20.0", "21.0", "1.05"]]


def test_each_token_of_a_scattered_phrase_is_as_likely_as_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny = dict(arch="qwen3", hidden=128, heads=8, kv_heads=4)
    specs = {
        name: tiny | {key: spec[key] for key in ("repeat", "phrase") if key in spec}
        for name, spec in models.SPECS.items()
    }
    monkeypatch.setattr(models, "SPECS", specs)
    path = models.model(models.SCATTERED, tmp_path)
    assert path == models.model(models.SCATTERED, tmp_path)
    assert path != models.model(models.REPEATING, tmp_path)
    head = load_file(path / "model.safetensors")["lm_head.weight"]
    tokens = head[3 : 3 + 32]
    assert (tokens == tokens[0]).all()
    assert (tokens[:, 32:] == 0).all() and (tokens[:, :32] > 0).all()
    assert len({tuple(row) for row in head[35:60].tolist()}) == 25
