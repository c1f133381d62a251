"""A switch from layout A to layout B, step by step, as the engine core sees it.

    1. check      a reason against it that is known beforehand refuses it, and no step waits
    2. quiesce    steps in flight drain
    3. plan       requests placed, blocks allocated in B by B's own schedulers, moves listed; or all
                  left in its place (`in_place.py`)
    4. move KV    ]
    5. reshard    ] one call to all workers (`PATWorkerMixin.pat_switch`)
    6. activate   ]
    7. hand over  B's schedulers learn that the KV has arrived; recomputed and waiting requests
                  queue behind

Until the workers are called nothing is lost: a plan that fails is undone, and A goes on.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from pat_vllm.executor.messages import SwitchCommand, SwitchTimes
from pat_vllm.kv_transfer.connector import LoadMetadata
from pat_vllm.kv_transfer.plan import RequestBlocks, plan_moves
from pat_vllm.layout import Layout
from pat_vllm.patches.schedulers import linear_time_admission, queue_with_blocks
from pat_vllm.reporting import SwitchReport
from pat_vllm.routing import Placed, spread
from pat_vllm.scheduler.in_place import keeps_places
from pat_vllm.scheduler.replica import Replica

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler

    from pat_vllm.predictor.cost import CostModel
    from pat_vllm.scheduler.replica_set import ReplicaSet

logger = init_logger(__name__)


class SwitchRefused(Exception):
    """The switch cannot be made now; its text says why. Generation goes on as it was.

    Attributes:
        reason: a short name of it, one of `REFUSALS`.
    """

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class PlanningFailed(Exception):
    """Planning raised what it should not; its cause is the exception. All is as it was before."""


@dataclass(frozen=True)
class Carried:
    """A live request at a switch.

    Attributes:
        replica: where it is in the source layout.
        computed: tokens whose KV is there; 0 when it waits.
        started: whether a worker knows it.
        migrates: whether it takes its KV along.
    """

    request: Request
    replica: int
    computed: int
    started: bool
    migrates: bool


@dataclass(frozen=True)
class _Undo:
    """What planning changes in a request."""

    request: Request
    status: RequestStatus
    num_computed_tokens: int
    num_preemptions: int
    skip_reading_prefix_cache: bool
    spec_token_ids: list[int]

    @classmethod
    def of(cls, request: Request) -> _Undo:
        return cls(
            request,
            request.status,
            request.num_computed_tokens,
            request.num_preemptions,
            request.skip_reading_prefix_cache,
            request.spec_token_ids,
        )

    def apply(self) -> None:
        self.request.status = self.status
        self.request.num_computed_tokens = self.num_computed_tokens
        self.request.num_preemptions = self.num_preemptions
        self.request.skip_reading_prefix_cache = self.skip_reading_prefix_cache
        self.request.spec_token_ids = self.spec_token_ids


def switch(
    active: ReplicaSet, target: Layout, costs: CostModel, *, switch_id: int, reason: str
) -> tuple[list[Replica], SwitchReport]:
    """Carry every unfinished request of the active layout to layout `target`.

    Args:
        active: the replicas of the active layout; `ReplicaSet.replace` is for the caller to call.
        costs: chooses for each request whether it takes its KV along or computes it again.
        switch_id: number of this switch.
        reason: for the report.

    Returns:
        The replicas of `target`, and what was done.

    Raises:
        SwitchRefused: it cannot be made now; the active layout goes on.
        PlanningFailed: it could not be planned, by a mistake of PAT's; the active layout goes on.
        Exception: the workers failed, and with them the engine.
    """
    begun = time.monotonic()
    clock = _Clock()
    source = active.layout

    # 1. Check.
    _check(active)

    # 2. Quiesce.
    active.drain()
    quiesce = clock.lap()

    # 3. Plan.
    undo: list[_Undo] = []
    fresh: list[Replica] = []
    loads: list[_Load] = []
    try:
        carried = _carried(active, target, costs)
        undo = [_Undo.of(c.request) for c in carried]
        in_place = keeps_places(source, target, active.replicas) and _all_migrate(carried)
        if in_place:
            placement, blocks = {c.request.request_id: c.replica for c in carried}, []
        else:
            fresh = active.make(target)
            placement = spread(
                [Placed(c.request.request_id, c.replica, c.request.num_tokens) for c in carried],
                source,
                target,
            )
            loads = [_allocate(carried, placement, replica) for replica in fresh]
            blocks = _request_blocks(carried, active.replicas, loads)
        command = SwitchCommand(
            switch_id=switch_id,
            source=source,
            target=target,
            moves=tuple(plan_moves(source, target, active.factory.num_kv_heads, blocks)),
            placement={
                c.request.request_id: placement[c.request.request_id] for c in carried if c.started
            },
        )
    except Exception as error:
        for one in undo:
            one.apply()
        active.factory.discard(fresh)
        raise PlanningFailed(f"{type(error).__name__}: {error}") from error
    planned = clock.lap()

    # 4. - 6. Move KV, reshard weights, activate.
    times = active.executor.switch(command)
    called = clock.lap()

    # 7. Hand over.
    if in_place:
        fresh, migrated = active.replicas, sum(1 for c in carried if c.computed)
        for replica in fresh:
            queue_with_blocks(replica.scheduler)
    else:
        migrated = _hand_over(carried, placement, fresh, loads)
    finished = clock.lap()

    slowest = SwitchTimes.slowest(times)
    report = SwitchReport(
        at=begun,
        source=source,
        target=target,
        reason=reason,
        num_seqs=len(carried),
        migrated=migrated,
        recomputed=sum(1 for c in carried if c.computed) - migrated,
        kv_bytes=sum(t.kv_bytes for t in times),
        seconds=quiesce + planned + called + finished,
        quiesce=quiesce,
        plan=planned,
        states=slowest.states,
        kv=slowest.kv,
        weights=slowest.weights,
        activate=slowest.activate,
        rpc=called - slowest.states - slowest.kv - slowest.weights - slowest.activate,
        finish=finished,
        tokens=sum(c.computed for c in carried),
        weight_bytes=sum(t.weight_bytes for t in times),
    )
    logger.info(
        "PAT switched %s -> %s (%s) with %d live requests in %.1f ms: %d migrated (%.1f MB), "
        "%d recompute",
        source,
        target,
        reason,
        report.num_seqs,
        1e3 * report.seconds,
        report.migrated,
        report.kv_bytes / 1e6,
        report.recomputed,
    )
    return fresh, report


def _check(active: ReplicaSet) -> None:
    """Refuse a switch for what is known before a step waits for it."""
    if active.executor.is_sleeping:
        raise SwitchRefused("asleep", "the engine sleeps; wake it up first")
    if not active.executor.refresh_weights():
        raise SwitchRefused(
            "weights_arriving", "new weights are coming in; finish_weight_update comes first"
        )
    for replica in active.replicas:
        for request in replica.scheduler.requests.values():
            if request.resumable or request.status == RequestStatus.WAITING_FOR_STREAMING_REQ:
                raise SwitchRefused(
                    "streaming_input",
                    f"request {request.request_id} is a streaming-input session, which cannot be "
                    "carried between layouts",
                )


def _carried(active: ReplicaSet, target: Layout, costs: CostModel) -> list[Carried]:
    """The unfinished requests, by replica, in the order in which they are to be served."""
    num_seqs = active.num_seqs
    carried = []
    for replica in active.replicas:
        scheduler = replica.scheduler
        for request in (*scheduler.running, *scheduler.kv_holding_waiting, *scheduler.waiting):
            computed = request.num_computed_tokens
            takes_it = costs.choose(computed, active.layout, target, num_seqs) == "migrate"
            carried.append(
                Carried(
                    request=request,
                    replica=replica.index,
                    computed=computed,
                    # A worker knows what runs, and what was preempted after it had run.
                    started=request.status == RequestStatus.RUNNING or request.num_preemptions > 0,
                    migrates=computed > 0 and takes_it and not _must_recompute(scheduler, request),
                )
            )
    return carried


def _must_recompute(scheduler: Scheduler, request: Request) -> bool:
    """Whether a request's worker state could not follow its KV.

    Model Runner V2 keeps the prompt logprobs of a half-computed prompt to itself and starts a
    resumed request without them, so that those of the carried part would be missing.
    """
    params = request.sampling_params
    return (
        scheduler.use_v2_model_runner
        and not request.num_output_tokens
        and params is not None
        and (params.prompt_logprobs is not None or params.prompt_logprob_token_ids is not None)
    )


def _all_migrate(carried: Sequence[Carried]) -> bool:
    return all(c.migrates for c in carried if c.computed)


@dataclass(frozen=True)
class _Load:
    """What a new replica is to receive: its scheduler's step, and the blocks by request."""

    step: SchedulerOutput
    blocks: Mapping[str, tuple[int, ...]]


