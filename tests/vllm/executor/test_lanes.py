"""The lanes: readers of ranks on the engine's node and on another, drafts, and what stays."""

from __future__ import annotations

import gc
import socket
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
import torch
import vllm.distributed.parallel_state as parallel_state
import zmq
from vllm.distributed.device_communicators.shm_broadcast import Handle, MessageQueue
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, DraftTokenIds, ModelRunnerOutput

from pat_vllm.executor.lanes import DRAFT_ROWS, EXECUTE, LEAVE, SAMPLE, Lanes, Network, WorkerLanes
from pat_vllm.executor.os_resources import (
    OsResourceCleanup,
    OsResources,
    os_resources_here,
    remove_sockets,
)
from pat_vllm.executor.readers import LocalReader, RemoteReader, reader_of
from pat_vllm.layout import Layout
from pat_vllm.worker.worker import PATWorkerMixin

LAYOUTS = (Layout(1, 2), Layout(2, 1))
MANY_BYTES = b"x" * (2 << 20)
"""More than a slot of the ring below, so it takes vLLM's out-of-band path."""


@pytest.fixture(params=[LocalReader, RemoteReader], ids=["local", "remote"])
def ring(request: Any) -> Iterator[tuple[MessageQueue, Any]]:
    """A writer and its reader."""
    local = request.param is LocalReader
    writer = MessageQueue(1, int(local), max_chunk_bytes=1 << 20, connect_ip="127.0.0.1")
    reader = reader_of(MessageQueue.create_from_handle(writer.export_handle(), 0))
    assert isinstance(reader, request.param)
    other = threading.Thread(target=reader.wait_until_ready)
    other.start()
    writer.wait_until_ready()
    other.join()
    yield writer, reader


def sleep_on(reader: Any, seconds: float) -> bool:
    """Whether something woke the reader up."""
    poller = zmq.Poller()
    reader.watch(poller)
    events = dict(poller.poll(timeout=round(1e3 * seconds)))
    reader.woken(events)
    return bool(events)


def test_messages_arrive_in_order_and_wake_the_reader(ring: Any) -> None:
    writer, reader = ring
    with pytest.raises(TimeoutError):
        reader.dequeue(timeout=0.05)
    for message in (("some", 1), MANY_BYTES):
        assert not reader.ready()
        writer.enqueue(message)
        assert sleep_on(reader, 60)
        assert reader.ready()
        writer.enqueue("second")
        assert reader.dequeue(timeout=60) == message
        assert reader.dequeue(timeout=60) == "second"


def test_shutting_down_ends_a_wait_without_end(ring: Any) -> None:
    """From another thread: the one that has seen a worker die."""
    _, reader = ring
    timer = threading.Timer(0.2, reader.shutdown)
    timer.start()
    with pytest.raises(RuntimeError, match="cancelled"):
        reader.dequeue()
    timer.join()


# -------------------------------------------------------------------- steps and their drafts


SAMPLED = ModelRunnerOutput(["a"], {"a": 0}, [[5]])
DRAFTS = DraftTokenIds(["a"], [[6, 7]])
STEP = [(EXECUTE, 3), (SAMPLE, None)]


class Worker:
    """Keeps its drafts until the next sampled step, as vLLM's runner does."""

    def __init__(self, speculates: bool = True, asynchronous: bool = False) -> None:
        self.vllm_config = SimpleNamespace(
            speculative_config="some" if speculates else None,
            scheduler_config=SimpleNamespace(async_scheduling=asynchronous),
        )
        self.drafts: DraftTokenIds | None = None

    def execute_model(self, tokens: int) -> Any:
        if tokens < 0:
            raise ValueError("a step's mistake")
        return None if tokens else EMPTY_MODEL_RUNNER_OUTPUT

    def sample_tokens(self, grammars: Any) -> Any:
        self.drafts = DRAFTS
        return SAMPLED

    def take_draft_rows(self, update: Any) -> None:
        raise ValueError("a drafter's mistake")

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        return self.drafts

    def drafts_of_step(self, constrained: bool) -> DraftTokenIds | None:
        worker: Any = self
        return PATWorkerMixin.drafts_of_step(worker, constrained)


