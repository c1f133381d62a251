"""A switch from layout A to layout B, step by step, as the engine core sees it.

    1. check      a reason against it that is known beforehand refuses it, and no step waits
    2. quiesce    steps in flight drain
    3. plan       requests placed, blocks allocated in B by B's own schedulers, moves listed
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
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.v1.request import Request, RequestStatus

from pat_vllm.executor.messages import SwitchCommand, SwitchTimes
from pat_vllm.layout import Layout
from pat_vllm.reporting import SwitchReport
from pat_vllm.scheduler.images import has_images
from pat_vllm.scheduler.replica import Replica
from pat_vllm.scheduler.switching.switch_plan import CarriedRequest, SwitchPlan

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

    from pat_vllm.predictor.cost import CostModel
    from pat_vllm.scheduler.replica_set import ReplicaSet

logger = init_logger(__name__)


class SwitchRefused(Exception):
    """The switch cannot be made now; its text says why. Generation goes on as it was.

    Attributes:
        reason: a short name of why, one of `REFUSALS` (`reporting/values.py`).
    """

    def __init__(self, reason: str, why: str) -> None:
        super().__init__(why)
        self.reason = reason


class PlanningFailed(Exception):
    """Planning raised an exception that it should not, which is `__cause__`. The plan is undone."""


_CHANGED_BY_PLANNING = (
    "status",
    "num_computed_tokens",
    "num_preemptions",
    "skip_reading_prefix_cache",
    "spec_token_ids",
)
"""The fields of a request that planning changes and an undone plan restores. Planning leaves the
old layout's queues and blocks alone."""


def switch(
    active: ReplicaSet, target: Layout, costs: CostModel, *, switch_id: int, reason: str
) -> tuple[list[Replica], SwitchReport]:
    """Carry every unfinished request of the active layout to layout `target`.

    `LayoutController._switch` calls it, then `ReplicaSet.replace` with what it returns.

    Args:
        active: the replicas of the active layout, which it leaves in place.
        costs: chooses for each request whether it takes its KV along or computes it again.
        switch_id: number of this switch.
        reason: who asks for it, one of `SWITCH_REASONS` (`reporting/values.py`).

    Returns:
        The replicas of `target`, and what was done.

    Raises:
        SwitchRefused: it cannot be made now; the active layout goes on.
        PlanningFailed: it could not be planned, by a mistake of PAT's; the active layout goes on.
        Exception: the workers failed, and with them the engine.
    """
    begun, clock = time.monotonic(), _Clock()
    source = active.layout

    # 1. Check.
    _check(active)

    # 2. Quiesce.
    active.drain()
    clock.lap("quiesce")

    # 3. Plan.
    plan, command = _plan(active, target, costs, switch_id)
    clock.lap("plan")

    # 4. - 6. Move KV, reshard weights, activate.
    times = active.executor.switch(command)
    clock.lap("call")

    # 7. Hand over.
    migrated = plan.hand_over()
    clock.lap("finish")

    report = _report(begun, source, target, reason, plan, migrated, clock.laps, times)
    return plan.replicas, report


def _check(active: ReplicaSet) -> None:
    """Refuse a switch for reasons that are known before steps are drained."""
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


def _plan(
    active: ReplicaSet, target: Layout, costs: CostModel, switch_id: int
) -> tuple[SwitchPlan, SwitchCommand]:
    """Plan the switch.

    Returns:
        The plan, and what the workers are told.

    Raises:
        PlanningFailed: all is as it was before.
    """
    before: list[tuple[Request, dict[str, Any]]] = []
    new_replicas: list[Replica] = []
    try:
        carried = _carried(active, target, costs)
        for c in carried:
            before.append((c.request, {f: getattr(c.request, f) for f in _CHANGED_BY_PLANNING}))
        new_replicas = active.make(target)
        moves_caches = costs.mode != "recompute" and active.may_carry_caches
        chains = active.chains.latest() if moves_caches else None
        plan = SwitchPlan.of(carried, chains, active, target, new_replicas)
        return plan, plan.command(switch_id, active.layout, target)
    except Exception as error:
        for request, fields in before:
            for name, value in fields.items():
                setattr(request, name, value)
        active.factory.discard(new_replicas)
        raise PlanningFailed(f"{type(error).__name__}: {error}") from error


def _carried(active: ReplicaSet, target: Layout, costs: CostModel) -> list[CarriedRequest]:
    """The unfinished requests in the order in which the target layout is to serve them.

    Requests that have started come first, replica by replica, then the others by arrival. Where
    computing again is cheaper than moving KV, a request does not read carried caches either. Of
    images it is taken not to be: what a tower costs is not measured.
    """
    num_seqs = active.num_seqs
    carried = []
    for replica in active.replicas:
        scheduler = replica.scheduler
        # In vLLM's queue `kv_holding_waiting` are requests that have not run since the last switch.
        for request in (*scheduler.running, *scheduler.kv_holding_waiting, *scheduler.waiting):
            computed = request.num_computed_tokens
            move_is_cheaper = costs.mode != "recompute" and (
                has_images(request, computed)
                or costs.choose(computed, active.layout, target, num_seqs) == "migrate"
            )
            carried.append(
                CarriedRequest(
                    request=request,
                    replica=replica.index,
                    computed=computed,
                    # A worker knows what runs, and what was preempted after it had run.
                    started=request.status == RequestStatus.RUNNING or request.num_preemptions > 0,
                    migrates=computed > 0
                    and move_is_cheaper
                    and not _must_recompute(scheduler, request),
                    reads_cache=move_is_cheaper
                    and active.may_carry_caches
                    and not request.get_skip_reading_prefix_cache(),
                )
            )
    carried.sort(key=lambda c: (0, 0.0) if c.started else (1, c.request.arrival_time))
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


def _report(
    begun: float,
    source: Layout,
    target: Layout,
    reason: str,
    plan: SwitchPlan,
    migrated: int,
    laps: Mapping[str, float],
    times: Sequence[SwitchTimes],
) -> SwitchReport:
    """Make the report of a switch, and log its main figures."""
    slowest = SwitchTimes.slowest(times)
    report = SwitchReport(
        at=begun,
        source=source,
        target=target,
        reason=reason,
        num_seqs=len(plan.carried),
        migrated=migrated,
        recomputed=sum(1 for c in plan.carried if c.computed) - migrated,
        kv_bytes=sum(t.kv_bytes for t in times),
        seconds=sum(laps.values()),
        quiesce=laps["quiesce"],
        plan=laps["plan"],
        states=slowest.states,
        kv=slowest.kv,
        weights=slowest.weights,
        activate=slowest.activate,
        rpc=laps["call"] - slowest.states - slowest.kv - slowest.weights - slowest.activate,
        finish=laps["finish"],
        tokens=sum(c.computed for c in plan.carried),
        cached_tokens=plan.cached_tokens,
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
    return report


class _Clock:
    """Times the parts of a switch.

    Attributes:
        laps: seconds of each part.
    """

    def __init__(self) -> None:
        self.laps: dict[str, float] = {}
        self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Note that `part` has ended. The next one begins."""
        now = time.perf_counter()
        self.laps[part] = now - self._last
        self._last = now
