"""Endurance: what counts as growth, what is counted, and which kills are drawn."""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import socket
import tempfile
import threading
from collections.abc import Callable
from multiprocessing import resource_tracker
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path

import psutil
import pytest

from benchmarks.endurance import sabotage
from benchmarks.endurance.growth import trend, trends
from benchmarks.endurance.kills import MOMENTS, Kill
from benchmarks.endurance.processes import OWN, names_held, sample


def series(count: int, value: Callable[[int], float], noise: float = 0.0) -> list[float]:
    rng = random.Random(count)
    return [value(i) + rng.uniform(-noise, noise) for i in range(count)]


@pytest.mark.parametrize(
    ("samples", "allowance", "grown"),
    [
        (series(30, lambda i: 10 + i / 10), 0.0, True),
        (series(300, lambda i: 1000 + i / 4, 10), 0.01, True),
        ([7.0] * 20 + [8.0] * 10, 0.0, True),
        ([float(min(i, 9)) for i in range(30)], 0.0, False),  # a warm-up
        (series(300, lambda i: 1000, 30), 0.0, False),  # noise
        ([10.0 + (i % 5 == 0) * 50 for i in range(60)], 0.0, False),  # what comes and goes
        (series(30, lambda i: 50 - i), 0.0, False),
        ([3.0] * 9, 0.0, False),
    ],
)
def test_growth(samples: list[float], allowance: float, grown: bool) -> None:
    assert trend("some", samples, allowance).grown == grown


def test_memory_has_an_allowance_and_nothing_else() -> None:
    samples = [{"a: RSS, MiB": 1000.0 + i / 10, "a: threads": 5.0 + i // 20} for i in range(30)]
    memory, threads = trends(samples, 0.01)
    assert not memory.grown and memory.allowed == pytest.approx(0.01 * memory.middle)
    assert threads.grown and threads.allowed == 0
    assert trends(samples, 0.0001)[0].grown
    with pytest.raises(ValueError, match="8 samples of files"):
        trend("files", [1.0] * 8)


def test_what_a_process_holds_is_counted(tmp_path: Path) -> None:
    processes = {"front end": [psutil.Process()]}
    resource_tracker.ensure_running()  # which holds a descriptor from the first shared memory on
    before = sample(processes)
    over = threading.Event()
    with contextlib.ExitStack() as held:
        held.enter_context(Path(os.devnull).open())
        memory = SharedMemory(create=True, size=4096)
        held.callback(memory.unlink)
        held.callback(memory.close)
        bound = held.enter_context(socket.socket(socket.AF_UNIX))
        bound.bind(str(tmp_path / "socket"))
        bound.listen()
        pages = held.enter_context(mmap.mmap(-1, 64 << 20))
        pages.write(b"x" * (64 << 20))
        waiting = threading.Thread(target=over.wait)
        waiting.start()
        held.callback(waiting.join)
        held.callback(over.set)
        during = sample(processes)
    after = sample(processes)
    for name, by in (
        ("front end: file descriptors", 1),
        ("front end: threads", 1),
        ("shared memory", 1),
        ("sockets and files", 1),
        (f"front end: {OWN}", 50),
    ):
        assert during[name] >= before[name] + by, name
        assert after[name] < before[name] + by, name


def test_names_held_are_those_that_exist() -> None:
    with tempfile.NamedTemporaryFile() as file:
        assert Path(file.name) in names_held([psutil.Process()])
    assert Path(file.name) not in names_held([psutil.Process()])


def test_kills_are_drawn_from_all_moments() -> None:
    rng = random.Random(0)
    kills = [Kill.draw(moment, 2, rng) for moment in MOMENTS for _ in range(200)]
    assert {kill.part for kill in kills} == {"", *sabotage.PARTS}
    assert {(kill.rank, kill.tp) for kill in kills} == {(0, 1), (0, 2), (1, 1), (1, 2)}
    assert Kill.draw("switch", 4, random.Random(1)) == Kill.draw("switch", 4, random.Random(1))
