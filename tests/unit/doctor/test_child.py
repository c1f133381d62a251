"""Processes of ours: how they end is told, and nothing that they have started is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pat_vllm.doctor import child
from pat_vllm.doctor.child import ChildResult, environment, run_module

ROOT = Path(__file__).parents[3]
CHILD = "tests.support.child_module"


@pytest.fixture(autouse=True)
def from_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its processes import nothing from the current directory."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    monkeypatch.setattr(child, "_GRACE", 1.0)


def test_how_a_process_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of these ways at once, as they mostly wait."""
    monkeypatch.setattr(child, "_ENDING", 3.0)

    def run(mode: str) -> tuple[ChildResult, list[dict[str, Any]]]:
        events: list[dict[str, Any]] = []
        silence = 6.0 if mode == "hangs" else 60.0
        return run_module(CHILD, mode, os.environ, events.append, silence), events

    codes = {"fine": 0, "fails": 1, "hangs": None, "has nothing more to do": None}
    with ThreadPoolExecutor(len(codes)) as threads:
        ends = dict(zip(codes, threads.map(run, codes), strict=True))
    assert {mode: ended.code for mode, (ended, _) in ends.items()} == codes
    assert all(events[0] == {"doing": mode} for mode, (_, events) in ends.items())
    assert {mode: ended.answer for mode, (ended, _) in ends.items() if ended.answer} == {"fine": 42}
    assert ends["fails"][0].log == "begins\nlast words\n"


def test_environment_binds_ranks_and_respects_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("VLLM_CPU_OMP_THREADS_BIND", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    assert environment(1)["VLLM_CPU_OMP_THREADS_BIND"].isdigit()
    crowded = environment(100_000)
    assert crowded["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert crowded["OMP_NUM_THREADS"] == "1"
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "4|5")
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    variables = environment(2)
    assert variables["VLLM_CPU_OMP_THREADS_BIND"] == "4|5"
    assert "VLLM_CPU_KVCACHE_SPACE" not in variables


SUPERVISOR = f"""
import os
from pat_vllm.doctor import child

child._GRACE = 1.0
with child.ending_by_signals():
    child.run_module(
        {CHILD!r}, "starts another", os.environ, lambda event: print(event["doing"], flush=True)
    )
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_signal_ends_all_that_was_started(number: signal.Signals) -> None:
    command = [sys.executable, "-c", SUPERVISOR]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        other = int(supervisor.stdout.readline())
        supervisor.send_signal(number)
        try:
            code = supervisor.wait(timeout=120)
        finally:
            supervisor.kill()
    assert code == (-number if number == signal.SIGKILL else 128 + number)
    assert not runs(other)


def test_a_process_that_is_killed_leaves_nothing_running() -> None:
    started: list[dict[str, Any]] = []
    ended = run_module(CHILD, "starts another, killed", os.environ, started.append)
    (other,) = started
    assert ended.code == -signal.SIGKILL and not runs(int(other["doing"]))


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
