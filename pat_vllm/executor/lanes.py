"""Message lanes: one broadcast ring per replica, so that replicas do not wait for each other.

vLLM sends every RPC through one ring that all workers read in order. A worker in a long prefill
would soon fill it and stop the others. Steps therefore travel in lanes, each of which reaches the
ranks of one replica only. Control RPCs stay on vLLM's own path: the executor asks the workers to
leave their lanes, makes the RPC, and sends the workers back (`PATExecutorMixin.collective_rpc`).

Both directions are vLLM's `MessageQueue`: shared memory to ranks on the engine's node, TCP to
others (`Network`).
"""

from __future__ import annotations

import queue
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.device_communicators.shm_broadcast import Handle, MessageQueue
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.outputs import AsyncModelRunnerOutput, DraftTokenIds

from pat_vllm.executor.messages import StepReply
from pat_vllm.executor.os_resources import remove_sockets
from pat_vllm.executor.readers import Reader, reader_of, wait_for_any
from pat_vllm.layout import Layout

if TYPE_CHECKING:
    from pat_vllm.worker.worker import PATWorkerMixin

logger = init_logger(__name__)

LEAVE = "leave"
EXECUTE = "execute"
SAMPLE = "sample"
DRAFT_ROWS = "draft rows"
ENCODER_INPUTS = "encoder inputs"

_CHUNK_BYTES = 4 << 20
"""Size of a ring's slot (vLLM's own ring has 16 MiB); larger messages take vLLM's out-of-band
path, a socket."""


@dataclass(frozen=True)
class Network:
    """How the engine and ranks on other nodes reach each other. Empty: all are on one node.

    Attributes:
        engine: the engine's address, for those ranks.
        ranks: address of each rank that shares no memory with the engine.
    """

    engine: str | None = None
    ranks: Mapping[int, str] = field(default_factory=dict)


@dataclass(frozen=True)
class LaneHandles:
    """What a worker needs to open its end.

    Attributes:
        by_replica: the handle of each lane, by (tp, replica).
        network: tells a worker whether its ring back is read on another node.
    """

    by_replica: dict[tuple[int, int], Handle]
    network: Network


class Lanes:
    """The engine's ends: a ring to each replica of each layout, a ring from each rank."""

    def __init__(self, layouts: Iterable[Layout], network: Network) -> None:
        self._network = network
        self._rings: dict[tuple[int, int], MessageQueue] = {}
        for layout in layouts:
            for replica in range(layout.replicas):
                ranks = layout.ranks_of(replica)
                local = [rank for rank in ranks if rank not in network.ranks]
                self._rings[layout.tp, replica] = MessageQueue(
                    len(ranks),
                    len(local),
                    local,
                    max_chunk_bytes=_CHUNK_BYTES,
                    connect_ip=network.engine,
                )
        self._replies: list[Reader] = []

    def handles(self) -> LaneHandles:
        """What every worker needs to open its ends (`PATWorkerMixin.pat_open_lanes`)."""
        return LaneHandles(
            {key: ring.export_handle() for key, ring in self._rings.items()}, self._network
        )

    def connect(self, reply_handles: Sequence[Handle]) -> None:
        """Open the rings back, one per rank. Workers call `WorkerLanes.wait_until_ready`."""
        self._replies = [
            reader_of(MessageQueue.create_from_handle(handle, 0)) for handle in reply_handles
        ]

    def wait_until_ready(self) -> None:
        """Block until both ends of every ring are connected."""
        for ring in self._rings.values():
            ring.wait_until_ready()
        for reply in self._replies:
            reply.wait_until_ready()

    def send(self, layout: Layout, replica: int, kind: str, payload: Any = None) -> None:
        """Send a message to all ranks of a replica."""
        if not (rings := self._rings):
            raise _shut_down()
        rings[layout.tp, replica].enqueue((kind, payload))

    def leave(self, layout: Layout) -> None:
        """Ask the workers of a layout to leave their lanes after what was sent before."""
        for replica in range(layout.replicas):
            self.send(layout, replica, LEAVE)

    def has_reply(self, rank: int) -> bool:
        """Whether a reply of a rank waits to be received."""
        return self._reader(rank).ready()

    def wait(self, ranks: Iterable[int], timeout: float) -> None:
        """Sleep until one of the ranks may have replied, the lanes are shut down, or time is up."""
        wait_for_any([self._reader(rank) for rank in ranks], timeout)

    def receive(self, rank: int, timeout: float) -> StepReply:
        """The next reply of a rank.

        Raises:
            TimeoutError: none came within `timeout` seconds.
            RuntimeError: the worker failed, or the lanes were shut down.
        """
        succeeded, result = self._reader(rank).dequeue(timeout=timeout)
        if not succeeded:
            raise RuntimeError(
                f"Worker {rank} failed with error '{result}', please check the stack trace above "
                "for the root cause"
            )
        assert isinstance(result, StepReply)
        return result

    def shutdown(self, layout: Layout | None) -> None:
        """Let the workers out of the lanes of `layout`, wake every reader, let go of all rings.

        vLLM removes the shared memory of a ring that nobody refers to any more. Idempotent.
        """
        # Another thread may be about to use them.
        rings, self._rings = self._rings, {}
        replies, self._replies = self._replies, []
        if layout is not None and rings:
            for replica in range(layout.replicas):
                try:
                    rings[layout.tp, replica].enqueue((LEAVE, None), timeout=0.1)
                except TimeoutError:
                    # A dead or stuck worker does not read any more; vLLM ends it by signal.
                    logger.debug("lane %s/%d is full at shutdown", layout, replica)
        for mq in (*rings.values(), *replies):
            mq.shutdown()
        for ring in rings.values():
            remove_sockets(ring.handle)

    def _reader(self, rank: int) -> Reader:
        if not (replies := self._replies):
            raise _shut_down()
        return replies[rank]


