"""The doctor's processes: how they end is told, and nothing that they have started is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from pat_vllm.doctor import child
from pat_vllm.doctor.child import Run, run_module
from pat_vllm.doctor.values import Check

ROOT = Path(__file__).parents[3]
CHILD = "tests.support.doctor_child"
PROBLEMS = {
    "rank": "rank 1 died, exit code -9 (EngineDeadError: it died)",
    "memory": "too little memory: To serve at least one request",
    "killed": "the process ended with exit code -9",
    "hangs": "it hangs: nothing for 6 s",
}


@pytest.fixture(autouse=True)
def from_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes import nothing from the current directory."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)


def test_how_a_process_ends_is_told() -> None:
    """All of these ways at once, as they mostly wait."""

    def run(mode: str) -> tuple[list[str], Run]:
        doing: list[str] = []
        return doing, run_module(CHILD, mode, os.environ, doing.append, silence=6.0)

    modes = ["fine", *PROBLEMS]
    with ThreadPoolExecutor(len(modes)) as threads:
        ends = dict(zip(modes, threads.map(run, modes), strict=True))
    assert all(doing == ["tp1dp2 -> tp2dp1"] for doing, _ in ends.values())
    _, fine = ends.pop("fine")
    assert (fine.answer, fine.checks) == ("42", (Check("start", "it is"),))
    for mode, (_, run_) in ends.items():
        assert run_.answer is None
        assert run_.checks[-1].name == "tp1dp2 -> tp2dp1"
        assert PROBLEMS[mode] in (run_.checks[-1].problem or "")


SUPERVISOR = f"""
import os
from pat_vllm.doctor import child

child._GRACE = 1.0
with child.ending_by_signals():
    child.run_module({CHILD!r}, "starts another", os.environ, lambda pid: print(pid, flush=True))
"""


def test_a_signal_ends_all_that_was_started() -> None:
    command = [sys.executable, "-c", SUPERVISOR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        other = int(supervisor.stdout.readline())
        supervisor.send_signal(signal.SIGTERM)
        try:
            assert supervisor.wait(timeout=120) == 128 + signal.SIGTERM
        finally:
            supervisor.kill()
    assert not runs(other)


def test_a_process_that_is_killed_leaves_nothing_running(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(child, "_GRACE", 1.0)
    started: list[str] = []
    run_module(CHILD, "starts another, killed", os.environ, started.append)
    (other,) = started
    assert not runs(int(other))


def runs(pid: int) -> bool:
    """Whether a process that was sent SIGKILL goes on after half a minute."""
    for _ in range(300):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return False
        except OSError:
            return False
        time.sleep(0.1)
    return True
