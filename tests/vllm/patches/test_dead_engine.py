"""Whoever waits for a dead engine is told so, and why, however the front end comes to know it."""

from __future__ import annotations

import asyncio
import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import vllm.v1.engine.utils as engine_cores
from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer
from vllm.v1.engine import EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.engine.core_client import (
    AsyncMPClient,
    BackgroundResources,
    MPClient,
    SyncMPClient,
    _process_utility_output,
)
from vllm.v1.engine.exceptions import EngineDeadError

from pat_vllm.patches import dead_engine, front_end
from tests.support.fork_server import context

PATIENCE = 30


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, names in {
        MPClient: ("start_engine_core_monitor", "ensure_alive", "_format_exception"),
        SyncMPClient: ("get_output",),
        EngineCoreProc: ("_send_engine_dead",),
    }.items():
        for name in names:
            monkeypatch.setattr(owner, name, getattr(owner, name))
    monkeypatch.setattr(BackgroundResources, "engine_dead", False)
    dead_engine.end_waits_for_dead_engines()


def client_of(kind: type) -> Any:
    """A client without a process and sockets."""
    client: Any = object.__new__(kind)
    client.resources = BackgroundResources(ctx=None)  # type: ignore[arg-type]
    client.outputs_queue = queue.Queue()
    client.utility_results = {}
    client.start_engine_core_monitor()
    return client


def waiting(function: Callable[[], Any]) -> Future[Any]:
    """What a function returns that may wait for ever."""
    result: Future[Any] = Future()

    def wait() -> None:
        try:
            result.set_result(function())
        except Exception as error:
            result.set_exception(error)

    threading.Thread(target=wait, daemon=True).start()
    return result


def core_says(client: Any) -> None:
    """What the thread does that reads the core's messages."""
    with pytest.raises(EngineDeadError):
        client.resources.validate_alive([SimpleNamespace(buffer=EngineCoreProc.ENGINE_CORE_DEAD)])


def core_has_ended(client: Any) -> None:
    """What the monitor does."""
    client.resources.engine_manager = SimpleNamespace(finished_procs=lambda: {"EngineCore": -9})
    client.resources.engine_dead = True


@pytest.mark.parametrize(
    ("die", "cause"),
    [(core_says, "root cause"), (core_has_ended, "EngineCore was killed by SIGKILL")],
)
def test_all_waits_end(die: Callable[[Any], None], cause: str) -> None:
    client = client_of(SyncMPClient)
    call: Future[Any] = Future()
    answered: Future[Any] = Future()
    client.utility_results.update({1: call, 2: answered})
    answered.set_result("before")
    output = waiting(client.get_output)
    die(client)
    with pytest.raises(EngineDeadError, match=cause):
        output.result(PATIENCE)
    with pytest.raises(EngineDeadError, match=cause):  # and who asks again
        waiting(client.get_output).result(PATIENCE)
    with pytest.raises(EngineDeadError, match=cause):
        call.result(0)
    assert answered.result(0) == "before"
    with pytest.raises(EngineDeadError, match=cause):
        client.ensure_alive()


def test_a_coroutine_is_told() -> None:
    client = client_of(AsyncMPClient)

    async def wait() -> None:
        call = client.utility_results[1] = asyncio.get_running_loop().create_future()
        await asyncio.to_thread(core_says, client)
        await asyncio.wait_for(call, PATIENCE)

    with pytest.raises(EngineDeadError):
        asyncio.run(wait())


def test_the_core_tells_the_cause() -> None:
    """Of the executor, or else the exception that ends the core."""
    sent: list[Any] = []
    core: Any = SimpleNamespace(
        model_executor=SimpleNamespace(cause="worker 1 (pid 7) was killed by SIGKILL"),
        addresses=SimpleNamespace(outputs=["tcp://front-end"]),
        output_queue=SimpleNamespace(put_nowait=sent.append),
        output_thread=SimpleNamespace(join=lambda timeout: None, is_alive=lambda: False),
    )
    dead_engine.tell_cause_of_death()
    EngineCoreProc._send_engine_dead(core)
    core.model_executor.cause = ""
    try:
        raise RuntimeError("no plan")
    except RuntimeError:
        EngineCoreProc._send_engine_dead(core)
    assert [message for message in sent if isinstance(message, bytes)] == [
        EngineCoreProc.ENGINE_CORE_DEAD
    ] * 2
    for (index, outputs), cause in zip(sent[::2], ("worker 1 .* SIGKILL", "no plan"), strict=True):
        assert index == 0 and isinstance(outputs, EngineCoreOutputs)
        client = client_of(SyncMPClient)
        _process_utility_output(outputs.utility_output, client.utility_results)
        core_says(client)
        with pytest.raises(EngineDeadError, match=cause):
            client.get_output()


