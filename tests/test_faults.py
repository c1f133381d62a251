"""What goes wrong stays bounded: dead workers, refused switches, a pool that is too small."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import posix
import random
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch

import pat_vllm
from benchmarks.endurance.processes import SHARED_MEMORY, names_held
from pat_vllm.executor import orphan
from pat_vllm.scheduler import switch as switch_module
from tests.engines import Job, engine, engine_processes, run, scheduler_of
from tests.support.fork_server import context

pytestmark = pytest.mark.slow

FAILED_WITHIN = 150.0
"""Seconds from a worker's death to vLLM's error. It is noticed as such: vLLM would give up waiting
for an answer after twice as long."""
GONE_WITHIN = 150.0
"""Seconds from the error until the last process is gone; vLLM's engine core collects garbage."""


def jobs(requests=6, tokens=40, prompt=30):
    rng = random.Random(0)
    return {
        f"r{i}": Job(
            [rng.randrange(3, 400) for _ in range(prompt)],
            {"max_tokens": tokens, "temperature": 0.0, "ignore_eos": True},
        )
        for i in range(requests)
    }


def die_in_exchange(worker):
    """Make the last rank kill itself in its next KV exchange."""
    if worker.rank == 1:
        worker._exchange.run = lambda *args: os.kill(os.getpid(), signal.SIGKILL)


def fail_in_switch(worker):
    """Make the last rank raise in its next switch, before the others can meet it."""
    if worker.rank == 1:

        def fail(order):
            raise ValueError("no memory left")

        worker.pat_switch = fail


def run_out_of_memory(worker, part):
    """Make the last rank find no memory in the middle of its next switch, which others are in."""
    if worker.rank == 1:
        owner, name, right = {
            "staging": (worker._exchange._transport, "prepare", 0),
            "second layer": (worker._exchange, "run", 1),
            "hand-over": (worker._handover, "give", 0),
        }[part]
        stock, calls = getattr(owner, name), iter(range(1000))

        def allocate(*args, **options):
            if next(calls) == right:
                raise torch.OutOfMemoryError("no memory left")
            return stock(*args, **options)

        setattr(owner, name, allocate)


def linger_in_exchange(worker, reached):
    """Make the last rank stay in the middle of its next switch for a while."""
    if worker.rank == 1:
        stock = worker._exchange.run

        def run(*args):
            Path(reached).touch()
            time.sleep(5)
            stock(*args)

        worker._exchange.run = run


def die_soon(worker):
    """Make the last rank kill itself in its next step."""
    if worker.rank == 1:
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()


@pytest.mark.parametrize(
    ("tp", "sabotage"),
    [
        (1, die_soon),
        pytest.param(2, die_soon, marks=pytest.mark.nightly),
        (2, die_in_exchange),
        pytest.param(1, die_in_exchange, marks=pytest.mark.nightly),
    ],
)
def test_a_dead_worker_fails_the_engine_and_leaves_nothing(sabotage, tp, monkeypatch):
    """Killed in mid-generation, or in mid-switch: vLLM's own error, soon, and no process left."""
    assert_a_dead_worker_is_noticed({}, sabotage, tp, monkeypatch)


def assert_a_dead_worker_is_noticed(pat, sabotage, tp, monkeypatch, **options):
    """For an engine with the PAT options `pat` and vLLM's `options` that works in layout `tp`."""
    from vllm import SamplingParams
    from vllm.v1.engine.exceptions import EngineDeadError

    # Lets a test function travel to the workers.
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    before = engine_processes()
    local = pat.get("launcher") != "ray"
    with engine("qwen3", 2, pat, in_process=False, from_server=local, **options) as llm:
        spawned = engine_processes(before)
        assert len(spawned) >= 3
        pat_vllm.switch(llm, tp=tp)
        llm.collective_rpc(sabotage)
        if sabotage is die_in_exchange:
            threading.Timer(1.0, lambda: _try_switch(llm, 3 - tp)).start()
        begun = time.monotonic()
        with pytest.raises(EngineDeadError):
            llm.generate(
                [{"prompt_token_ids": [5, 6, 7 + i]} for i in range(8)],
                SamplingParams(max_tokens=480, ignore_eos=True),
                use_tqdm=False,
            )
        assert time.monotonic() - begun < FAILED_WITHIN
        _, alive = psutil.wait_procs(spawned, timeout=GONE_WITHIN)
        assert not alive


