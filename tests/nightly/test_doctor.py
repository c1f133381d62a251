"""`pat-vllm doctor` with real engines: kinds of models, kinds of failure."""

from __future__ import annotations

import json
import os
from itertools import permutations
from pathlib import Path

import pytest

from tests.engine.test_doctor import doctor, from_server
from tests.support.doctor_sabotage import VARIABLE

__all__ = ["from_server"]

EXTENSION = json.dumps({"worker_extension_cls": "tests.support.doctor_sabotage.Sabotage"})


@pytest.mark.parametrize("shape", ["mixture", "linear", "latent", "window", "sinks"])
def test_a_kind_of_model(from_server: None, shape: str, tmp_path: Path) -> None:
    report, text = doctor(tmp_path, "--shape", shape)
    assert report.fit, text
    names = {check.name for check in report.checks}
    for source, target in permutations(("tp1dp2", "tp2dp1"), 2):
        assert f"{source} -> {target} with requests in flight" in names


def test_the_default_policy(from_server: None, tmp_path: Path) -> None:
    """It takes a profile when it starts."""
    report, text = doctor(tmp_path, "--pat", '{"policy": {"kind": "predictor"}}')
    assert report.fit and "layouts as the policy chooses" in text, text


@pytest.mark.parametrize(
    ("sabotage", "check", "problem"),
    [
        ("rows", "layout tp2dp1", "wrong token"),
        ("dies", "tp1dp2 -> tp2dp1 with requests in flight", "rank 1 died"),
    ],
)
def test_what_is_wrong_is_found_where_it_is(
    sabotage: str, check: str, problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Started as for users: what a server's processes write does not come to the log."""
    monkeypatch.setenv(VARIABLE, sabotage)
    # The engine's processes do not import from the current directory.
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]), prepend=os.pathsep)
    report, text = doctor(tmp_path, "--engine", EXTENSION)
    last = report.checks[-1]
    assert not report.fit and last.name == check and check in text
    assert problem in (last.problem or ""), text
    assert f"Not fit. {check}: " in " ".join(text.split())
