"""The engine core's end of the workers: vLLM's executor, with a step for each replica, and a layout
that can change.

Steps travel in lanes (`lanes.py`), all other calls on vLLM's own ring. A worker reads one of the
two at a time, so it leaves its lane before a call and enters it again before a step.
"""

from __future__ import annotations

import functools
import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import cloudpickle
import vllm.envs as envs
from vllm.logger import init_logger
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from pat_vllm.executor import rpc
from pat_vllm.executor.lanes import DRAFT_ROWS, ENCODER_INPUTS, EXECUTE, SAMPLE, Lanes, Network
from pat_vllm.executor.messages import (
    PATGrammarOutput,
    PATSchedulerOutput,
    Refreshed,
    ResolvedKernels,
    SwitchCommand,
    SwitchTimes,
    TransferRates,
)
from pat_vllm.executor.os_resources import OsResourceCleanup
from pat_vllm.executor.parent_watchdog import end_when_orphaned
from pat_vllm.executor.replies import (
    RECHECK_SECONDS,
    Deferred,
    OwnRepliesMixin,
    checked,
    completed,
)
from pat_vllm.executor.weight_calls import WeightCalls, discards_weights
from pat_vllm.layout import Layout
from pat_vllm.patches.dead_engine import (
    describe_exit,
    end_in_order,
    let_others_remove_rings,
    let_signals_meet,
    tell_cause_of_death,
)
from pat_vllm.start.setup import Setup

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

logger = init_logger(__name__)

_IDLE_WAIT_SECONDS = 5e-3
"""Seconds to wait for the busy replicas while another is idle, before looking for new requests:
the longest that a request waits for an idle replica."""
_NO_REPLY_RANK = -1
"""Rank that is asked to reply to a call. No rank has this one, so none replies."""

_executors: weakref.WeakValueDictionary[str, PATExecutorMixin] = weakref.WeakValueDictionary()


def executor_of(vllm_config: VllmConfig) -> PATExecutorMixin:
    """The executor of the engine that this config belongs to.

    vLLM builds the executor, then the scheduler, and gives neither the other. Both get the same
    config.
    """
    return _executors[vllm_config.instance_id]


@dataclass(frozen=True)
class StepResult:
    """A finished step of one replica; `drafts` as in `StepReply`."""

    replica: int
    output: ModelRunnerOutput
    seconds: float
    drafts: DraftTokenIds | None = None


P = ParamSpec("P")
R = TypeVar("R")


