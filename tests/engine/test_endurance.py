"""A slice of the soak, and of the kills; the rest is nightly."""

from __future__ import annotations

import pytest

from benchmarks.endurance.kills import Kill, kill_one
from benchmarks.endurance.soak import Soaked, soak_engine


def soak_for(seconds: float, speculates: bool) -> Soaked:
    """Memory has more room than in `make soak`: so short a storm is hardly warm."""
    soaked = soak_engine(
        speculates, seconds, interval=seconds / 60, from_server=True, allowance=0.1
    )
    counts = soaked.counts
    assert counts["switches"] > 20 and counts["given up"] > 2
    assert bool(counts["changes of the draft length"]) == speculates
    return soaked


def assert_kill_is_reported(kill: Kill, monkeypatch: pytest.MonkeyPatch) -> None:
    """How soon is for `make kills` to say, on a machine that does nothing else."""
    # Lets a function travel to the workers.
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    outcome = kill_one(kill)
    assert outcome.clear, outcome
    assert outcome.noticed >= 0
    assert not outcome.left


def test_storm_of_requests_aborts_and_switches() -> None:
    soak_for(15.0, speculates=True)


def test_worker_killed_while_kv_is_exchanged(monkeypatch: pytest.MonkeyPatch) -> None:
    kill = Kill("switch", rank=1, tp=1, part="KV", call=2)
    assert_kill_is_reported(kill, monkeypatch)