def core_that_ends(scratch: Path) -> None:
    """An engine core that fails, and removes what it has made only after it was asked to end."""
    import vllm.v1.engine.core as cores

    def fail() -> None:
        raise RuntimeError("no worker is left")

    def shutdown() -> None:
        (scratch / "ending").touch()
        while not (scratch / "asked").exists():
            time.sleep(0.01)
        (scratch / "removed").touch()

    run = EngineCoreProc.run_engine_core
    core = SimpleNamespace(run_busy_loop=fail, shutdown=shutdown, _send_engine_dead=lambda: None)
    cores.EngineCoreProc = lambda **_: core  # type: ignore[assignment, misc]
    parallel = SimpleNamespace(
        data_parallel_size=1,
        numa_bind=False,
        reconfigure_for_independent_dp_rank=lambda: None,
    )
    dead_engine.end_in_order()
    run(vllm_config=SimpleNamespace(parallel_config=parallel, kv_transfer_config=None))


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_core_that_ends_is_not_killed(number: signal.Signals, tmp_path: Path) -> None:
    process = context().Process(target=core_that_ends, args=(tmp_path,))
    process.start()
    try:
        while not (tmp_path / "ending").exists():
            assert process.is_alive()
            time.sleep(0.01)
        os.kill(process.pid, number)
        (tmp_path / "asked").touch()
        process.join(PATIENCE)
        assert process.exitcode == 1
        assert (tmp_path / "removed").exists()
    finally:
        process.kill()


def handle_a_signal_in_a_signal(ended: Path) -> None:
    """As an engine core's handlers do, the second where the first holds the event's lock."""
    dead_engine.let_signals_meet()
    woken = threading.Event()
    callback = engine_cores.SignalCallback(woken.set)
    event = callback._event
    notify = event._cond.notify_all  # type: ignore[attr-defined]

    def notify_interrupted() -> None:
        callback.trigger()
        notify()

    event._cond.notify_all = notify_interrupted  # type: ignore[attr-defined]
    callback.trigger()
    woken.wait()
    ended.touch()


def test_a_signal_may_come_while_a_core_handles_another(tmp_path: Path) -> None:
    ended = tmp_path / "ended"
    process = context().Process(target=handle_a_signal_in_a_signal, args=(ended,))
    process.start()
    try:
        process.join(PATIENCE)
        assert ended.exists()
    finally:
        process.kill()


def test_a_ring_may_be_removed_by_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ShmRingBuffer, "__del__", ShmRingBuffer.__del__)
    dead_engine.let_others_remove_rings()
    raised: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", raised.append)
    ring = ShmRingBuffer(1, 1024, 2)
    Path("/dev/shm", ring.shared_memory.name).unlink()
    del ring
    gc.collect()
    assert not raised


def test_a_stopped_worker_does_not_outlive_its_killed_core(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(engine_cores, "shutdown", lambda processes, timeout=None: None)
    manager = engine_cores.CoreEngineProcManager
    monkeypatch.setattr(manager, "monitor_engine_liveness", lambda self: None)
    monkeypatch.setattr(front_end, "_WORKERS_END_WITHIN", 0.5)
    front_end.let_engine_cores_end()
    program = (
        "import subprocess, sys, time\n"
        "worker = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "print(worker.pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-c", program]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as core:
        assert core.stdout is not None
        worker = psutil.Process(int(core.stdout.readline()))
        try:
            processes = [SimpleNamespace(pid=core.pid)]
            manager.monitor_engine_liveness(SimpleNamespace(processes=processes))  # type: ignore[arg-type]
            os.kill(worker.pid, signal.SIGSTOP)
            core.kill()
            core.wait()
            engine_cores.shutdown(processes)  # type: ignore[arg-type]
            worker.wait(PATIENCE)
        finally:
            core.kill()
            if worker.is_running():
                worker.kill()