@pytest.mark.parametrize(
    ("in_process", "sabotage"),
    [
        (True, fail_in_switch),
        pytest.param(False, fail_in_switch, marks=pytest.mark.nightly),
        (False, functools.partial(run_out_of_memory, part="second layer")),
        *(
            pytest.param(
                False, functools.partial(run_out_of_memory, part=part), marks=pytest.mark.nightly
            )
            for part in ("staging", "hand-over")
        ),
    ],
)
def test_a_switch_that_fails_ends_the_engine(in_process, sabotage, monkeypatch):
    """Also where it was asked for by a call, whose caller vLLM would tell, and go on.

    The rank that fails is heard though rank 0 waits for it in a collective.
    """
    from vllm.v1.engine.exceptions import EngineDeadError

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    before = engine_processes()
    with engine("qwen3", 2, {"kv_transfer": "migrate"}, in_process=in_process) as llm:
        spawned = engine_processes(before)
        llm.collective_rpc(sabotage)
        for i in range(4):
            llm.llm_engine.add_request(
                f"r{i}", {"prompt_token_ids": [5, 6, 7 + i]}, _params(max_tokens=480)
            )
        llm.llm_engine.step()
        begun = time.monotonic()
        with pytest.raises(Exception, match="no memory left"):
            pat_vllm.switch(llm, tp=2)
        error = RuntimeError if in_process else EngineDeadError
        with pytest.raises(error, match="Executor failed" if in_process else "EngineCore"):
            while llm.llm_engine.has_unfinished_requests():
                llm.llm_engine.step()
        assert time.monotonic() - begun < FAILED_WITHIN
    _, alive = psutil.wait_procs(spawned, timeout=GONE_WITHIN)
    assert not alive


def front_end_in_a_switch(reached):
    """Runs in a process of its own, until a signal ends it."""
    with engine("qwen3", 2, {"kv_transfer": "migrate"}, in_process=False) as llm:
        llm.collective_rpc(linger_in_exchange, args=(reached,))
        for i in range(4):
            llm.llm_engine.add_request(
                f"r{i}", {"prompt_token_ids": [5, 6, 7 + i]}, _params(max_tokens=480)
            )
        llm.llm_engine.step()
        pat_vllm.switch(llm, tp=2)
        while True:
            llm.llm_engine.step()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_front_end_that_is_ended_in_a_switch_takes_its_engine_along(
    number, tmp_path, monkeypatch
):
    """SIGTERM reaches the front end only, and ends it at once; Ctrl-C reaches all processes."""
    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    reached = tmp_path / "reached"
    process = context().Process(target=front_end_in_a_switch, args=(str(reached),))
    before = engine_processes()
    process.start()
    try:
        while not reached.exists():
            assert process.is_alive()
            time.sleep(0.01)
        spawned = [one for one in engine_processes(before) if one.pid != process.pid]
        assert len(spawned) == 3
        held = shared_memory_of([process.pid, *(one.pid for one in spawned)])
        assert held
        os.kill(process.pid, number)
        if number == signal.SIGINT:
            for one in spawned:
                with contextlib.suppress(psutil.NoSuchProcess):
                    one.send_signal(number)
        process.join(GONE_WITHIN)
        assert process.exitcode == (1 if number == signal.SIGINT else -number)
    finally:
        process.kill()
    _, alive = psutil.wait_procs(spawned, timeout=GONE_WITHIN)
    assert not alive
    assert not [path for path in held if path.exists()]


def shared_memory_of(pids):
    """Names of shared memory that these processes have mapped."""
    held = names_held([psutil.Process(pid) for pid in pids]) - names_held([psutil.Process()])
    return [path for path in held if path.parent == SHARED_MEMORY]


def front_end(ready):
    """Runs in a process of its own, until that is killed."""
    with engine("qwen3", 2, {}, in_process=False, from_server=False):
        ready.set()
        threading.Event().wait()


def test_a_killed_front_end_takes_its_engine_along():
    """Stock vLLM's engine core would wait for it, and its workers keep their devices."""
    # Only itself from the server, which has imported vLLM; what it starts, as for users.
    server = context()
    ready = server.Event()
    process = server.Process(target=front_end, args=(ready,))
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
    _, alive = psutil.wait_procs(spawned, timeout=GONE_WITHIN)
    assert not alive


def front_end_of_a_core(shutdown, started):
    """Runs in a process of its own, until that is killed."""
    core = multiprocessing.get_context("fork").Process(
        name="EngineCore_DP0", target=core_of_a_front_end, args=(shutdown, started)
    )
    core.start()
    core.join()


def core_of_a_front_end(shutdown, started):
    """Goes on, whatever becomes of its front end."""
    # Not the one of processes from the tests' server.
    os.getppid = posix.getppid
    orphan._SHUTDOWN_SECONDS = 1.0
    orphan.end_when_orphaned(functools.partial(shutdown, started.with_name("asked")))
    started.write_text(str(os.getpid()))
    threading.Event().wait()


def never_ends(asked):
    asked.touch()
    threading.Event().wait()


def fails(asked):
    asked.touch()
    raise RuntimeError("no worker answers")


@pytest.mark.parametrize("shutdown", [never_ends, fails])
def test_an_orphaned_engine_core_ends_though_its_shutdown_does_not(shutdown, tmp_path):
    started = tmp_path / "started"
    process = context().Process(target=front_end_of_a_core, args=(shutdown, started))
    process.start()
    try:
        while not (started.exists() and started.read_text()):
            assert process.is_alive()
            time.sleep(0.01)
        core = psutil.Process(int(started.read_text()))
        assert core.ppid() == process.pid
    finally:
        process.kill()
    process.join()
    _, alive = psutil.wait_procs([core], timeout=GONE_WITHIN)
    for one in alive:
        one.kill()
    assert not alive
    assert (tmp_path / "asked").exists()


