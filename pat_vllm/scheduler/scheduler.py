"""A scheduler of schedulers, one stock vLLM scheduler per replica.

An engine step, as vLLM's `EngineCore.step` makes it of calls to the scheduler and the executor:

    schedule            1. switch   to another layout, if that is due
                        2. start    a step in every replica that is ready for one
    execute_model       3. send     each step down its replica's lane to the workers
    get_grammar_bitmask             (with the grammars' bitmasks, by sample_tokens)
                        4. wait     until a step has finished, whichever engine step started it
    update_from_output  5. finish   each of these in its replica's scheduler, and tell the monitor
                        6. merge    the outputs of all replicas, by client

`execute_model` and `sample_tokens` are `PATExecutor`'s; a lane is its ring of messages to the ranks
of one replica. Replicas are not in lockstep: while one has a long prefill in flight, others go on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from vllm.multimodal import MULTIMODAL_REGISTRY, MultiModalRegistry
from vllm.v1.core.sched.interface import PauseState, SchedulerInterface

from pat_vllm.executor.executor import executor_of
from pat_vllm.executor.messages import PATGrammarOutput, PATSchedulerOutput
from pat_vllm.patches.schedulers import make_room_for_grammars
from pat_vllm.scheduler.build import build
from pat_vllm.scheduler.commands import register_commands
from pat_vllm.scheduler.stats import merge_stats, send_metrics, whole_engine

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.metrics.stats import SchedulerStats
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.request import Request, RequestStatus
    from vllm.v1.structured_output import StructuredOutputManager

    from pat_vllm.scheduler.replica import Replica


class PATScheduler(SchedulerInterface):
    """What vLLM's engine core sees of the replicas, as one scheduler.

    `ReplicaSet` has the replicas and their steps, `LayoutController` decides on switches, `Monitor`
    knows the unfinished requests and tells policy, report and metrics what happens.
    """

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
        """See vLLM's `SchedulerInterface`. `kv_cache_config` is that of the base layout."""
        self.kv_cache_config = kv_cache_config
        # vLLM's engine core reads these two. The replicas' connectors serve switches only.
        self.connector = None
        self.ec_connector = None
        executor = executor_of(vllm_config)
        # A replica of some layouts may run more requests than the engine's `max_num_seqs`.
        make_room_for_grammars(structured_output_manager, executor.setup.max_num_seqs)
        self.replica_set, self.controller, self.monitor = build(
            vllm_config,
            executor,
            kv_cache_config,
            log_stats,
            structured_output_manager=structured_output_manager,
            block_size=block_size,
            hash_block_size=hash_block_size,
            mm_registry=mm_registry,
            include_finished_set=include_finished_set,
        )
        register_commands(self)

    # ---------------------------------------------------------------- steps

    def schedule(self, throttle_prefills: bool = False) -> PATSchedulerOutput:
        """Switch if that is due, then start a step in every replica that is ready for one."""
        # 1. Switch.
        self.controller.before_step()

        # 2. Start. 3. and 4. are the executor's.
        return self.replica_set.schedule(throttle_prefills)

    def update_from_output(
        self, scheduler_output: SchedulerOutput, model_runner_output: Any
    ) -> dict[int, EngineCoreOutputs]:
        """Update the replicas whose steps have finished, whichever engine step started them.

        Args:
            scheduler_output: not used: the finished steps may belong to earlier outputs.
            model_runner_output: `list[StepResult]` from the executor.
        """
        # 5. Finish.
        self.replica_set.finish(model_runner_output)

        # 6. Merge.
        outputs = self.replica_set.take_outputs()
        for output in outputs.values():
            if output.scheduler_stats is not None:
                whole_engine(output.scheduler_stats, self)  # from gauges of one replica
        if self.monitor.metrics is not None:
            num_seqs = [replica.num_seqs for replica in self._replicas]
            self.monitor.metrics.state(self.replica_set.layout, num_seqs)
            send_metrics(self.monitor.metrics, outputs, self.make_stats)
        return outputs

    def get_grammar_bitmask(self, scheduler_output: SchedulerOutput) -> GrammarOutput | None:
        assert isinstance(scheduler_output, PATSchedulerOutput)
        # A switch leaves the old layout's schedulers. By now the workers are busy with their steps,
        # so that shutting these schedulers down delays nobody.
        self.replica_set.discard_retired()
        of_replica = {}
        for index, step in scheduler_output.steps.items():
            grammar = self._replicas[index].grammar_bitmask(step)
            if grammar is not None:
                # vLLM's manager of grammars fills one array for every call, of whichever replica.
                of_replica[index] = replace(grammar, grammar_bitmask=grammar.grammar_bitmask.copy())
        if not of_replica:
            return None
        return PATGrammarOutput([], None, of_replica=of_replica)  # type: ignore[arg-type]

    # ---------------------------------------------------------------- requests

    def add_request(self, request: Request) -> None:
        """Route a request to a replica: prefix affinity first, then least load."""
        if not self.has_request(request.request_id):  # else: a session's next input
            self.controller.before_arrival()
        self.replica_set.add(request)

    def finish_requests(
        self, request_ids: str | Iterable[str] | None, finished_status: RequestStatus
    ) -> list[Request]:
        if isinstance(request_ids, str):
            request_ids = (request_ids,)
        return self.replica_set.finish_requests(request_ids, finished_status)

    def get_num_unfinished_requests(self) -> int:
        return sum(r.scheduler.get_num_unfinished_requests() for r in self._replicas)

    def has_finished_requests(self) -> bool:
        return any(replica.scheduler.has_finished_requests() for replica in self._replicas)

    def has_requests(self) -> bool:
        """Also true while steps are in flight, outputs are unread, or a switch is asked for."""
        return self.replica_set.has_work or self.controller.has_switch_requests

    def has_request(self, request_id: str) -> bool:
        """Whether a request is unfinished.

        vLLM 0.33 asks in a pause that refuses requests: a session's next input may enter.
        """
        return self.monitor.requests.replica_of(request_id) is not None

    def get_request_counts(self) -> tuple[int, int]:
        counts = [replica.scheduler.get_request_counts() for replica in self._replicas]
        return sum(running for running, _ in counts), sum(waiting for _, waiting in counts)

    # ---------------------------------------------------------------- control

    @property
    def _replicas(self) -> list[Replica]:
        return self.replica_set.replicas

    @property
    def pause_state(self) -> PauseState:
        return self.replica_set.pause_state

    def set_pause_state(self, pause_state: PauseState) -> None:
        self.replica_set.set_pause_state(pause_state)

    def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        reset = self.replica_set.reset_prefix_cache(reset_running_requests, reset_connector)
        self.controller.caches_reset()  # if no request is left, the batch is over
        return reset

    def reset_encoder_cache(self) -> None:
        self.replica_set.reset_encoder_cache()

    def get_kv_cache_usage(self) -> float:
        usages = [replica.scheduler.get_kv_cache_usage() for replica in self._replicas]
        return sum(usages) / len(usages)

    def make_stats(self) -> SchedulerStats | None:
        if self.monitor.metrics is None:
            return None
        merged, *others = (replica.scheduler.make_stats() for replica in self._replicas)
        assert merged is not None
        for stats in others:
            assert stats is not None
            merge_stats(merged, stats)
        return whole_engine(merged, self)

    def update_draft_token_ids(self, draft_token_ids: DraftTokenIds) -> None:
        raise AssertionError("drafts come with the results of steps")

    def update_draft_token_ids_in_output(
        self, draft_token_ids: DraftTokenIds, scheduler_output: SchedulerOutput
    ) -> None:
        raise AssertionError("drafts come with the results of steps")

    def shutdown(self) -> None:
        self.controller.engine_ends()
        self.replica_set.shutdown()
        self.monitor.draft_rows.close()  # keeps responses for the next engine's drafts
