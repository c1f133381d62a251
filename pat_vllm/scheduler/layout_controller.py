"""Decides when the engine changes its layout: on request, by policy, and back between batches."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.v1.core.sched.interface import PauseState

from pat_vllm.config import no_tp_of
from pat_vllm.layout import Layout
from pat_vllm.policy_config import IDLE_SECONDS
from pat_vllm.predictor.state import LiveState
from pat_vllm.reporting import RefusedSwitch, Report
from pat_vllm.scheduler.switching.switch import PlanningFailed, SwitchRefused, switch

if TYPE_CHECKING:
    from pat_vllm.predictor.cost import CostModel
    from pat_vllm.scheduler.monitor import Monitor
    from pat_vllm.scheduler.replica_set import ReplicaSet
    from pat_vllm.scheduler.speculation import DraftLengths

logger = init_logger(__name__)

REFUSED_BACK_OFF = 1.0
"""Seconds for which the policy is not asked after a switch was refused."""
FAILED_BACK_OFF = 60.0
"""Seconds for which the policy is not asked after planning a switch failed, a mistake of PAT's."""
REQUEST_TIMEOUT = 60.0
"""Seconds in which the engine has to take up a switch that another thread asks for."""


class LayoutController:
    """Keeps the engine in the layout that is asked for: by a user, or else by the policy.

    A batch is over when no request is left and caches are reset, weights have changed, or
    `idle_seconds` have passed. Then the engine returns to the policy's default layout, with what
    its caches hold. A layout that a user asked for holds until then. Nobody wakes the engine for
    that: before the next request is routed, it is asked whether the last batch was over.

    Attributes:
        costs: what switches take.
        drafts: the draft lengths, which follow the layout.
        layouts: those that are kept ready, base first.
        switch_id: number of the last switch.
    """

    def __init__(
        self,
        active: ReplicaSet,
        monitor: Monitor,
        costs: CostModel,
        drafts: DraftLengths,
        layouts: Sequence[Layout],
        idle_seconds: float = IDLE_SECONDS,
    ) -> None:
        """`idle_seconds`: without a request, after which a batch is over."""
        self.layouts = tuple(layouts)
        self.drafts = drafts
        self.switch_id = 0
        self._active = active
        self._monitor = monitor
        self.costs = costs
        self._forced = False
        self._idle_seconds = idle_seconds
        self._working = False
        """Whether requests have come since the engine was last seen without any."""
        self._batch_open = False
        self._return_pending = False
        """Whether the engine still has to return to the default layout, as the weights are away."""
        self._back_off_until = 0.0
        self._weights_version = active.executor.weights_version
        self._engine_thread: int | None = None
        self._switch_requests: queue.SimpleQueue[tuple[Layout, Future[bool]]] = queue.SimpleQueue()

    # ---------------------------------------------------------------- when

    def before_step(self) -> None:
        """Switch if that is due. Called on the engine's thread, before each step."""
        self._engine_thread = threading.get_ident()
        self.end_batch_if_over()
        self._run_switch_requests()
        self._follow_policy()
        self.drafts.write(self._active.layout, self._active.replicas)

    def before_arrival(self) -> None:
        """A request is about to be routed.

        vLLM's in-process engine makes no step after the last output of a batch, and none makes
        steps while nothing comes, so a batch may still have to be ended.
        """
        self._engine_thread = threading.get_ident()
        if self._batch_open or self._return_pending:
            self.finish_work()
        self._working, self._batch_open, self._return_pending = True, True, False
        version = self._active.executor.weights_version
        if version != self._weights_version:
            self._weights_version = version
            self._monitor.weights_changed()

    def finish_work(self) -> None:
        """If the last response has ended, end its batch, too, if that is over.

        A step that was started before may still be in flight.
        """
        if not self._active.num_seqs:
            self._active.drain()
            self.end_batch_if_over()

    def caches_reset(self) -> None:
        """The prefix caches were reset. If no request is left, none can be continued."""
        if not self._active.num_seqs:
            self._active.drain()
            self.end_batch_if_over(caches_were_reset=True)

    def end_batch_if_over(self, caches_were_reset: bool = False) -> None:
        """Return to the policy's default layout if no request is left and the batch is over.

        Where the weights are not there, in sleep or amid an update, as soon as they are.
        """
        if self._active.in_flight or self._active.num_seqs:
            return
        if self._working:
            self._working = False
            self._note_live()
            self._monitor.idle()
        if self._batch_open and (caches_were_reset or self._is_over()):
            self._end_batch()
            self._return_pending = True
        if self._return_pending and self._active.executor.refresh_weights():
            self._return_pending = False
            self._switch(self._monitor.policy.default_layout, "idle")

    def _is_over(self) -> bool:
        if self._active.executor.weights_version != self._weights_version:
            return True
        return time.monotonic() - self._monitor.last_end >= self._idle_seconds

    def _end_batch(self) -> None:
        self._batch_open = self._forced = False
        self.drafts.release()
        self._monitor.batch_over()

    def engine_ends(self) -> None:
        """The engine is shut down, and with it a batch of which no request is left."""
        if self._batch_open and not self._active.num_seqs:
            self._end_batch()

    def _follow_policy(self) -> None:
        active = self._active
        num_seqs = self._note_live()
        if num_seqs == 0 or self._forced or active.pause_state != PauseState.UNPAUSED:
            return
        now = time.monotonic()
        if now < self._back_off_until:
            return
        quiet = now - self._monitor.last_arrival
        requests = self._monitor.requests.arrays
        target = self._monitor.policy.choose(
            LiveState(now, active.layout, num_seqs, quiet, requests)
        )
        self._switch(target, "policy")

    def _note_live(self) -> int:
        """Have the report tell how many requests are unfinished. Returns their number."""
        by_replica = tuple([replica.num_seqs for replica in self._active.replicas])
        several = by_replica if len(by_replica) > 1 else ()
        self._monitor.history.live(self._active.layout, sum(by_replica), several)
        return sum(by_replica)

    # ---------------------------------------------------------------- on request

    @property
    def has_switch_requests(self) -> bool:
        """Whether a switch that was asked for waits for the next step."""
        return not self._switch_requests.empty()

    @property
    def on_engine_thread(self) -> bool:
        """Whether the caller may change the engine: no other thread has used it last."""
        return self._engine_thread in (None, threading.get_ident())

    def request_switch(self, tp: int) -> bool:
        """Switch now; from a thread other than the engine's, before its next step.

        Args:
            tp: the layout's.

        Returns:
            Whether the engine is in that layout; False when the switch was refused.

        Raises:
            ValueError: the engine does not keep that layout ready.
            PlanningFailed: it could not be planned, by a mistake of PAT's; generation goes on.
            TimeoutError: the engine did not come to its next step; the switch is withdrawn.
        """
        target = next((layout for layout in self.layouts if layout.tp == tp), None)
        if target is None:
            ranks = self.layouts[0].world_size
            if type(tp) is int and tp > 0 and ranks % tp:
                raise ValueError(f"cannot switch to tp={tp}: {no_tp_of(ranks)}")
            raise ValueError(
                f"cannot switch to tp={tp!r}: the engine keeps "
                f"{', '.join(map(str, self.layouts))} ready; name more in pat.layouts"
            )
        if self.on_engine_thread:
            return self._force(target)
        done: Future[bool] = Future()
        self._switch_requests.put((target, done))
        try:
            return done.result(REQUEST_TIMEOUT)
        except TimeoutError:
            if not done.cancel():
                return done.result()  # it is being made; a worker that hangs ends it
            raise TimeoutError(
                f"the engine did not come to a switch to {target} within {REQUEST_TIMEOUT:g} s; "
                "the request is withdrawn"
            ) from None

    def _run_switch_requests(self) -> None:
        while not self._switch_requests.empty():
            target, done = self._switch_requests.get()
            if not done.set_running_or_notify_cancel():
                continue  # whoever asked has given up
            try:
                done.set_result(self._force(target))
            except PlanningFailed as error:
                done.set_exception(error)
            except Exception as error:
                done.set_exception(error)
                raise

    def _force(self, target: Layout) -> bool:
        # A batch that is over ends first: its end would take the engine back again.
        self.finish_work()
        return self._switch(target, "forced")

    # ---------------------------------------------------------------- what was done

    def report(self, since: float = -math.inf) -> Report:
        """State and history of the engine. May be called from every thread.

        On the engine's thread it first ends a batch that is over, with a switch back. What a batch
        did that is not over is in the report, too.

        Args:
            since: seconds on the monotonic clock; earlier records are left out.
        """
        if self.on_engine_thread:
            self.finish_work()
        report = self._monitor.history.report(self._active.layout, self.layouts, since)
        return replace(
            report,
            predictor=self._monitor.policy.report(since),
            drafter_is_stale=self._active.executor.drafter_is_stale,
        )

    # ---------------------------------------------------------------- the switch

    def _switch(self, target: Layout, reason: str) -> bool:
        """Switch if need be. Returns whether the engine is in `target` afterwards.

        Raises:
            PlanningFailed: a switch that a user asked for could not be planned.
        """
        active = self._active
        if target == active.layout:
            if reason == "forced":
                self._forced, self._return_pending = True, False
            return True
        try:
            replicas, report = switch(
                active, target, self.costs, switch_id=self.switch_id + 1, reason=reason
            )
        except SwitchRefused as refused:
            logger.warning("PAT stays in %s, no switch to %s: %s", active.layout, target, refused)
            self._refused(target, refused.reason, str(refused), REFUSED_BACK_OFF)
            return False
        except PlanningFailed as failed:
            logger.exception(
                "PAT stays in %s: a switch to %s could not be planned, which is a mistake of "
                "PAT's. Generation goes on. Please report this traceback.",
                active.layout,
                target,
            )
            self._refused(target, "planning_failed", str(failed), FAILED_BACK_OFF)
            if reason == "forced":
                raise
            return False
        except Exception as error:
            # The switch stopped half-way: requests belong to neither layout.
            active.executor.fail(error)
            raise
        self.switch_id += 1
        self._forced, self._return_pending = reason == "forced", False
        active.replace(target, replicas)
        self.costs.observe(report)
        self._monitor.switched(report, replicas)
        return True

    def _refused(self, target: Layout, reason: str, why: str, back_off: float) -> None:
        now = time.monotonic()
        self._back_off_until = now + back_off
        source = self._active.layout
        self._monitor.refused(RefusedSwitch(now, source, target, why, reason))