def _allocate(carried: Sequence[Carried], placement: Mapping[str, int], replica: Replica) -> _Load:
    """Let a new scheduler allocate blocks for the KV that migrates to it.

    It sees requests whose tokens are computed elsewhere (`PATConnector`). One scheduling pass
    admits them, as far as the pool reaches, and schedules nothing. What finds no room stays
    queued, to be computed again.
    """
    mine = [c for c in carried if c.migrates and placement[c.request.request_id] == replica.index]
    replica.connector.announce({c.request.request_id: c.computed for c in mine})
    for one in mine:
        _rewind(one)
        # Prompt logprobs forbid cache hits, but these tokens were computed for this very request.
        one.request.skip_reading_prefix_cache = False
        _enqueue(replica, one.request)
    with linear_time_admission(replica.scheduler):
        step = replica.scheduler.schedule()
    assert step.total_num_scheduled_tokens == 0, "a plan must not schedule tokens"
    replica.connector.withdraw()
    metadata = step.kv_connector_metadata
    assert isinstance(metadata, LoadMetadata)
    return _Load(step, metadata.blocks)


def _request_blocks(
    carried: Sequence[Carried], replicas: Sequence[Replica], loads: Sequence[_Load]
) -> list[RequestBlocks]:
    """Old and new blocks of each request that migrates."""
    by_id = {c.request.request_id: c for c in carried}
    return [
        RequestBlocks(
            request_id,
            by_id[request_id].replica,
            _blocks_of(replicas[by_id[request_id].replica], request_id, len(target_blocks)),
            target_replica,
            target_blocks,
        )
        for target_replica, load in enumerate(loads)
        for request_id, target_blocks in load.blocks.items()
    ]


