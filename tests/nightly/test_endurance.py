"""Storms long enough to see growth, kills at other moments, and an engine that ends slowly."""

from __future__ import annotations

import psutil
import pytest

from benchmarks.endurance.callers import SYNC
from benchmarks.endurance.kills import Kill
from benchmarks.endurance.processes import SHARED_MEMORY, engine_processes, names_held
from benchmarks.endurance.soak import Soaked, soak_engine
from tests.support.engines import engine
from tests.support.faults import assert_kill_is_reported


def soak_for(seconds: float, speculates: bool) -> Soaked:
    """Memory has more room than in `make soak`: so short a storm is hardly warm."""
    soaked = soak_engine(
        speculates, seconds, interval=seconds / 60, from_server=True, allowance=0.1
    )
    counts = soaked.counts
    assert counts["switches"] > 20 and counts["given up"] > 2
    assert bool(counts["changes of the draft length"]) == speculates
    return soaked


@pytest.mark.parametrize("speculates", [False, True])
def test_nothing_grows_in_a_storm(speculates: bool) -> None:
    soaked = soak_for(60.0, speculates)
    assert not [trend for trend in soaked.trends if trend.grown]
    assert not soaked.left


@pytest.mark.parametrize(
    "kill",
    [
        Kill("switch", rank=1, tp=1, part="KV", call=2),
        Kill("switch", rank=0, tp=2, part="hand-over"),
        Kill("batch", rank=0, tp=1, delay=0.3),
        Kill("verification", rank=1, tp=2, call=9),
        Kill("storm", rank=1, tp=1, delay=0.4, callers=SYNC[1:], seed=3, stops=True),
    ],
    ids=lambda kill: f"{kill.moment} {kill.part}".strip(),
)
def test_killed_worker_is_reported(kill: Kill, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_kill_is_reported(kill, monkeypatch)


def test_engine_that_takes_long_to_end_leaves_nothing() -> None:
    """A worker hears nothing, as on a machine with too much to do. The engine core ends it."""
    before = psutil.Process().children(recursive=True)
    held_before = names_held([psutil.Process()])
    with engine("qwen3", 2, {}, in_process=False):
        processes = engine_processes(before)
        spawned = processes["engine core"] + processes["workers"]
        held = names_held(spawned) - held_before
        assert len([path for path in held if path.parent == SHARED_MEMORY]) > 5
        processes["workers"][1].suspend()
    _, alive = psutil.wait_procs(spawned, timeout=150)
    assert not alive
    assert not [path for path in held if path.parent == SHARED_MEMORY and path.exists()]