def _shut_down() -> RuntimeError:
    return RuntimeError("Executor failed, or ends: its lanes were shut down")


class WorkerLanes:
    """A worker's ends: of its replica's lane in each layout, by tp, and of its ring back."""

    def __init__(
        self, handles: LaneHandles, rank: int, layouts: Iterable[Layout], device: torch.device
    ) -> None:
        self._rings = {
            layout.tp: MessageQueue.create_from_handle(
                handles.by_replica[layout.tp, layout.replica_of(rank)], rank
            )
            for layout in layouts
        }
        self._rank = rank
        self._device = device
        address = handles.network.ranks.get(rank)
        self._reply = MessageQueue(
            1, 1 if address is None else 0, max_chunk_bytes=_CHUNK_BYTES, connect_ip=address
        )
        self._finishing: queue.SimpleQueue[Any] | None = None

    def reply_handle(self) -> Handle:
        """What the engine needs to read this rank's replies (`Lanes.connect`)."""
        return self._reply.export_handle()

    def wait_until_ready(self) -> None:
        """Counterpart of `Lanes.wait_until_ready`."""
        for ring in self._rings.values():
            ring.wait_until_ready()
        self._reply.wait_until_ready()

    def serve(self, layout: Layout, worker: PATWorkerMixin) -> None:
        """Run the steps that arrive in the lane of `layout`, until asked to leave.

        A step is an `EXECUTE` message, then a `SAMPLE` message if the step samples. First comes a
        `DRAFT_ROWS` message where drafters get earlier responses to copy from, an `ENCODER_INPUTS`
        message where the runner lacks images. The replica's leader sends one reply to a step. Its
        exception is a reply, too, which ends the engine.
        """
        ring = self._rings[layout.tp]
        leads = layout.tp_rank_of(self._rank) == 0
        while True:
            with _at_rest():
                # Not with a timeout: vLLM takes a large message's slot, waits for its bytes as
                # long, and has lost it if they come later. A worker whose engine was killed ends
                # by `exit_when_orphaned`, a Ray actor by Ray.
                kind, payload = ring.dequeue(indefinite=True)
            if kind == LEAVE:
                return
            output: Any = None
            drafts = None
            try:
                if kind == DRAFT_ROWS:
                    worker.take_draft_rows(payload)
                elif kind == ENCODER_INPUTS:
                    worker.take_encoder_inputs(payload)
                elif kind == EXECUTE:
                    output = worker.execute_model(payload)
                else:
                    output = worker.sample_tokens(payload)
                    if leads:
                        drafts = worker.drafts_of_step(constrained=payload is not None)
            except Exception as error:
                logger.exception("a step failed")
                if kind in (DRAFT_ROWS, ENCODER_INPUTS) and not leads:
                    raise  # with what it lacks it would go on otherwise than its group
                output = error
            if leads and output is not None:
                self._answer(output, drafts)

    def _answer(self, output: Any, drafts: DraftTokenIds | None) -> None:
        """Reply to the engine, once the output is on the host."""
        # Replies must keep their order, so once a thread finishes outputs, all go through it.
        if isinstance(output, AsyncModelRunnerOutput) and self._finishing is None:
            self._finishing = queue.SimpleQueue()
            threading.Thread(target=self._finish, daemon=True, name="PATAsyncOutput").start()
        if self._finishing is not None:
            self._finishing.put((output, drafts))
        else:
            self._reply.enqueue(_reply_to(output, drafts))

    def _finish(self) -> None:
        """Read outputs from the device in a thread, so that `serve` can launch the next step."""
        assert self._finishing is not None
        # A new thread uses device 0, and would make a CUDA context there.
        current_platform.set_device(self._device)
        while (output := self._finishing.get()) is not None:
            self._reply.enqueue(_reply_to(*output))

    def shutdown(self) -> None:
        """End the thread that refers to the rings. They go with the last reference to this."""
        if self._finishing is not None:
            self._finishing.put(None)
        remove_sockets(self._reply.handle)


@contextmanager
def _at_rest() -> Iterator[None]:
    """Inside, vLLM's watchdog knows that this worker waits, and afterwards that it works.

    As in vLLM's own worker loop. Or it would take a lane, which is one call, for a call that is
    stuck (`watchdog_config.dump_dir`). vLLM 0.32 has none.
    """
    module = sys.modules.get("vllm.utils.watch_dog")
    if module is None:
        yield
        return
    with module.get_watch_dog().disable():
        yield
    module.get_watch_dog().feed()


def _reply_to(output: Any, drafts: DraftTokenIds | None) -> tuple[bool, Any]:
    """The message back: True and a `StepReply`, or False and the words of the error."""
    if isinstance(output, AsyncModelRunnerOutput):
        try:
            output = output.get_output()
        except Exception as error:
            logger.exception("reading a step's output failed")
            output = error
    if isinstance(output, Exception):
        return False, str(output)
    return True, StepReply(output, drafts)
