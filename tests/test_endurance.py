"""Endurance: what is counted, what is called growth, and a slice of the soak and of the kills."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.endurance import sabotage
from benchmarks.endurance.growth import Trend, trend, trends
from benchmarks.endurance.kills import MOMENTS, Kill, kill_one
from benchmarks.endurance.processes import (
    OWN,
    SHARED_MEMORY,
    engine_processes,
    names_held,
    sample,
)
from benchmarks.endurance.soak import soak_engine
from tests.engines import engine
from tests.support.mutation import mutated

# ---------------------------------------------------------------- growth


def series(count: int, value: Callable[[int], float], noise: float = 0.0) -> list[float]:
    rng = random.Random(count)
    return [value(i) + rng.uniform(-noise, noise) for i in range(count)]


def check_growth() -> None:
    assert trend("files", series(30, lambda i: 10 + i / 10)).grown
    assert trend("memory, MiB", series(300, lambda i: 1000 + i / 4, 10), 0.01).grown
    assert trend("a few, later", [7.0] * 20 + [8.0] * 10).grown


def test_steady_growth_is_seen() -> None:
    check_growth()


@pytest.mark.parametrize(
    ("function", "changes"),
    [
        (trend, {"samples[2 * third :]": "samples[third : 2 * third]"}),
        (Trend.grown, {"self.last - self.middle": "self.middle - self.last"}),
    ],
)
def test_growth_that_is_overlooked_is_seen(function: Any, changes: dict[str, str]) -> None:
    with mutated(function, changes), pytest.raises(AssertionError):
        check_growth()


@pytest.mark.parametrize(
    "samples",
    [
        [float(min(i, 9)) for i in range(30)],  # a warm-up
        series(300, lambda i: 1000, 30),  # noise
        [10.0 + (i % 5 == 0) * 50 for i in range(60)],  # what comes and goes
        series(30, lambda i: 50 - i),
        [3.0] * 9,
    ],
)
def test_what_does_not_grow_for_good_is_no_growth(samples: list[float]) -> None:
    assert not trend("some", samples).grown


def test_memory_has_an_allowance_and_nothing_else() -> None:
    samples = [{"a: RSS, MiB": 1000.0 + i / 10, "a: threads": 5.0 + i // 20} for i in range(30)]
    memory, threads = trends(samples, 0.01)
    assert not memory.grown and memory.allowed == pytest.approx(0.01 * memory.middle)
    assert threads.grown and threads.allowed == 0
    assert trends(samples, 0.0001)[0].grown
    with pytest.raises(ValueError, match="8 samples of files"):
        trend("files", [1.0] * 8)


# ---------------------------------------------------------------- what is counted


@contextlib.contextmanager
def descriptor() -> Iterator[None]:
    with Path(os.devnull).open():
        yield


@contextlib.contextmanager
def thread() -> Iterator[None]:
    over = threading.Event()
    one = threading.Thread(target=over.wait)
    one.start()
    yield
    over.set()
    one.join()


@contextlib.contextmanager
def shared_memory() -> Iterator[None]:
    memory = SharedMemory(create=True, size=4096)
    yield
    memory.close()
    memory.unlink()


@contextlib.contextmanager
def bound_socket() -> Iterator[None]:
    path = Path(tempfile.mkdtemp()) / "socket"
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(str(path))
        one.listen()
        yield
    path.unlink()
    path.parent.rmdir()


@contextlib.contextmanager
def pages() -> Iterator[None]:
    with mmap.mmap(-1, 64 << 20) as memory:
        memory.write(b"x" * (64 << 20))
        yield


@pytest.mark.parametrize(
    ("hold", "grows", "by"),
    [
        (descriptor, "front end: file descriptors", 1),
        (thread, "front end: threads", 1),
        (shared_memory, "shared memory", 1),
        (bound_socket, "sockets and files", 1),
        (pages, f"front end: {OWN}", 50),
    ],
)
def test_what_a_process_holds_is_counted(
    hold: Callable[[], contextlib.AbstractContextManager[None]], grows: str, by: float
) -> None:
    processes = {"front end": [psutil.Process()]}
    before = sample(processes)[grows]
    with hold():
        assert sample(processes)[grows] >= before + by
    assert sample(processes)[grows] < before + by


def test_names_are_those_that_are_there() -> None:
    with tempfile.NamedTemporaryFile() as file:
        assert Path(file.name) in names_held([psutil.Process()])
        Path(file.name).rename(f"{file.name}.moved")
        Path(f"{file.name}.moved").rename(file.name)
    assert Path(file.name) not in names_held([psutil.Process()])


# ---------------------------------------------------------------- engines


@pytest.fixture
def insecure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets a function travel to the workers."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("speculates", "seconds"),
    [
        (True, 15.0),
        *(pytest.param(on, 60.0, marks=pytest.mark.nightly) for on in (False, True)),
    ],
)
def test_nothing_grows_in_a_storm(speculates: bool, seconds: float) -> None:
    """Memory is given more room than in `make soak`: so short a storm is hardly warm."""
    soaked = soak_engine(
        speculates, seconds, interval=seconds / 60, from_server=True, allowance=0.1
    )
    if seconds >= 60:  # a shorter storm says little of growth
        assert not [one for one in soaked.trends if one.grown]
    counts = soaked.counts
    assert counts["switches"] > 20 and counts["given up"] > 2
    assert bool(counts["changes of the draft length"]) == speculates


@pytest.mark.slow
@pytest.mark.nightly
def test_an_engine_that_takes_long_to_end_leaves_nothing() -> None:
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


@pytest.mark.slow
@pytest.mark.usefixtures("insecure")
@pytest.mark.parametrize(
    "kill",
    [
        Kill("switch", rank=1, tp=1, part="KV", call=2),
        *(
            pytest.param(one, marks=pytest.mark.nightly)
            for one in (
                Kill("switch", rank=0, tp=2, part="hand-over"),
                Kill("batch", rank=0, tp=1, delay=0.3),
                Kill("verification", rank=1, tp=2, call=9),
            )
        ),
    ],
    ids=lambda kill: f"{kill.moment} {kill.part}".strip(),
)
def test_a_killed_worker_is_told(kill: Kill) -> None:
    """How soon is for `make kills` to say, on a machine that does nothing else."""
    outcome = kill_one(kill)
    assert outcome.clear, outcome
    assert outcome.noticed >= 0
    assert not outcome.left


def test_kills_are_drawn_from_all_moments() -> None:
    rng = random.Random(0)
    kills = [Kill.draw(moment, 2, rng) for moment in MOMENTS for _ in range(200)]
    assert {one.part for one in kills} == {"", *sabotage.PARTS}
    assert {(one.rank, one.tp) for one in kills} == {(0, 1), (0, 2), (1, 1), (1, 2)}
    assert Kill.draw("switch", 4, random.Random(1)) == Kill.draw("switch", 4, random.Random(1))
