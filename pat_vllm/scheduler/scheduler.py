"""PATScheduler: a scheduler of schedulers, one stock vLLM scheduler per replica."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Hashable, Iterable
from concurrent.futures import Future
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.multimodal import MULTIMODAL_REGISTRY, MultiModalRegistry
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface
from vllm.v1.engine import FinishReason
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

from pat_vllm.config import home_layout, layouts_of, pat_config
from pat_vllm.executor.executor import StepResult, executor_of
from pat_vllm.executor.messages import PATGrammarOutput, PATSchedulerOutput
from pat_vllm.layout import Layout
from pat_vllm.predictor.cost import TransferCost
from pat_vllm.predictor.state import LiveState
from pat_vllm.profiling.engine_profile import PROFILE_COMMAND, load_or_measure, profile_command
from pat_vllm.reporting import History, RefusedSwitch
from pat_vllm.routing import Router
from pat_vllm.scheduler.make_policy import make_policy
from pat_vllm.scheduler.replica import Replica, ReplicaFactory, is_empty_step
from pat_vllm.scheduler.requests import LiveTable, step_shape
from pat_vllm.scheduler.stats import merge_outputs, merge_stats, whole_engine
from pat_vllm.scheduler.switch import SwitchRefused, switch
from pat_vllm.worker.layout_config import kv_bytes_per_token

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

logger = init_logger(__name__)

SWITCH_COMMAND = "pat_switch_layout"
REPORT_COMMAND = "pat_report"
"""Names under which front ends reach the scheduler through `collective_rpc`."""

_AFTER_REFUSAL = 1.0
"""Seconds without a switch of the policy's after one that was refused: each try waits for the steps
in flight."""


class PATScheduler(SchedulerInterface):
    """Routes requests to the replicas of the active layout, bundles their steps, and switches."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        kv_cache_config: KVCacheConfig,
        structured_output_manager: StructuredOutputManager,
        block_size: int,
        hash_block_size: int | None = None,
        mm_registry: MultiModalRegistry = MULTIMODAL_REGISTRY,
        include_finished_set: bool = False,
        log_stats: bool = False,
    ) -> None:
        """See vLLM's `SchedulerInterface`. `kv_cache_config` is the base layout's."""
        config = pat_config(vllm_config)
        assert vllm_config.model_config is not None
        self.kv_cache_config = kv_cache_config
        self.connector = None
        self.ec_connector = None
        self._log_stats = log_stats
        self._structured_output = structured_output_manager
        self._layouts = layouts_of(vllm_config)
        self._transfer = config.kv_transfer
        self._num_kv_heads = vllm_config.model_config.get_total_num_kv_heads()
        self._depth = 2 if vllm_config.scheduler_config.async_scheduling else 1

        self._executor = executor_of(vllm_config)
        self._executor.register_command(SWITCH_COMMAND, self._switch_command)
        self._executor.register_command(REPORT_COMMAND, self._report_command)
        self._executor.register_command(PROFILE_COMMAND, self._profile_command)
        rates = self._executor.transfer_rates()
        self._cost = TransferCost(
            kv_bytes_per_token=kv_bytes_per_token(
                kv_cache_config, self._layouts[0], self._num_kv_heads
            ),
            bandwidth=rates.bandwidth,
            prefill_rate=dict(rates.prefill_rate),
        )

        self._factory = ReplicaFactory(
            vllm_config,
            self._layouts[0],
            kv_cache_config,
            structured_output_manager=structured_output_manager,
            block_size=block_size,
            hash_block_size=hash_block_size,
            mm_registry=mm_registry,
            include_finished_set=include_finished_set,
            log_stats=log_stats,
        )
        max_model_len = vllm_config.model_config.max_model_len
        self._policy = make_policy(
            config,
            self._layouts,
            lambda path: load_or_measure(
                vllm_config,
                self._executor,
                kv_cache_config,
                path,
                seconds_to_make=self._factory.seconds_to_make,
            ),
            bound=max_model_len,
        )
        for layout in self._layouts:
            self._factory.discard(self._factory.make(layout))  # so that no switch is the first
        self._layout = home_layout(vllm_config)
        self._replicas = self._factory.make(self._layout)
        self._retired: list[Replica] = []
        self._live = LiveTable(max_model_len, getattr(config.policy, "length_bound", None))
        self._router = Router()
        self._history = History()
        self._epoch = 0
        self._last_arrival = 0.0
        self._follow_after = 0.0
        self._was_busy = False
        self._forced = False
        self._pause = PauseState.UNPAUSED
        self._outputs: dict[int, EngineCoreOutputs] = {}
        self._silent: list[tuple[Replica, SchedulerOutput]] = []
        self._engine_thread: int | None = None
        self._requested: queue.SimpleQueue[tuple[Layout, Future[bool]]] = queue.SimpleQueue()

    # ---------------------------------------------------------------- steps

    def schedule(self, throttle_prefills: bool = False) -> PATSchedulerOutput:
        """Switch if that is due, then start a step in every replica that is ready for one."""
        self._engine_thread = threading.get_ident()
        self._go_home_if_idle()
        self._run_requested_switches()
        self._follow_policy()
        steps: dict[int, SchedulerOutput] = {}
        for replica in self._replicas:
            if not replica.may_step(self._depth):
                continue
            step = replica.schedule(throttle_prefills)
            if is_empty_step(step):
                replica.in_flight.pop()
                self._silent.append((replica, step))
            else:
                steps[replica.index] = step
        return PATSchedulerOutput.of(steps, in_flight=self._in_flight())

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        assert isinstance(scheduler_output, PATSchedulerOutput)
        self._discard_retired()  # the workers have been given their steps by now
        of_replica = {}
        for index, step in scheduler_output.steps.items():
            grammar = self._replicas[index].scheduler.get_grammar_bitmask(step)
            if grammar is not None:
                # vLLM fills one array again and again, which replicas share.
                of_replica[index] = replace(grammar, grammar_bitmask=grammar.grammar_bitmask.copy())
        if not of_replica:
            return None
        return PATGrammarOutput([], None, of_replica=of_replica)  # type: ignore[arg-type]

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> dict[int, EngineCoreOutputs]:
        """Update the replicas whose steps have finished, whichever engine step started them.

        Args:
            scheduler_output: not used; vLLM's loop pairs outputs with schedules.
            model_runner_output: `list[StepResult]` from the executor.
        """
        results: list[StepResult] = model_runner_output
        self._finish_silent()
        for result in results:
            self._finish(result)
        outputs, self._outputs = self._outputs, {}
        for client in outputs.values():
            if client.scheduler_stats is not None:
                whole_engine(client.scheduler_stats, [r.scheduler for r in self._replicas])
        return outputs

    def _finish(self, result: StepResult) -> None:
        now = time.monotonic()
        replica = self._replicas[result.replica]
        self._history.step(self._layout, result.seconds)
        if self._policy.learns:
            shape = step_shape(replica.in_flight[0], sum(bool(r.in_flight) for r in self._replicas))
            seconds = replica.cadence(now, result.seconds)
            self._policy.stepped(now, self._layout, shape, seconds)
        self._collect(replica.finish(result.output), now)

    def _finish_silent(self) -> None:
        """Finish the steps that no worker was told of, in which requests may have failed."""
        for replica, step in self._silent:
            outputs = replica.scheduler.update_from_output(step, EMPTY_MODEL_RUNNER_OUTPUT)
            self._collect(outputs, time.monotonic())
        self._silent.clear()

    def _collect(self, outputs: dict[int, EngineCoreOutputs], now: float) -> None:
        for client in outputs.values():
            for output in client.outputs:
                if output.finish_reason is not None:
                    self._ended(output.request_id, now, output.finish_reason)
        merge_outputs(self._outputs, outputs)

    def _ended(self, request_id: str, now: float, reason: FinishReason) -> None:
        owned = self._live.pop(request_id)
        if owned is not None and not owned.exact:  # a fixed length says nothing about others
            complete = self._live.complete(owned, reason)
            generated = owned.request.num_output_tokens
            self._policy.finished(now, owned.group, generated, complete)

    def _in_flight(self) -> bool:
        return any(replica.in_flight for replica in self._replicas)

    # ---------------------------------------------------------------- requests

    def add_request(self, request: Request) -> None:
        """Route a request to a replica: prefix affinity first, then least load."""
        owner = self._live.owner(request.request_id)
        if owner is None:
            # vLLM's in-process engine makes no step after the last output of a batch.
            self._go_home_if_idle()
            prompt = hash(tuple(request.prompt_token_ids or ()))
            prefixes: list[Hashable] = [prompt, *reversed(request.block_hashes)]
            index = self._router.route(prefixes, [replica.num_seqs for replica in self._replicas])
            owner = self._replicas[index]
            owned = self._live.add(request, owner, prompt)
            self._last_arrival = time.monotonic()
            self._was_busy = True
            self._policy.arrived(self._last_arrival, owned.group)
        owner.scheduler.add_request(request)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        if request_ids is None:
            request_ids = tuple(self._live)
        by_owner: dict[int, list[str]] = {}
        for request_id in request_ids:
            if (owner := self._live.owner(request_id)) is not None:
                by_owner.setdefault(owner.index, []).append(request_id)
                self._ended(request_id, time.monotonic(), FinishReason.ABORT)
        return [
            request
            for index, ids in by_owner.items()
            for request in self._replicas[index].scheduler.finish_requests(ids, finished_status)
        ]

    def get_num_unfinished_requests(self) -> int:
        return sum(r.scheduler.get_num_unfinished_requests() for r in self._replicas)

    def has_finished_requests(self) -> bool:
        return any(replica.scheduler.has_finished_requests() for replica in self._replicas)

    def has_requests(self) -> bool:
        """Also true while steps are in flight, outputs are unread, or a switch is asked for."""
        return (
            bool(self._outputs)
            or not self._requested.empty()
            or any(r.in_flight or r.scheduler.has_requests() for r in self._replicas)
        )

    def has_request(self, request_id: str) -> bool:
        """Asked by vLLM 0.33 while a pause has it turn new requests away."""
        return self._live.owner(request_id) is not None

    def get_request_counts(self) -> tuple[int, int]:
        counts = [replica.scheduler.get_request_counts() for replica in self._replicas]
        return sum(running for running, _ in counts), sum(waiting for _, waiting in counts)

    # ---------------------------------------------------------------- control

    @property
    def pause_state(self) -> PauseState:
        return self._pause

    def set_pause_state(self, pause_state: PauseState) -> None:
        self._pause = pause_state
        for replica in self._replicas:
            replica.scheduler.set_pause_state(pause_state)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        self._router.forget()
        if reset_running_requests:
            # Preempting a request drops what its step in flight samples: a seeded one would go on
            # from another random number. vLLM, too, has no step in flight here.
            self._drain()
            for replica in self._replicas:
                replica.preempt_carried()
        return all(
            [
                replica.scheduler.reset_prefix_cache(reset_running_requests, reset_connector)
                for replica in self._replicas
            ]
        )

    def reset_encoder_cache(self) -> None:
        for replica in self._replicas:
            replica.scheduler.reset_encoder_cache()

    def get_kv_cache_usage(self) -> float:
        usages = [replica.scheduler.get_kv_cache_usage() for replica in self._replicas]
        return sum(usages) / len(usages)

    def make_stats(self) -> SchedulerStats | None:
        if not self._log_stats:
            return None
        merged: SchedulerStats | None = None
        for replica in self._replicas:
            stats = replica.scheduler.make_stats()
            assert stats is not None
            if merged is None:
                merged = stats
            else:
                merge_stats(merged, stats)
        assert merged is not None
        return whole_engine(merged, [replica.scheduler for replica in self._replicas])

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        raise AssertionError("speculative decoding is refused at start")

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        raise AssertionError("speculative decoding is refused at start")

    def shutdown(self) -> None:
        for replica in (*self._retired, *self._replicas):
            replica.scheduler.shutdown()

    # ---------------------------------------------------------------- switching

    def _go_home_if_idle(self) -> None:
        """Return to the home layout when the work is done: there is no KV to move then."""
        if not self._was_busy or self._in_flight() or any(r.num_seqs for r in self._replicas):
            return
        if self._executor.is_sleeping:
            return  # its memory is not there
        self._was_busy = False
        self._forced = False
        self._policy.idle(time.monotonic())
        self._switch(self._policy.home, "idle")

    def _follow_policy(self) -> None:
        live = sum(replica.num_seqs for replica in self._replicas)
        self._history.live(self._layout, live)
        if live == 0 or self._forced or self._pause != PauseState.UNPAUSED:
            return
        now = time.monotonic()
        if now < self._follow_after:
            return
        target = self._policy.choose(
            LiveState(now, self._layout, live, now - self._last_arrival, self._live.arrays)
        )
        if target != self._layout and not self._switch(target, "policy"):
            self._follow_after = time.monotonic() + _AFTER_REFUSAL

    def _switch(self, target: Layout, reason: str) -> bool:
        """Switch; returns whether the engine is in `target` afterwards."""
        if target == self._layout:
            self._forced |= reason == "forced"
            return True
        self._discard_retired()
        try:
            if self._executor.is_sleeping:
                raise SwitchRefused("the engine sleeps; wake it up first")
            replicas, report = switch(
                source=self._layout,
                target=target,
                replicas=self._replicas,
                new_replicas=self._factory.make,
                discard=self._factory.discard,
                executor=self._executor,
                choose=self._choose,
                num_kv_heads=self._num_kv_heads,
                switch_id=self._epoch + 1,
                reason=reason,
                drain=self._drain,
            )
        except SwitchRefused as refused:
            logger.warning("PAT stays in %s, no switch to %s: %s", self._layout, target, refused)
            self._history.refused(
                RefusedSwitch(time.monotonic(), self._layout, target, str(refused))
            )
            self._policy.refused(time.monotonic())
            return False
        except Exception:
            # Requests are neither here nor there.
            self._executor.fail()
            raise
        self._forced = reason == "forced"
        self._epoch += 1
        self._layout = target
        self._retired, self._replicas = self._replicas, replicas
        self._live.move(replicas)
        self._router.forget()
        if self._pause != PauseState.UNPAUSED:
            self.set_pause_state(self._pause)
        self._cost = self._cost.with_exchange(report.kv_bytes, report.kv)
        self._history.switch(report)
        self._policy.switched(report)
        return True

    def _discard_retired(self) -> None:
        """Take back the replicas of the layout that was left, which takes a moment."""
        self._factory.discard(self._retired)
        self._retired = []

    def _choose(self, computed: int, tp: int) -> Any:
        if self._transfer == "auto":
            return self._cost.cheaper(computed, tp)
        return self._transfer

    def _drain(self) -> None:
        """Finish the steps in flight. Their outputs go out with the next update."""
        self._finish_silent()
        for result in self._executor.finished(wait_for_all=True):
            self._finish(result)

    # ---------------------------------------------------------------- commands of front ends

    def _switch_command(self, tp: int) -> bool | Future[bool]:
        """Switch now; from a thread other than the engine's, before its next step."""
        target = next((layout for layout in self._layouts if layout.tp == tp), None)
        if target is None:
            allowed = [layout.tp for layout in self._layouts]
            raise ValueError(
                f"cannot switch to tp={tp}: the engine keeps the layouts tp={allowed} ready; "
                "name more in pat.layouts"
            )
        if self._engine_thread in (None, threading.get_ident()):
            return self._force(target)
        done: Future[bool] = Future()
        self._requested.put((target, done))
        return done.result(timeout=60)

    def _run_requested_switches(self) -> None:
        while not self._requested.empty():
            target, done = self._requested.get()
            try:
                done.set_result(self._force(target))
            except Exception as error:
                done.set_exception(error)
                raise

    def _force(self, target: Layout) -> bool:
        if not any(replica.num_seqs for replica in self._replicas):
            # A step started before the last response ended may still be in flight. Finish the work
            # that is over, or its end would take the engine home out of the layout asked for now.
            self._drain()
            self._go_home_if_idle()
        return self._switch(target, "forced")

    def _report_command(self, since: float = -math.inf) -> str:
        """The report as JSON; called on the engine's thread or beside it."""
        if self._engine_thread in (None, threading.get_ident()):
            self._go_home_if_idle()
        report = self._history.report(self._layout, self._layouts, since)
        return replace(report, predictor=self._policy.report(since)).to_json()

    def _profile_command(
        self, points: list[dict[str, Any]] | None = None, quick: bool = False
    ) -> dict[str, Any]:
        """See `profile_command`; only while the engine has nothing else to do."""
        busy = self._in_flight() or self.get_num_unfinished_requests() > 0
        if busy or self._engine_thread not in (None, threading.get_ident()):
            raise RuntimeError("the engine is busy; it can be profiled only while it is idle")
        self._go_home_if_idle()
        self.reset_prefix_cache()  # its memory is overwritten
        return profile_command(
            self._executor,
            self.kv_cache_config,
            points,
            quick,
            switch_id=self._epoch,
            seconds_to_make=self._factory.seconds_to_make,
        )