def replies(
    worker: Any, messages: list[tuple[str, Any]], layout: Layout = LAYOUTS[0], rank: int = 0
) -> list[tuple[bool, Any]]:
    """What a rank replies."""
    lane = iter([*messages, (LEAVE, None)])
    sent: list[tuple[bool, Any]] = []
    ends: Any = WorkerLanes.__new__(WorkerLanes)
    ends._rings = {layout.tp: SimpleNamespace(dequeue=lambda **options: next(lane))}
    ends._rank, ends._device, ends._finishing = rank, torch.device("cpu"), None
    ends._reply = SimpleNamespace(enqueue=sent.append)
    ends.serve(layout, worker)
    return sent


def test_drafts_travel_with_their_step() -> None:
    """Steps with tokens, and one between them of which a worker only hears what has ended."""
    sent = replies(Worker(), [*STEP, (EXECUTE, 0), *STEP])
    assert [(ok, reply.output, reply.drafts) for ok, reply in sent] == [
        (True, SAMPLED, DRAFTS),
        (True, EMPTY_MODEL_RUNNER_OUTPUT, None),
        (True, SAMPLED, DRAFTS),
    ]


@pytest.mark.parametrize(
    ("worker", "grammars", "drafts"),
    [
        (Worker(asynchronous=True), None, None),
        (Worker(asynchronous=True), "some", DRAFTS),
        (Worker(speculates=False), None, None),
    ],
)
def test_drafts_that_the_scheduler_need_not_know(worker: Any, grammars: Any, drafts: Any) -> None:
    """Asynchronous steps need them for grammars only."""
    ((_, reply),) = replies(worker, [(EXECUTE, 3), (SAMPLE, grammars)])
    assert reply.drafts == drafts


def test_only_the_leader_replies_and_a_failed_step_is_its_reply() -> None:
    assert replies(Worker(), STEP, LAYOUTS[1], rank=1) == []
    (failed, fine) = replies(Worker(), [(EXECUTE, -1), *STEP], LAYOUTS[1])
    assert failed == (False, "a step's mistake") and fine[0]
    (failed, *_) = replies(Worker(), [(DRAFT_ROWS, None), *STEP])
    assert failed == (False, "a drafter's mistake"), "nothing waits for a reply that never comes"
    with pytest.raises(ValueError, match="a drafter's mistake"):
        replies(Worker(), [(DRAFT_ROWS, None), *STEP], LAYOUTS[1], rank=1)


def test_a_worker_that_waits_for_a_step_is_not_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    """For vLLM's watchdog, which 0.33 has: it is fed before each step, and off while none comes."""
    seen: list[str] = []

    class WatchDog:
        feed = partial(seen.append, "fed")

        @contextmanager
        def disable(self) -> Iterator[None]:
            seen.append("off")
            yield
            seen.append("on")

    name = "vllm.utils.watch_dog"
    watch_dog = import_module(name) if find_spec(name) else ModuleType(name)
    monkeypatch.setitem(sys.modules, name, watch_dog)
    if of_vllm := getattr(watch_dog, "WatchDog", None):
        assert {"feed", "disable"} <= vars(of_vllm).keys()
    monkeypatch.setattr(watch_dog, "get_watch_dog", WatchDog, raising=of_vllm is not None)
    assert len(replies(Worker(), STEP)) == 1
    assert seen == ["off", "on", "fed"] * (len(STEP) + 1)


# -------------------------------------------------------------------- nothing stays behind


