"""The doctor's figures of devices, on CPU: copies, rows of weights, KV."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from io import StringIO
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pat_vllm.doctor.device import Moves, Scale, measure
from pat_vllm.doctor.journal import Ended, Journal
from pat_vllm.doctor.speed import kv_blocks, reshard

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 96,
    "vocab_size": 512,
}
TINY = Scale((1 << 16,), 1 << 20, 1 << 18, 2, 64, 2)


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def checks_of(ranks: int, tps: tuple[int, ...]) -> dict[str, dict[str, Any]]:
    """By name, in spite of one that fails."""
    file = StringIO()
    with suppress(Ended):
        measure(Moves(CONFIG, ranks, tps, TINY), Journal(file))
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    return {line["check"]["name"]: line["check"] for line in lines if "check" in line}


@pytest.mark.parametrize(("ranks", "tps"), [(2, (1, 2)), (8, (2, 4, 8))])
def test_copies_rows_and_kv_are_measured(ranks: int, tps: tuple[int, ...]) -> None:
    checks = checks_of(ranks, tps)
    assert [*checks] == ["copies", "rows of weights", "KV"]
    assert not any(one["problem"] for one in checks.values()), checks
    rates = checks["copies"]["values"]["bytes_per_second"]
    assert all(one["copy_bytes_per_second"] > 0 for one in rates.values())
    rows = checks["rows of weights"]
    pairs = {(one["source"], one["target"]) for one in rows["values"]["moves"]}
    assert len(pairs) == len(tps) * (len(tps) - 1) == len(rows["values"]["slowest"])
    # With one layout nothing moves.
    assert [*checks_of(2, (2,))] == ["copies"]


def test_wrong_rows_and_wrong_kv_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = reshard.prepare
    with monkeypatch.context() as patch:
        patch.setattr(reshard, "prepare", lambda rounds: prepare([]))
        checks = checks_of(2, (1, 2))
    assert [*checks] == ["copies", "rows of weights"]
    assert "the shard of qkv is wrong" in checks["rows of weights"]["problem"]

    made = kv_blocks.staged_blocks

    def wrong(pieces: Any, view: Any) -> Any:
        blocks = made(pieces, view)
        return SimpleNamespace(
            counts=blocks.counts,
            pack=lambda view, staged: staged.zero_(),
            unpack=blocks.unpack,
        )

    monkeypatch.setattr(kv_blocks, "staged_blocks", wrong)
    assert "packed wrongly" in checks_of(2, (1, 2))["KV"]["problem"]
