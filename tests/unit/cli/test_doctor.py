"""`pat-vllm doctor`: its options, and what it prints and writes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pat_vllm.doctor.report import REPORT, Check, without_names
from pat_vllm.doctor.request import Request
from tests.support.command_line import invoke

CHECKS = (
    Check("versions", "[vllm] $0_32$", seconds=3.0),
    Check("random models", f"in {Path.cwd()}/here", seconds=1.0),
)
DIED = Check("start", problem="rank 1 died", seconds=60.0)


def test_names_of_users_and_folders_are_left_out() -> None:
    names = {"/home/ann": "~", "ann": "<user>", "/home/ann/venv": "<python>", "box": "<host>"}
    text = "/home/ann/venv/lib /home/ann/x ann@box annual boxes /home/anna"
    cleaned = without_names(text, names)
    assert cleaned == "<python>/lib ~/x <user>@<host> annual boxes /home/anna"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--shape", "huge"), "allowed: dense, large, mixture, linear, latent, window, sinks"),
        (("--engine", "[1]"), "--engine takes a JSON object"),
        (("--pat", '{"layouts": [3]}'), "tp=3, which does not divide"),
        (("--engine", '{"additional_config": {"pat": {}}}'), "give them by --pat"),
    ],
)
def test_what_a_user_got_wrong_is_said(arguments: tuple[str, ...], words: str) -> None:
    code, text = invoke("doctor", *arguments)
    assert code == 2 and words in text


@pytest.mark.parametrize("last", [Check("shutdown"), DIED], ids=["fit", "no"])
def test_exit_status_table_and_file(
    last: Check, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Request] = []
    written = tmp_path / "out" / "doctor.json"

    def examine(
        request: Request, doing: Callable[[str], None], found: Callable[[Check], None]
    ) -> tuple[str, ...]:
        given.append(request)
        for ended, check in enumerate((*CHECKS, last), start=1):
            doing(check.name)
            found(check)
            # What is killed leaves what it has.
            so_far = REPORT.validate_json(written.read_text())
            assert len(so_far.checks) == ended and so_far.fit is None
        return ("one", "last words") if last.problem else ()

    monkeypatch.setattr("pat_vllm.doctor.run.examine", examine)
    options: dict[str, Any] = {
        "--ranks": "8",
        "--shape": "latent",
        "--pat": '{"base_tp": 4}',
        "--engine": '{"block_size": 32}',
        "--output-dir": str(tmp_path / "out"),
    }
    words = [word for pair in options.items() for word in pair]
    status, text = invoke("doctor", "--eager", *words)
    assert status == (last is DIED), text
    assert "[vllm] $0_32$" in text and ("last words" in text) == (last is DIED)
    assert ("Not fit. start: rank 1 died" if last is DIED else "Fit: 3 checks") in text
    report = REPORT.validate_json(written.read_text())
    assert report.fit == (last is not DIED) and report.checks[0] == CHECKS[0]
    assert report.checks[1].found == "in ./here" and str(Path.cwd()) not in written.read_text()
    engine = {"block_size": 32, "enforce_eager": True}
    assert given == [Request(8, "latent", engine, {"base_tp": 4})]