def _blocks_of(replica: Replica, request_id: str, count: int) -> tuple[int, ...]:
    (block_ids,) = replica.scheduler.kv_cache_manager.get_block_ids(request_id)
    return tuple(block_ids[:count])


def _hand_over(
    carried: Sequence[Carried],
    placement: Mapping[str, int],
    fresh: Sequence[Replica],
    loads: Sequence[_Load],
) -> int:
    """Tell the new schedulers what has arrived, and queue the rest. Returns how many migrated."""
    for replica, load in zip(fresh, loads, strict=True):
        if load.blocks:
            arrived = KVConnectorOutput(finished_recving=set(load.blocks))
            replica.scheduler.update_from_output(
                load.step,
                ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=arrived),
            )
    for one in carried:
        if not one.migrates:
            _rewind(one)
            _enqueue(fresh[placement[one.request.request_id]], one.request)
        one.request.skip_reading_prefix_cache = one.request.get_skip_reading_prefix_cache()
    return sum(len(load.blocks) for load in loads)


def _rewind(one: Carried) -> None:
    """Make a request look to its new scheduler like a preempted one, or leave it a new one."""
    request = one.request
    request.num_computed_tokens = 0
    request.spec_token_ids = []
    # Steps are counted by each scheduler for itself. A new one has not got as far, and would hold
    # a half-computed request back until it has (`AsyncScheduler` with Model Runner V2).
    request.next_decode_eligible_step = 0
    if request.status == RequestStatus.RUNNING:
        # How vLLM tells a request that a worker knows from one that it does not.
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
    elif request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        # Carried by the previous switch, and not run since.
        request.status = RequestStatus.PREEMPTED if one.started else RequestStatus.WAITING


def _enqueue(replica: Replica, request: Request) -> None:
    """Add a request that was queued before: its events were reported."""
    events, request.events = request.events, []
    replica.scheduler.add_request(request)
    request.events = events


class _Clock:
    def __init__(self) -> None:
        self._last = time.perf_counter()

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.perf_counter()
        self._last, last = now, self._last
        return now - last
