"""The doctor's figures of devices, on CPU; packages that are in vLLM's way; what may compile."""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pat_vllm.cli import doctor as command
from pat_vllm.cli.doctor_plot import _measured, plot
from pat_vllm.doctor import environment, steps
from pat_vllm.doctor.device import DEFAULT_MODEL, Moves, Scale, measure
from pat_vllm.doctor.journal import Ended, Journal
from pat_vllm.doctor.packages import unfit
from pat_vllm.doctor.speed import kv_blocks, reshard
from pat_vllm.doctor.values import Check, Stage, Verdict
from pat_vllm.layout import Layout
from pat_vllm.model_size import MODEL_SHAPES, ModelSize
from tests.support.mutation import mutated

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


def checks_of(moves: Moves) -> dict[str, dict[str, Any]]:
    """By name, in spite of one that fails."""
    file = StringIO()
    with suppress(Ended):
        measure(moves, Journal(file))
    lines = [json.loads(line) for line in file.getvalue().splitlines()]
    return {line["check"]["name"]: line["check"] for line in lines if "check" in line}


@pytest.mark.parametrize(
    ("ranks", "tps"), [(2, (1, 2)), (4, (1, 2, 4)), (4, (2, 4)), (8, (2, 4, 8))]
)
def test_copies_rows_and_kv_are_measured(ranks: int, tps: tuple[int, ...]) -> None:
    checks = checks_of(Moves(CONFIG, ranks, tps, TINY))
    assert [*checks] == ["copies", "rows of weights", "KV"]
    assert not any(one["problem"] for one in checks.values()), checks
    assert "one core: " in checks["copies"]["found"]
    rates = checks["copies"]["values"]["bytes_per_second"]
    assert all(one["copy_bytes_per_second"] > 0 for one in rates.values())
    rows = checks["rows of weights"]
    pairs = {(one["source"], one["target"]) for one in rows["values"]["moves"]}
    assert len(pairs) == len(tps) * (len(tps) - 1)
    assert f"tp={tps[0]} to tp={tps[-1]}: " in rows["found"] and "% of a copy" in rows["found"]
    assert rows["found"].startswith("3 of 3 layers of llama")
    assert "pack tp" in checks["KV"]["found"] and "unpack tp" in checks["KV"]["found"]


def test_with_one_layout_nothing_moves() -> None:
    assert [*checks_of(Moves(CONFIG, 2, (2,), TINY))] == ["copies"]


def test_bytes_of_a_case_are_counted_by_hand() -> None:
    # Two KV heads in four ranks: a rank of the wide layout holds one, of all requests.
    case = kv_blocks.Case(ModelSize.of(CONFIG), Layout(1, 4), Layout(4, 1), 2, 64)
    token_and_head = 2 * 16 * 2  # K and V in bfloat16
    assert 8 * case.words == 3 * max(2 * 64 * 2, 8 * 64 * 1) * token_and_head


def test_the_default_model_is_widened_until_ranks_can_share_it() -> None:
    assert Moves(None, 8, (1, 2, 4, 8)).named_model()[0] == DEFAULT_MODEL
    mixture = dict(MODEL_SHAPES["qwen3-30b-a3b"])
    assert Moves(mixture, 8, (1, 2, 4, 8)).named_model()[0] == DEFAULT_MODEL
    name, size = Moves(None, 6, (1, 2, 3, 6)).named_model()
    assert name == f"{DEFAULT_MODEL}, widened"
    assert all(map(size.divides, (1, 2, 3, 6))) and size.layers == 32


def check_that_wrong_rows_fail() -> None:
    """A run that leaves rows where they are."""
    checks = checks_of(Moves(CONFIG, 2, (1, 2), TINY))
    assert [*checks] == ["copies", "rows of weights"]
    assert "the shard of qkv is wrong" in checks["rows of weights"]["problem"]


def test_wrong_rows_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    prepare = reshard.prepare
    monkeypatch.setattr(reshard, "prepare", lambda rounds: prepare([]))
    check_that_wrong_rows_fail()
    with mutated(reshard._Weights.check, {"assert _same(found, expected)": "assert True"}):
        with pytest.raises(AssertionError):
            check_that_wrong_rows_fail()


