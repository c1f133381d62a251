"""Checkpoints that benchmarks make: with skewed routers, and with scattered phrases."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.bench.speculative import models
from benchmarks.skewed_routing import shares, skew_routers
from tests.support.models import random_model


def test_skewed_routers_are_all_that_changes(tmp_path: Path) -> None:
    """Popular experts come first."""
    even = random_model("qwen3_moe")
    skew_routers(even, tmp_path / "skewed", 1.0)
    before, after = (load_file(path / "model.safetensors") for path in (even, tmp_path / "skewed"))
    changed = {name for name in before if not before[name].equal(after[name])}
    assert changed == {name for name in before if name.endswith(".mlp.gate.weight")}
    assert max(shares(even)) < 0.6 and shares(tmp_path / "skewed")[0] > 0.65


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
    head = load_file(path / "model.safetensors")["lm_head.weight"]
    tokens = head[3 : 3 + 32]
    assert (tokens == tokens[0]).all()
    assert (tokens[:, 32:] == 0).all() and (tokens[:, :32] > 0).all()
    assert len({tuple(row) for row in head[35:60].tolist()}) == 25
