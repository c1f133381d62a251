"""Workers that fail in a chosen moment, and what has to become of their engine."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import pytest

import pat_vllm
from benchmarks.endurance.kills import Kill, kill_one
from pat_vllm.patches import front_end
from tests.support.engines import engine, engine_processes

GONE_WITHIN = 150.0
"""Seconds from an engine's end until its last process is gone. vLLM's core collects garbage."""

# ---------------------------------------------------------------- in workers


def die_soon(worker: Any) -> None:
    """Make the last rank kill itself in its next steps."""
    if worker.rank == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()


def die_in_exchange(worker: Any) -> None:
    """Make the last rank kill itself in its next KV exchange."""
    if worker.rank == 1:
        worker._exchange.run = lambda *args: os.kill(os.getpid(), signal.SIGKILL)


def fail_in_switch(worker: Any) -> None:
    """Make the last rank raise in its next switch, before the others can meet it."""
    if worker.rank == 1:

        def fail(order: Any) -> None:
            raise ValueError("no memory left")

        worker.pat_switch = fail


def run_out_of_memory(worker: Any, part: str) -> None:
    """Make the last rank find no memory in the middle of its next switch, which others are in."""
    if worker.rank == 1:
        import torch

        owner, name, succeed = {
            "staging": (worker._exchange._transport, "prepare", 0),
            "second layer": (worker._exchange, "run", 1),
            "hand-over": (worker._state_transfer, "restore", 0),
        }[part]
        stock, calls = getattr(owner, name), iter(range(1000))

        def allocate(*args: Any, **options: Any) -> Any:
            if next(calls) == succeed:
                raise torch.OutOfMemoryError("no memory left")
            return stock(*args, **options)

        setattr(owner, name, allocate)


def linger_in_exchange(worker: Any, reached: str) -> None:
    """Make the last rank stay in the middle of its next switch for a while."""
    if worker.rank == 1:
        stock = worker._exchange.run

        def run(*args: Any) -> None:
            Path(reached).touch()
            time.sleep(5)
            stock(*args)

        worker._exchange.run = run


# ---------------------------------------------------------------- around an engine


@contextlib.contextmanager
def functions_travel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, `collective_rpc` takes functions, and no step or switch of an engine times out.

    So an error is that of a worker that failed, not of one that did not answer for long.
    """
    with monkeypatch.context() as patch:
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        patch.setenv("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "3600")
        yield


def left_by(processes: Iterable[psutil.Process]) -> list[Path]:
    """What these processes hold, and this one does not: shared memory, the file where they met."""
    from benchmarks.endurance.processes import SHARED_MEMORY, names_held

    held = names_held(processes) - names_held([psutil.Process()])
    return [p for p in held if p.parent == SHARED_MEMORY or p.name.startswith("vllm_dist_")]


def assert_gone(processes: Iterable[psutil.Process], held: Iterable[Path] = ()) -> None:
    """The processes end, and the files are removed."""
    _, alive = psutil.wait_procs(list(processes), timeout=GONE_WITHIN)
    for process in alive:
        process.kill()
    assert not alive
    left = [path for path in held if path.exists()]
    assert not left, left


def add_requests(llm: Any, count: int = 4) -> None:
    """Add greedy requests of 480 tokens."""
    from vllm import SamplingParams

    for i in range(count):
        sampling = SamplingParams(max_tokens=480, ignore_eos=True, temperature=0.0)
        llm.llm_engine.add_request(f"r{i}", {"prompt_token_ids": [5, 6, 7 + i]}, sampling)


def step_to_the_end(llm: Any) -> None:
    """Step until no request is left."""
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def assert_kill_is_reported(kill: Kill, monkeypatch: pytest.MonkeyPatch) -> None:
    """How soon is for `make kills` to say, on a machine that does nothing else."""
    # Lets a function travel to the workers.
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    outcome = kill_one(kill)
    assert outcome.clear, outcome
    assert outcome.noticed >= 0
    assert not outcome.left


def assert_a_dead_worker_is_noticed(
    pat: Mapping[str, Any],
    sabotage: Callable[[Any], None],
    tp: int,
    monkeypatch: pytest.MonkeyPatch,
    **options: Any,
) -> None:
    """vLLM's own error, and no process or shared memory left.

    Args:
        pat: PAT's options.
        sabotage: runs in each worker.
        tp: of the layout in which the engine works.
        options: vLLM's.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    before = engine_processes()
    local = pat.get("launcher") != "ray"
    with (
        functions_travel(monkeypatch),
        engine("qwen3", 2, pat, in_process=False, from_server=local, **options) as llm,
    ):
        spawned = engine_processes(before)
        assert len(spawned) >= 3
        held = left_by(spawned) if local else []
        assert held or not local
        pat_vllm.switch(llm, tp=tp)
        add_requests(llm, 8)
        llm.llm_engine.step()
        llm.collective_rpc(sabotage)
        if sabotage is die_in_exchange:
            with pytest.raises(Exception, match=r"failed|died|EngineCore"):
                pat_vllm.switch(llm, tp=3 - tp)
        with pytest.raises(EngineDeadError):
            step_to_the_end(llm)
        assert_gone(spawned, held)


def assert_a_worker_killed_in_a_switch_ends_the_engine(llm: Any) -> None:
    """The last test of an engine. The other ranks wait for the killed one in a collective."""
    llm.collective_rpc(die_in_exchange)
    add_requests(llm)
    for _ in range(8):
        llm.llm_engine.step()
    with pytest.raises(RuntimeError, match=r"failed|died"):
        pat_vllm.switch(llm, tp=2)
    with pytest.raises(RuntimeError, match="Executor failed"):
        llm.llm_engine.step()


def assert_a_failed_switch_ends_the_engine(
    sabotage: Callable[[Any], None], in_process: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where it was asked for by a call, whose caller vLLM would tell, and go on.

    The rank that fails is heard though rank 0 waits for it in a collective.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    before = engine_processes()
    with (
        functions_travel(monkeypatch),
        engine("qwen3", 2, {"kv_transfer": "migrate"}, in_process=in_process) as llm,
    ):
        spawned = engine_processes(before)
        llm.collective_rpc(sabotage)
        add_requests(llm)
        llm.llm_engine.step()
        with pytest.raises(Exception, match="no memory left"):
            pat_vllm.switch(llm, tp=2)
        error = RuntimeError if in_process else EngineDeadError
        with pytest.raises(error, match="Executor failed" if in_process else "EngineCore"):
            step_to_the_end(llm)
    assert_gone(spawned)


def front_end_in_a_switch(reached: str) -> None:
    """Runs in a process of its own, until a signal ends it."""
    # On a busy machine, too, the engine core is to end in order. If it is killed, names stay as
    # long as Python's resource tracker lives, which here is pytest's.
    front_end.ENDS_WITHIN = GONE_WITHIN
    with engine("qwen3", 2, {"kv_transfer": "migrate"}, in_process=False) as llm:
        llm.collective_rpc(linger_in_exchange, args=(reached,))
        add_requests(llm)
        llm.llm_engine.step()
        pat_vllm.switch(llm, tp=2)
        while True:
            llm.llm_engine.step()


def assert_a_front_end_ended_in_a_switch_takes_its_engine_along(
    number: signal.Signals, scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM reaches the front end only, and ends it at once; Ctrl-C reaches all processes."""
    from tests.support.fork_server import context

    reached = scratch / "reached"
    before = engine_processes()
    with functions_travel(monkeypatch):
        process = context().Process(target=front_end_in_a_switch, args=(str(reached),))
        process.start()
    try:
        while not reached.exists():
            assert process.is_alive()
            time.sleep(0.01)
        spawned = [other for other in engine_processes(before) if other.pid != process.pid]
        assert len(spawned) == 3
        held = left_by([psutil.Process(process.pid), *spawned])
        assert held
        os.kill(process.pid, number)
        if number == signal.SIGINT:
            for other in spawned:
                with contextlib.suppress(psutil.NoSuchProcess):
                    other.send_signal(number)
        process.join(GONE_WITHIN)
        assert process.exitcode == (1 if number == signal.SIGINT else -number)
    finally:
        process.kill()
    assert_gone(spawned, held)


def idle_front_end(ready: Any, from_server: bool) -> None:
    """Runs in a process of its own, until that is killed."""
    with engine("qwen3", 2, {}, in_process=False, from_server=from_server):
        ready.set()
        threading.Event().wait()


def assert_a_killed_front_end_takes_its_engine_along(from_server: bool) -> None:
    """Its engine's processes start from the server, or as for users."""
    from tests.support.fork_server import context

    server = context()
    ready = server.Event()
    process = server.Process(target=idle_front_end, args=(ready, from_server))
    before = engine_processes()
    process.start()
    try:
        while not ready.wait(1):
            assert process.is_alive()
        spawned = engine_processes(before)
        assert len(spawned) >= 3
    finally:
        process.kill()
    process.join()
    assert_gone(spawned)
