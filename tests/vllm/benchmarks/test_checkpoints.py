"""A checkpoint that a benchmark makes: with scattered phrases."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file

from benchmarks.bench.speculative import models


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