def test_kv_that_is_packed_wrongly_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    made = kv_blocks.staged_blocks

    def wrong(pieces: Any, view: Any) -> Any:
        blocks = made(pieces, view)
        return SimpleNamespace(
            counts=blocks.counts,
            pack=lambda view, staged: staged.zero_(),
            unpack=blocks.unpack,
        )

    monkeypatch.setattr(kv_blocks, "staged_blocks", wrong)
    assert "packed wrongly" in checks_of(Moves(CONFIG, 2, (1, 2), TINY))["KV"]["problem"]


def test_figures_are_in_the_picture(tmp_path: Path) -> None:
    from matplotlib.image import imread

    figures = [Check(**one) for one in checks_of(Moves(CONFIG, 4, (1, 2, 4), TINY)).values()]
    steps_of = {"1": {"ms": [1.0, 2.0, 3.0], "stock_ms": [1.0, 1.9, 3.0], "ratio": 2.0 / 1.9}}
    figures.append(Check("decode step tp1dp4", "1 request alone 2.00 ms", values=steps_of))
    moves, times = _measured([Stage.of("figures", figures, 1.0)])
    assert [label for label, _ in moves][:2] == [
        "rows of weights: tp=1 to tp=2",
        "rows of weights: tp=2 to tp=1",
    ]
    assert len(moves) == 6 + 4 and times == [("tp1dp4, 1", 2.0, 1.9)]
    heights = []
    for checks in (figures, []):
        stage = Stage.of("figures", checks or [replace(one, values={}) for one in figures], 1.0)
        path = tmp_path / "doctor.png"
        plot(Verdict("2026-01-01T00:00:00+00:00", "pat-vllm doctor", (stage,)), path)
        heights.append(imread(path).shape[0])
    assert heights[0] > heights[1] + 200


# ---------------------------------------------------------------- steps


class FakeEngine:
    """Each request gets a token at each step; a step takes a tick."""

    def __init__(self, clock: list[float]) -> None:
        self.clock = clock
        self.left: dict[str, int] = {}

    def add_request(self, name: str, prompt: Any, params: Any) -> None:
        self.left[name] = params.max_tokens

    def has_unfinished_requests(self) -> bool:
        return bool(self.left)

    def step(self) -> list[Any]:
        # The first steps admit requests, and take longer.
        self.clock[0] += 1.0 if max(self.left.values()) > 60 else 0.01
        names = [*self.left]
        self.left = {name: count - 1 for name, count in self.left.items() if count > 1}
        return [SimpleNamespace(request_id=name) for name in names]


def test_steps_are_timed_once_they_have_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm")
    clock = [0.0]
    monkeypatch.setattr(steps.time, "perf_counter", lambda: clock[0])
    llm: Any = SimpleNamespace(llm_engine=FakeEngine(clock))
    gaps = steps._gaps(llm, ((5, 6), (7,)), itertools.count())
    assert len(gaps) == 2 * (steps._TOKENS - steps._UNSETTLED - 1)
    assert gaps == pytest.approx([0.01] * len(gaps))


# ---------------------------------------------------------------- packages


def test_a_package_that_cannot_be_imported_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = "raise RuntimeError('operator nms\\ndoes not exist')"
    (tmp_path / "pat_test_vision.py").write_text(fails)
    (tmp_path / "pat_test_audio.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    broken = unfit(("pat_test_vision", "pat_test_audio", "pat_test_absent"))
    assert broken == {"pat_test_vision": "RuntimeError: operator nms"}

    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(environment, "unfit", lambda: broken)
    file = StringIO()
    with pytest.raises(Ended):
        environment._import_vllm(Journal(file), "2.13.0+cpu")
    check = json.loads(file.getvalue().splitlines()[-1])["check"]
    assert check["name"] == "pat_test_vision"
    assert "do not fit torch 2.13.0+cpu" in check["problem"]
    assert "pip uninstall torchvision torchaudio torchcodec" in check["problem"]
    # What has nothing to do with them is told as it is.
    monkeypatch.setattr(environment, "unfit", dict)
    with pytest.raises(ImportError):
        environment._import_vllm(Journal(file), "2.13.0+cpu")


def test_only_stages_that_compile_may_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)
    assert command._environment(2, False)["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in command._environment(2, True)
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    assert command._environment(2, True)["TORCHDYNAMO_DISABLE"] == "1"