def _try_switch(llm, tp):
    # The engine dies of it, which the main thread sees.
    with contextlib.suppress(Exception):
        pat_vllm.switch(llm, tp=tp)


@pytest.fixture(scope="module")
def small_engine():
    """Two ranks whose pools hold 24 blocks as replicas, and as a group together only 24 as well."""
    blocks, layers, tokens, content = 24, 3, 32, 2 * 32 * 4
    with engine(
        "llama_one_kv",
        2,
        {"kv_transfer": "migrate"},
        kv_cache_memory_bytes=blocks * layers * tokens * content,
    ) as llm:
        yield llm


def test_requests_that_find_no_room_are_recomputed(small_engine):
    """With one KV head, a group of two holds half of what two replicas hold."""
    llm = small_engine
    work = jobs(requests=10, tokens=40, prompt=100)
    expected = run(llm, work)
    before = len(pat_vllm.report(llm).switches)

    def before_step(step):
        if step in (12, 20):
            assert pat_vllm.switch(llm, tp=2 if step == 12 else 1)

    outcomes = run(llm, work, before_step=before_step)
    assert {n: o.token_ids for n, o in outcomes.items()} == {
        n: o.token_ids for n, o in expected.items()
    }
    merge = pat_vllm.report(llm).switches[before]
    assert merge.target.tp == 2
    assert merge.migrated > 0
    assert merge.recomputed > 0


def test_a_switch_that_cannot_be_planned_is_undone(small_engine, monkeypatch):
    """Whatever fails in planning is undone, and generation goes on in the old layout."""
    llm = small_engine
    work = jobs()
    expected = run(llm, work)

    def fail(*args):
        raise RuntimeError("no plan today")

    told = []
    llm.provoked = "no plan today"
    errors, began = pat_vllm.report(llm).errors, time.monotonic()

    def before_step(step):
        if step in (3, 9):
            with monkeypatch.context() as patch:
                patch.setattr(switch_module, "plan_moves", fail)
                with pytest.raises(switch_module.PlanningFailed, match="no plan today"):
                    pat_vllm.switch(llm, tp=2)
                told.append(step)

    outcomes = run(llm, work, before_step=before_step)
    assert told == [3, 9]
    assert {n: o.token_ids for n, o in outcomes.items()} == {
        n: o.token_ids for n, o in expected.items()
    }
    report = pat_vllm.report(llm, since=began)
    assert ["no plan today" in one.why for one in report.refused] == [True, True]
    assert report.errors - errors == 2
    assert report.layout.tp == 1


def test_weights_are_left_alone_while_the_engine_sleeps(small_engine, monkeypatch):
    """To end a request is a step, too. The first one after waking up brings them up to date."""
    llm = small_engine
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    calls = []
    make_call = executor.collective_rpc

    def call(method, *args, **options):
        calls.append(method)
        return make_call(method, *args, **options)

    assert pat_vllm.switch(llm, tp=2)
    llm.sleep(level=1)
    monkeypatch.setattr(executor, "collective_rpc", call)
    llm.llm_engine.add_request("queued", {"prompt_token_ids": [5, 6, 7]}, _params(max_tokens=30))
    llm.llm_engine.abort_request(["queued"], internal=False)
    llm.llm_engine.step()
    assert executor._in_lanes, "the workers have been told"
    llm.wake_up()
    assert "pat_refresh_weights" not in calls
    assert len(run(llm, jobs(requests=2, tokens=4))) == 2
    assert calls.count("pat_refresh_weights") == 1
    assert pat_vllm.report(llm).layout.tp == 1, "the engine has gone home"


def test_streaming_input_sessions_refuse_a_switch(small_engine):
    """A session that waits for more input holds state that no layout can take over."""
    llm = small_engine
    scheduler = scheduler_of(llm)
    llm.llm_engine.add_request(
        "s", {"prompt_token_ids": [5, 6, 7]}, _params(max_tokens=30, ignore_eos=True)
    )
    llm.llm_engine.step()
    (request,) = [
        r for replica in scheduler.replica_set.replicas for r in replica.scheduler.running
    ]
    request.resumable = True
    assert pat_vllm.switch(llm, tp=2) is False
    request.resumable = False
    while llm.llm_engine.has_unfinished_requests():
        llm.llm_engine.step()


def test_a_layout_that_is_not_kept_ready_is_an_error(small_engine):
    with pytest.raises(ValueError, match=r"cannot switch to 3.*tp1dp2, tp2dp1 ready"):
        pat_vllm.switch(small_engine, tp=3)


def _params(**fields):
    from vllm import SamplingParams

    return SamplingParams(**fields)
