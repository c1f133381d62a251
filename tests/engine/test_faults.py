"""What goes wrong stays bounded: dead workers, refused switches, a pool that is too small."""

from __future__ import annotations

import functools
import multiprocessing
import os
import posix
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

import pat_vllm
from benchmarks.endurance.callers import ASYNC, SYNC
from benchmarks.endurance.kills import Kill
from pat_vllm.executor import parent_watchdog
from tests.engine.specs import SMALL_KV, SMALL_LATENT
from tests.support.engines import Job, run
from tests.support.faults import (
    assert_a_failed_switch_ends_the_engine,
    assert_a_front_end_ended_in_a_switch_takes_its_engine_along,
    assert_a_killed_front_end_takes_its_engine_along,
    assert_gone,
    assert_kill_is_reported,
    run_out_of_memory,
)
from tests.support.fork_server import context

# ---------------------------------------------------------------- engines that end


@pytest.mark.parametrize(
    "kill",
    [
        Kill("storm", rank=1, tp=1, delay=0.3, callers=SYNC[1:], seed=1),
        Kill("asynchronous storm", rank=0, tp=2, delay=0.3, callers=ASYNC, seed=2),
    ],
    ids=lambda kill: kill.moment,
)
def test_a_killed_worker_is_reported_to_all(kill: Kill, monkeypatch: pytest.MonkeyPatch) -> None:
    """To whoever waits, of whatever; and nothing is left."""
    assert_kill_is_reported(kill, monkeypatch)


def test_a_switch_that_fails_ends_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank has no memory in the middle of the exchange."""
    sabotage = functools.partial(run_out_of_memory, part="second layer")
    assert_a_failed_switch_ends_the_engine(sabotage, False, monkeypatch)


def test_a_front_end_that_is_ended_in_a_switch_takes_its_engine_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By Ctrl-C."""
    assert_a_front_end_ended_in_a_switch_takes_its_engine_along(
        signal.SIGINT, tmp_path, monkeypatch
    )


def test_a_killed_front_end_takes_its_engine_along() -> None:
    """Stock vLLM's engine core would wait for it, and its workers keep their devices."""
    assert_a_killed_front_end_takes_its_engine_along(from_server=True)


# ---------------------------------------------------------------- processes that outlive others


def parent_of(name: str, watch: Callable[[], None], started: Path) -> None:
    """Runs in a process of its own, until that is killed."""
    child = multiprocessing.get_context("fork").Process(
        name=name, target=go_on, args=(watch, started)
    )
    child.start()
    child.join()


def go_on(watch: Callable[[], None], started: Path) -> None:
    """Goes on, whatever becomes of the parent."""
    # Not the one of processes from the tests' server.
    os.getppid = posix.getppid
    parent_watchdog._SHUTDOWN_SECONDS = parent_watchdog._GRACE_SECONDS = 1.0
    watch()
    # Of an engine core: a worker that hears no signal but the last.
    worker = multiprocessing.get_context("fork").Process(target=threading.Event().wait)
    worker.start()
    assert worker.pid is not None
    os.kill(worker.pid, signal.SIGSTOP)
    started.write_text(f"{os.getpid()} {worker.pid}")
    threading.Event().wait()


def never_ends(asked: Path) -> None:
    asked.touch()
    threading.Event().wait()


def fails(asked: Path) -> None:
    asked.touch()
    raise RuntimeError("no worker answers")


@pytest.mark.parametrize("shutdown", [never_ends, fails, None])
def test_an_orphan_ends(shutdown: Callable[[Path], None] | None, tmp_path: Path) -> None:
    """An engine core though its shutdown does not, with a worker that is stopped; a worker though
    it waits for another one."""
    started, asked = tmp_path / "started", tmp_path / "asked"
    arguments: tuple[Any, ...]
    if shutdown is not None:
        watch = functools.partial(
            parent_watchdog.end_when_orphaned, functools.partial(shutdown, asked)
        )
        arguments = ("EngineCore_DP0", watch, started)
    else:
        arguments = ("VllmWorker-1", parent_watchdog.exit_when_orphaned, started)
    process = context().Process(target=parent_of, args=arguments)
    process.start()
    try:
        while not (started.exists() and started.read_text()):
            assert process.is_alive()
            time.sleep(0.01)
        child, worker = (psutil.Process(int(pid)) for pid in started.read_text().split())
        assert child.ppid() == process.pid
    finally:
        process.kill()
    process.join()
    if shutdown is None:
        worker.kill()
    assert_gone([child, worker])
    assert asked.exists() == (shutdown is not None)


# ---------------------------------------------------------------- an engine that goes on


def jobs(requests: int = 6, tokens: int = 40, prompt: int = 30) -> dict[str, Job]:
    rng = random.Random(0)
    sampling = {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
    return {
        f"r{i}": Job([rng.randrange(3, 400) for _ in range(prompt)], sampling)
        for i in range(requests)
    }


def texts(llm: Any, work: dict[str, Job], **options: Any) -> dict[str, list[int]]:
    return {name: outcome.token_ids for name, outcome in run(llm, work, **options).items()}


@pytest.mark.engine(SMALL_KV, SMALL_LATENT)
def test_requests_that_find_no_room_are_recomputed(llm: Any) -> None:
    """With one KV head, a group of two holds half of what two replicas hold."""
    work = jobs(requests=10, tokens=40, prompt=100)
    expected = texts(llm, work)
    count = len(pat_vllm.report(llm).switches)

    def before_step(step: int) -> None:
        if step in (12, 20):
            assert pat_vllm.switch(llm, tp=2 if step == 12 else 1)

    assert texts(llm, work, before_step=before_step) == expected
    merge = pat_vllm.report(llm).switches[count]
    assert merge.target.tp == 2 and merge.migrated > 0 and merge.recomputed > 0


def wait_for(path: Path, worker: Any) -> None:
    while not path.exists():
        time.sleep(0.01)


@pytest.mark.engine(SMALL_KV)
def test_calls_that_fail_or_are_late_do_not_disturb_what_comes_after(
    llm: Any, tmp_path: Path
) -> None:
    """vLLM leaves some replies to them unread, which no other call may take for its own."""
    work = jobs()
    expected = texts(llm, work)

    def before_step(step: int) -> None:
        if step in (3, 6):
            with pytest.raises(Exception, match="no_such_method"):
                llm.collective_rpc("no_such_method")
            with pytest.raises(Exception, match="Profiling is not enabled"):
                llm.start_profile()
            assert pat_vllm.switch(llm, tp=2 if step == 3 else 1)
        if step == 9:
            with pytest.raises(TimeoutError):
                llm.collective_rpc(functools.partial(wait_for, tmp_path / "go on"), timeout=0.1)
            (tmp_path / "go on").touch()

    assert texts(llm, work, before_step=before_step) == expected
    assert pat_vllm.switch(llm, tp=2)
    assert texts(llm, work) == expected