def _fatal(
    method: Callable[Concatenate[PATExecutorMixin, P], R],
) -> Callable[Concatenate[PATExecutorMixin, P], R]:
    """Have an exception of a method end the engine; see `PATExecutorMixin.fail`."""

    @functools.wraps(method)
    def call(self: PATExecutorMixin, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(self, *args, **kwargs)
        except Exception as error:
            self.fail(error)
            raise

    return call


class PATExecutorMixin(OwnRepliesMixin):
    """What PAT adds to a vLLM executor that speaks `MultiprocExecutor`'s protocol."""

    is_pat = True
    failure_callback: Callable[[], None] | None
    weights_version = 0
    """Grows with each call that may have written weights."""
    cause = ""
    """Why the engine has failed, in words."""
    _network = Network()
    _missing = False
    """Whether the last call that may have written weights left the base layout's incomplete."""
    drafter_is_stale = False
    """Whether the target's weights have been updated since the drafter's were."""
    _told_of_drafter = False
    kv_is_void = False
    """Whether new scales of the KV cache have come, under which it holds nothing of use; until its
    reader has dropped it and says False."""
    _weights_called = 0.0
    """When that call came, or returned where its caller waited; seconds, monotonic clock."""

    # ---------------------------------------------------------------- start and stop

    def _post_init_executor(self) -> None:
        super()._post_init_executor()
        config = self.vllm_config
        self.setup = Setup.of(config)
        self.layout: Layout = self.setup.default_layout
        self._lanes: Lanes | None = None
        self._os_resources = OsResourceCleanup(mq.handle for mq in self.response_mqs)
        self._in_lanes = False
        self._pending: dict[int, deque[float]] = {}
        """When each step in flight was sent, by replica; oldest first, `time.perf_counter`."""
        self._unsampled: list[int] = []
        """Replicas whose last `EXECUTE` message waits for its `SAMPLE` message."""
        self._commands: dict[str, Callable[..., Any]] = {}
        self._stale = False
        """Whether the other layouts' weights may differ from the base layout's."""
        self._weight_calls = WeightCalls(self.setup.options.readonly_calls)
        _executors[config.instance_id] = self
        # How this process ends: without its front end, in order, and with a cause in words.
        end_when_orphaned(self.shutdown)
        tell_cause_of_death()
        end_in_order()
        let_signals_meet()
        let_others_remove_rings()

    def compile_or_warm_up_model(self) -> None:
        """Warm every layout up, then open the lanes: from here on there are steps."""
        super().compile_or_warm_up_model()
        lanes = Lanes(self.setup.layouts, self._network)
        replies = self.collective_rpc(rpc.OPEN_LANES, args=(lanes.handles(),))
        lanes.connect([handle for handle, _ in replies])
        self._os_resources.add(resources for _, resources in replies)
        ready = self.collective_rpc(rpc.LANES_READY, non_block=True)
        # If a worker dies now, `lanes.wait_until_ready` never returns, but its reply fails.
        opened = threading.Event()

        def open_lanes() -> None:
            lanes.wait_until_ready()
            opened.set()

        threading.Thread(target=open_lanes, daemon=True, name="PATLanesReady").start()
        ready.result()
        while not opened.wait(RECHECK_SECONDS):
            self._raise_if_failed()
        self._lanes = lanes

    def shutdown(self) -> None:
        """Stop the workers, wherever they are, and remove what killed ones leave. Idempotent."""
        if (lanes := getattr(self, "_lanes", None)) is not None:
            lanes.shutdown(self.layout if self._in_lanes else None)
            self._in_lanes = False
        os_resources = getattr(self, "_os_resources", None)
        if os_resources is not None and self.is_failed:
            self._note_cause()
            # Workers may be stuck, and vLLM kills an engine core that takes long to end.
            os_resources.remove()
        super().shutdown()
        if os_resources is not None:
            os_resources.remove()

    def fail(self, error: Exception) -> None:
        """Have vLLM end the engine, as when a worker has died. Idempotent.

        An exception alone does not end it during a call of the front end: vLLM's engine core
        answers with the exception and goes on.
        """
        self._note_cause(error)
        self.is_failed = True
        callback, self.failure_callback = self.failure_callback, None
        if callback is not None:
            callback()

    def _note_cause(self, error: Exception | None = None) -> None:
        """Note which workers have ended, or the error; the first cause holds."""
        self.cause = self.cause or "; ".join(self._ended_workers()) or str(error or "")

    def _ended_workers(self) -> list[str]:
        """Workers that have ended, and how, in words, where the launcher can tell."""
        return []

    # ---------------------------------------------------------------- control

    def register_command(self, name: str, command: Callable[..., Any]) -> None:
        """Let front ends call `command` in the engine-core process as `collective_rpc(name)`."""
        self._commands[name] = command

    def collective_rpc(  # type: ignore[override]  # vLLM's further options are passed on
        self,
        method: Any,
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
        non_block: bool = False,
        unique_reply_rank: int | None = None,
        **options: Any,
    ) -> Any:
        """As in vLLM, except for what follows.

        Registered commands run here, in the engine core. What is neither PAT's nor listed as
        harmless may update weights: it runs on the base layout's model, and the weights of the
        other layouts are derived from that again before the next step.

        Raises:
            RuntimeError: a worker failed; with `non_block`, the returned future raises it.
        """
        if isinstance(method, str) and method in self._commands:
            result = self._commands[method](*args, **(kwargs or {}))
            reply = result if unique_reply_rank is not None else [result]
            return completed(reply) if non_block else reply
        self._leave_lanes()
        if method == "compile_or_warm_up_model":
            # Ranks wait for each other in it, and one may find no memory.
            return self._call_together(method, timeout=math.inf)
        if non_block:
            options["non_block"] = True
        if unique_reply_rank is not None:
            options["unique_reply_rank"] = unique_reply_rank
        if self._lanes is None or self._weight_calls.keeps_weights(method):
            return self._call(method, timeout, args, kwargs, **options)
        self._stale, self._missing = True, False
        self._weights_called = time.monotonic()
        self.weights_version += 1
        if discards_weights(method):
            return self._call(method, timeout, args, kwargs, **options)
        call = method if isinstance(method, str) else cloudpickle.dumps(method)
        try:
            if options:  # vLLM reads the replies
                in_base = rpc.CALL_IN_BASE, timeout, (call, args, kwargs or {})
                return checked(self._call(*in_base, **options))
            return self._call_of_user(call, args, kwargs or {}, timeout=timeout)
        finally:
            self._weights_called = time.monotonic()

    @_fatal
    def refresh_weights(self) -> bool:
        """Derive the weights of the other layouts again, if the base layout's may have changed.

        Nothing is done while those are not there: while the engine sleeps, and between vLLM's
        `start_weight_update` and `finish_weight_update`, which is found out once for each call. A
        step can be made then, too, to abort a request.

        Returns:
            Whether every layout has its weights.

        Raises:
            RuntimeError: a worker failed.
            TimeoutError: see `_call_together`.
        """
        if self._stale and not self._missing and not self.is_sleeping:
            began = time.perf_counter()
            self._leave_lanes()
            replies = [Refreshed(reply) for reply in self._call_together(rpc.REFRESH_WEIGHTS)]
            self._stale = self._missing = not all(replies)
            self.kv_is_void |= any(Refreshed.WITH_OTHER_KV_SCALES in reply for reply in replies)
            if not self._stale:
                self._note_stale_drafter(replies)
            self._weight_calls.refreshed(time.perf_counter() - began)
        return not self._stale

    def _note_stale_drafter(self, replies: Iterable[Refreshed]) -> None:
        """Say so once if the drafter has not been updated with its target."""
        self.drafter_is_stale = any(Refreshed.WITH_STALE_DRAFTER in reply for reply in replies)
        if self.drafter_is_stale and not self._told_of_drafter:
            self._told_of_drafter = True
            logger.warning(
                "PAT: new weights have come for the model, but none for its drafter. Outputs stay "
                "right, but fewer drafts will be accepted. Update it too: its model is "
                "`model_runner.drafter.model`; vLLM's own call is start_draft_weight_update."
            )

    def waits_for_weights(self) -> bool:
        """Whether no step can be made until a call brings the rest of new weights.

        Not for ever: if no further call comes within `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`, a step
        is an error that says so.
        """
        if self.refresh_weights():
            return False
        waited = time.monotonic() - self._weights_called
        return waited < envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS

    def _leave_lanes(self) -> None:
        """Have the workers read vLLM's own ring again, after the steps that were sent before."""
        if self._in_lanes:
            assert self._lanes is not None
            self._lanes.leave(self.layout)
            self._in_lanes = False

    def _enter_lanes(self) -> None:
        """Have the workers read the lanes of the active layout, by one call on vLLM's own ring."""
        if not self._in_lanes:
            self.refresh_weights()
            ring = self.rpc_broadcast_mq
            assert ring is not None
            ring.enqueue((rpc.SERVE_LANE, (), {}, _NO_REPLY_RANK))
            self._in_lanes = True

    # ---------------------------------------------------------------- steps

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Any:
        """Start each replica's step in its own lane (3. in `scheduler/scheduler.py`).

        The outputs come from `sample_tokens`.
        """
        assert isinstance(scheduler_output, PATSchedulerOutput)
        self._raise_if_failed()
        steps = scheduler_output.steps.values()
        has_tokens = self._stale and any(step.total_num_scheduled_tokens for step in steps)
        if has_tokens and not self.refresh_weights():
            raise RuntimeError(
                "requests have waited in the middle of a weight update, and no call has brought "
                "the rest of the weights; finish_weight_update comes first"
            )
        for replica, step in scheduler_output.steps.items():
            if (rows := scheduler_output.draft_rows.get(replica)) is not None:
                self._send(replica, DRAFT_ROWS, rows)
            if (inputs := scheduler_output.encoder_inputs.get(replica)) is not None:
                self._send(replica, ENCODER_INPUTS, inputs)
            self._send(replica, EXECUTE, step)
            self._pending.setdefault(replica, deque()).append(time.perf_counter())
            if step.total_num_scheduled_tokens:
                self._unsampled.append(replica)
        if not non_block:
            return None
        # Without a step in flight there is nothing to sample, and vLLM takes this for the output.
        return completed(None if scheduler_output.total_num_scheduled_tokens else [])

    def sample_tokens(self, grammar_output: GrammarOutput | None, non_block: bool = False) -> Any:
        """Sample in the replicas whose steps were started last, and wait (4.).

        Returns:
            The steps that have finished (`list[StepResult]`), of any replica; at least one,
            except that an idle replica bounds the wait. With `non_block`, a future of them.
        """
        assert isinstance(grammar_output, PATGrammarOutput | None)
        of_replica = grammar_output.of_replica if grammar_output else {}
        for replica in self._unsampled:
            self._send(replica, SAMPLE, of_replica.get(replica))
        self._unsampled.clear()
        return Deferred(self.finished) if non_block else self.finished()

    @_fatal
    def finished(self, wait_for_all: bool = False) -> list[StepResult]:
        """Results of finished steps, in each replica's order.

        Args:
            wait_for_all: return when no step is in flight.

        Raises:
            RuntimeError: a worker failed.
            TimeoutError: a step took longer than `VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS`.
        """
        assert self._lanes is not None
        self._raise_if_failed()
        results: list[StepResult] = []
        busy = self._busy()
        idle = len(busy) < self.layout.replicas
        give_up = time.perf_counter() + _IDLE_WAIT_SECONDS
        while busy:
            for replica in busy:
                # The wait for the only busy replica may block, as in vLLM.
                alone = len(busy) == 1 and (wait_for_all or not idle) and not results
                if (result := self._receive(replica, block=alone)) is not None:
                    results.append(result)
            busy = self._busy()
            if not busy or (results and not wait_for_all):
                break
            if idle and not wait_for_all and time.perf_counter() > give_up:
                break
            self._raise_if_failed()
            self._lanes.wait(
                (self.layout.leader_of(replica) for replica in busy),
                timeout=_IDLE_WAIT_SECONDS if idle else RECHECK_SECONDS,
            )
        return results

    def take_draft_token_ids(self) -> DraftTokenIds | None:
        """Return None: drafts come with the results of their replicas' steps."""
        return None

    def _busy(self) -> list[int]:
        """Replicas with a step in flight."""
        return [replica for replica, sent in self._pending.items() if sent]

    def _receive(self, replica: int, block: bool) -> StepResult | None:
        assert self._lanes is not None
        leader = self.layout.leader_of(replica)
        sent = self._pending[replica][0]
        left = sent + envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS - time.perf_counter()
        if not block and left > 0 and not self._lanes.has_reply(leader):
            return None
        try:
            reply = self._lanes.receive(leader, timeout=left)
        except TimeoutError:
            raise TimeoutError(f"a step of replica {replica} timed out") from None
        self._pending[replica].popleft()
        return StepResult(replica, reply.output, time.perf_counter() - sent, reply.drafts)

    def _send(self, replica: int, kind: str, payload: Any) -> None:
        assert self._lanes is not None
        self._enter_lanes()
        self._lanes.send(self.layout, replica, kind, payload)

    # ---------------------------------------------------------------- layouts

    @_fatal
    def switch(self, command: SwitchCommand) -> list[SwitchTimes]:
        """Have all ranks carry out `PATWorkerMixin.pat_switch`. No step may be in flight.

        Returns:
            Each rank's reply, by rank. It means that the rank is in the target layout.

        Raises:
            RuntimeError: a worker failed.
            TimeoutError: see `_call_together`.
        """
        assert not any(self._pending.values()), "a step is in flight"
        self._raise_if_failed()
        self.refresh_weights()
        self._leave_lanes()
        times: list[SwitchTimes] = self._call_together(rpc.SWITCH, command)
        self.layout = command.target
        self._pending.clear()
        return times

    def transfer_rates(self) -> TransferRates:
        """Rates that the workers measured while warming up; those of the slowest rank."""
        rates: list[TransferRates] = self.collective_rpc(rpc.TRANSFER_RATES)
        return TransferRates(
            bandwidth=min(r.bandwidth for r in rates),
            prefill_rate={
                layout: min(r.prefill_rate[layout] for r in rates)
                for layout in rates[0].prefill_rate
            },
        )

    def resolved_kernels(self) -> ResolvedKernels:
        """What the workers chose by themselves; all of them choose alike."""
        first, *_ = self.collective_rpc(rpc.RESOLVED_KERNELS)
        assert isinstance(first, ResolvedKernels)
        return first

    def reseed(self, salt: int) -> None:
        """Seed unseeded sampling on all ranks; another salt gives other tokens."""
        self.collective_rpc(rpc.RESEED, args=(salt,))


class PATExecutor(PATExecutorMixin, MultiprocExecutor):
    """Adaptive tensor parallelism over local worker processes."""

    supports_pp = False

    def _ended_workers(self) -> list[str]:
        return [
            f"worker {worker.rank} (pid {worker.proc.pid}) {describe_exit(worker.proc.exitcode)}"
            for worker in getattr(self, "workers", ())
            if worker.proc.exitcode is not None
        ]