@pytest.fixture
def ends() -> Iterator[tuple[Lanes, list[WorkerLanes]]]:
    """The engine's ends and the workers'."""
    lanes = Lanes(LAYOUTS, Network())
    workers = [WorkerLanes(lanes.handles(), rank, LAYOUTS, torch.device("cpu")) for rank in (0, 1)]
    lanes.connect([worker.reply_handle() for worker in workers])
    ends: tuple[Lanes | WorkerLanes, ...] = (lanes, *workers)
    threads = [threading.Thread(target=end.wait_until_ready) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    del threads, thread, ends
    yield lanes, workers
    lanes.shutdown(None)


def there(queues: Iterable[Handle]) -> list[str]:
    """Names of queues that have shared memory or a socket."""
    names = []
    for queue in queues:
        assert queue.buffer_handle and queue.local_subscribe_addr and queue.local_notify_addr
        name = queue.buffer_handle[3]
        sockets = (queue.local_subscribe_addr, queue.local_notify_addr)
        paths = [f"/dev/shm/{name}", *(address.removeprefix("ipc://") for address in sockets)]
        if any(Path(path).exists() for path in paths):
            names.append(name)
    return names


def test_shutting_down_removes_the_rings(ends: tuple[Lanes, list[WorkerLanes]]) -> None:
    """Python would do so when the front end ends, and call them leaked; sockets would stay."""
    lanes, workers = ends
    rings = list(lanes.handles().by_replica.values())
    assert len(there(rings)) == 3
    timer = threading.Timer(0.2, lanes.shutdown, (LAYOUTS[0],))
    timer.start()
    with pytest.raises(RuntimeError):  # a wait for a reply ends with the lanes
        lanes.receive(0, timeout=600)
    timer.join()
    del timer
    gc.collect()
    assert not there(rings)
    lanes.shutdown(LAYOUTS[0])
    lanes.shutdown(None)
    with pytest.raises(RuntimeError, match="shut down"):
        lanes.send(LAYOUTS[0], 0, EXECUTE)
    replies = [worker.reply_handle() for worker in workers]
    assert len(there(replies)) == 2
    for worker in workers:
        worker.shutdown()
    del worker, workers[:]
    gc.collect()
    assert not there(replies)


def test_what_killed_workers_leave_is_removed(
    ends: tuple[Lanes, list[WorkerLanes]], tmp_path: Path
) -> None:
    """The engine core does it for them."""
    _, workers = ends
    met = tmp_path / f"vllm_dist_{uuid4().hex}"
    shared = Path("/dev/shm") / f"{met.name}-tp:0-[0-1]-cpushm_0"
    other = Path("/dev/shm") / f"{met.name}x"
    queues = [worker.reply_handle() for worker in workers]
    cleanup = OsResourceCleanup(queues[:1])
    cleanup.add(
        [
            OsResources((queues[1],), f"file://{met}"),
            OsResources((Handle(),), "tcp://127.0.0.1:1234"),
        ]
    )
    try:
        for file in (met, shared, other):
            file.touch()
        assert len(there(queues)) == 2
        cleanup.remove()
        assert not there(queues)
        assert not met.exists() and not shared.exists() and other.exists()
        cleanup.remove()
    finally:
        shared.unlink(missing_ok=True)
        other.unlink(missing_ok=True)
    for worker in workers:  # or vLLM removes its shared memory again
        worker._reply.buffer.is_creator = False


def test_a_users_file_is_no_socket(tmp_path: Path) -> None:
    """As with VLLM_RPC_BASE_PATH=/x/run#1 beside a file /x/run."""
    file, folder = tmp_path / "run", tmp_path / "run#1"
    file.write_text("mine")
    folder.mkdir()
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(folder / "a"))
    remove_sockets(
        Handle(local_subscribe_addr=f"ipc://{folder}/a", local_notify_addr=f"ipc://{file}")
    )
    assert file.read_text() == "mine" and not [*folder.iterdir()]
    (folder / "met").symlink_to(file)
    cleanup = OsResourceCleanup(
        [Handle(local_subscribe_addr="ipc:///no/such", local_notify_addr="tcp://x:1")]
    )
    cleanup.add([OsResources((), f"file://{folder}/met")])
    cleanup.remove()
    assert file.exists() and (folder / "met").is_symlink()


def test_queues_of_groups_are_among_what_a_worker_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's tensor-parallel group has one."""
    broadcaster, own = Handle(local_subscribe_addr="ipc:///group"), Handle()
    group = SimpleNamespace(mq_broadcaster=SimpleNamespace(handle=broadcaster))
    groups = {"tp:0": lambda: group, "dp:0": lambda: SimpleNamespace(mq_broadcaster=None)}
    monkeypatch.setattr(parallel_state, "_groups", groups | {"ended": lambda: None})
    assert os_resources_here(own, "tcp://127.0.0.1:1") == OsResources(
        (own, broadcaster), "tcp://127.0.0.1:1"
    )
