"""The plan of a switch: to which new replica each request goes, and whether its KV goes along."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from pat_vllm.executor.messages import SwitchCommand
from pat_vllm.kv_transfer.connector import LoadMetadata
from pat_vllm.kv_transfer.placement import RequestPlacement, place_requests
from pat_vllm.kv_transfer.plan import BlockMove, RequestBlocks, plan_moves
from pat_vllm.layout import Layout
from pat_vllm.models.kinds import NULL_BLOCK, Kinds, block_size, densest
from pat_vllm.patches.schedulers import linear_time_admission
from pat_vllm.scheduler.replica import Replica
from pat_vllm.scheduler.switching.chains import Chain, PlacedChain
from pat_vllm.scheduler.switching.prefix_cache import carry_cached, num_cached, place_chains

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

    from pat_vllm.scheduler.replica_set import ReplicaSet


@dataclass(frozen=True)
class CarriedRequest:
    """A live request at a switch.

    Attributes:
        replica: index of its replica in the source layout.
        computed: tokens whose KV it has there.
        started: whether model runners know it, since it runs or has run.
        migrates: whether it is to take its KV along.
        reads_cache: whether the prefix that is cached for it goes along, if its own KV does not.
    """

    request: Request
    replica: int
    computed: int
    started: bool
    migrates: bool
    reads_cache: bool


@dataclass(frozen=True)
class _Admission:
    """The requests that a new replica receives with their KV.

    Attributes:
        step: the step in which its scheduler allocated their blocks. It schedules no tokens.
        blocks: their block ids, by request id and KV cache group.
    """

    step: SchedulerOutput
    blocks: Mapping[str, tuple[list[int], ...]]


@dataclass(frozen=True)
class SwitchPlan:
    """What the workers are to do at a switch, and what the schedulers do after it.

    Attributes:
        carried: the unfinished requests.
        replicas: those of the target layout.
        placement: index of each request's replica there, by request id.
        moves: the KV blocks that move.
        cached_tokens: tokens of the blocks in `moves` that are cached prefixes, not a request's KV.
        admissions: what each of `replicas` receives.
    """

    carried: Sequence[CarriedRequest]
    replicas: list[Replica]
    placement: Mapping[str, int]
    moves: tuple[BlockMove, ...]
    cached_tokens: int
    admissions: Sequence[_Admission]

    @classmethod
    def of(
        cls,
        carried: Sequence[CarriedRequest],
        chains: Sequence[Chain] | None,
        active: ReplicaSet,
        target: Layout,
        new_replicas: list[Replica],
    ) -> SwitchPlan:
        """Place the requests in the `new_replicas` of `target`, which allocate their blocks.

        Requests that migrate are changed: `_allocate` enqueues them in the new schedulers. Blocks
        that these leave free get cached KV. The prefixes that requests without KV of their own will
        read come first. Unless `chains` is None, prefixes that later requests may ask for follow:
        those of migrating requests, then those of ended ones (`chains`, the last ended first).
        """
        source = active.layout
        placement = place_requests(
            [
                RequestPlacement(c.request.request_id, c.replica, c.request.num_tokens)
                for c in carried
            ],
            source,
            target,
        )
        admissions = [_allocate(carried, placement, replica) for replica in new_replicas]
        cached = _carry_caches(carried, chains, active, target, new_replicas, placement, admissions)
        blocks = [*_request_blocks(carried, active.replicas, admissions), *cached]
        kinds = active.factory.kinds
        moves = plan_moves(source, target, kinds, blocks)
        # Groups keep different numbers of blocks: tokens are counted in the one that keeps most.
        group = densest(kinds)
        cached_blocks = sum(len(moved.target_blocks) for moved in cached if moved.group == group)
        cached_tokens = cached_blocks * new_replicas[0].scheduler.block_size
        return cls(carried, new_replicas, placement, tuple(moves), cached_tokens, admissions)

    def command(self, switch_id: int, source: Layout, target: Layout) -> SwitchCommand:
        """The message to the workers, which names the requests that model runners know."""
        started = [c.request.request_id for c in self.carried if c.started]
        placement = {request_id: self.placement[request_id] for request_id in started}
        return SwitchCommand(switch_id, source, target, self.moves, placement)

    def hand_over(self) -> int:
        """Tell the new schedulers what has arrived, and queue the rest there.

        Returns:
            Number of requests that took their KV along.
        """
        for replica, admission in zip(self.replicas, self.admissions, strict=True):
            if admission.blocks:
                arrived = KVConnectorOutput(finished_recving=set(admission.blocks))
                replica.scheduler.update_from_output(
                    admission.step,
                    ModelRunnerOutput(req_ids=[], req_id_to_index={}, kv_connector_output=arrived),
                )
        for c in self.carried:
            if not c.migrates:
                _rewind(c)
                _enqueue(self.replicas[self.placement[c.request.request_id]], c.request)
            c.request.skip_reading_prefix_cache = c.request.get_skip_reading_prefix_cache()
        return sum(len(admission.blocks) for admission in self.admissions)


def _allocate(
    carried: Sequence[CarriedRequest], placement: Mapping[str, int], replica: Replica
) -> _Admission:
    """Let a new scheduler allocate blocks for the KV that migrates to it.

    `PATConnector` (`kv_transfer/connector.py`) tells it that these requests' tokens are computed
    elsewhere. One call of its `schedule` admits the requests for which its block pool has room,
    and schedules no tokens. The others stay queued, to be computed again.
    """
    arriving = [
        c for c in carried if c.migrates and placement[c.request.request_id] == replica.index
    ]
    replica.connector.announce({c.request.request_id: c.computed for c in arriving})
    for c in arriving:
        _rewind(c)
        # Prompt logprobs forbid cache hits, but these tokens were computed for this very request.
        c.request.skip_reading_prefix_cache = False
        _enqueue(replica, c.request)
    with linear_time_admission(replica.scheduler):
        step = replica.scheduler.schedule()
    assert step.total_num_scheduled_tokens == 0, "a plan must not schedule tokens"
    replica.connector.withdraw()
    metadata = step.kv_connector_metadata
    assert isinstance(metadata, LoadMetadata)
    return _Admission(step, metadata.blocks)


def _request_blocks(
    carried: Sequence[CarriedRequest], replicas: Sequence[Replica], admissions: Sequence[_Admission]
) -> list[RequestBlocks]:
    """Old and new blocks of each request that migrates, for each KV cache group."""
    by_id = {c.request.request_id: c for c in carried}
    blocks = []
    for target_replica, admission in enumerate(admissions):
        for request_id, target_blocks in admission.blocks.items():
            request = by_id[request_id]
            replica = replicas[request.replica]
            source_blocks = replica.scheduler.kv_cache_manager.get_block_ids(request_id)
            for group, kind in enumerate(replica.kinds):
                held = kind.held(request.computed)
                # vLLM may still have blocks in the source that no step will read.
                old = source_blocks[group][held.start : held.stop]
                new = target_blocks[group][held.start : held.stop]
                if NULL_BLOCK in (*old[:1], *new[:1]):  # all null ones come first
                    raise ValueError(
                        f"request {request_id}, with {request.computed} tokens computed, has null "
                        f"blocks in group {group}, of {kind}"
                    )
                blocks.append(
                    RequestBlocks(request_id, replica.index, old, target_replica, new, group)
                )
    return blocks


def _carry_caches(
    carried: Sequence[CarriedRequest],
    chains: Sequence[Chain] | None,
    active: ReplicaSet,
    target: Layout,
    new_replicas: Sequence[Replica],
    placement: Mapping[str, int],
    admissions: Sequence[_Admission],
) -> list[RequestBlocks]:
    """Fill blocks left free with cached prefixes, as `SwitchPlan.of` says; return which move."""
    loaded = {id_ for admission in admissions for id_ in admission.blocks}
    wanted = [
        PlacedChain(hashes[:cached], c.replica, placement[c.request.request_id])
        for c in carried
        if c.reads_cache and c.request.request_id not in loaded
        for hashes in [c.request.block_hashes]
        if (cached := num_cached(active.replicas[c.replica], hashes))
    ]
    if chains is not None:
        wanted += [
            PlacedChain(chain, c.replica, placement[c.request.request_id])
            for c in carried
            if c.request.request_id in loaded
            and (chain := _prefix_to_complete(c, active.factory.kinds))
        ]
        wanted += place_chains(chains, active.replicas, active.layout, target)
    if not wanted:
        return []
    held: list[list[set[bytes]]] = [[set() for _ in replica.kinds] for replica in new_replicas]
    for c in carried:
        if c.request.request_id in loaded:
            index = placement[c.request.request_id]
            full = c.computed // new_replicas[index].scheduler.block_size
            for kind, hashes in zip(new_replicas[index].kinds, held[index], strict=True):
                first = kind.held(c.computed).start
                hashes.update(c.request.block_hashes[first:full])
    return carry_cached(wanted, held, active.replicas, new_replicas)


def _prefix_to_complete(carried: CarriedRequest, kinds: Kinds) -> Chain:
    """The full blocks of a migrating request, if a cache hit of them needs more blocks than move.

    A hit needs what `StateKind.needed` names for the full blocks. For all tokens of the request it
    may name later ones, as a sliding window has moved on; only these move with the request.

    Returns:
        Their hashes; none if the blocks that move are enough for a hit.
    """
    size = block_size(kinds)
    full = carried.computed // size
    if all(kind.needed(full).start == kind.held(carried.computed).start for kind in kinds):
        return ()
    return carried.request.block_hashes[:full]


def _rewind(carried: CarriedRequest) -> None:
    """Make a request look preempted to its new scheduler if it has started, else new."""
    request = carried.request
    request.num_computed_tokens = 0
    request.spec_token_ids = []
    # Steps are counted by each scheduler for itself. A new one has not got as far, and would hold
    # a half-computed request back until it has (`AsyncScheduler` with Model Runner V2).
    request.next_decode_eligible_step = 0
    if request.status == RequestStatus.RUNNING:
        # By this number vLLM tells a request that model runners know from one that they do not.
        request.num_preemptions += 1
        request.status = RequestStatus.PREEMPTED
    elif request.status == RequestStatus.WAITING_FOR_REMOTE_KVS:
        # The previous switch carried it, and it has not run since.
        request.status = RequestStatus.PREEMPTED if carried.started else RequestStatus.WAITING


def _enqueue(replica: Replica, request: Request) -> None:
    """Add a carried request to a new scheduler, as vLLM does when one arrives.

    vLLM would reset its draft counts, and report that it was queued: both are kept as they were.
    """
    drafts, events = request.spec_decode_metrics, request.events
    request.events = []
    replica.scheduler.add_request(request)
    request.events, request.spec_decode_metrics = events, drafts
