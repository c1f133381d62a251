"""A replica of the active layout as the engine core sees it: one stock vLLM scheduler."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.config import KVTransferConfig
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput

from pat_vllm.layout import Layout
from pat_vllm.models.drafters import reads_ahead
from pat_vllm.models.images import takes_images
from pat_vllm.patches.compat import drain_carried_requests
from pat_vllm.patches.schedulers import (
    block_pools_from,
    free_blocks_at_once,
    multimodal_budgets_from,
    quiet_connectors,
)
from pat_vllm.scheduler.block_pools import BlockPools
from pat_vllm.scheduler.images import Budgets, encoder_inputs_to_send
from pat_vllm.worker.layout_config import kinds_of, layout_config, layout_kv_cache_config

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.engine import EngineCoreOutputs
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

    from pat_vllm.executor.messages import EncoderInputs
    from pat_vllm.kv_transfer.connector import PATConnector
    from pat_vllm.models.kinds import Kinds
    from pat_vllm.start.setup import Setup


class Replica:
    """A stock scheduler and its steps in flight, oldest first.

    Attributes:
        kinds: the kind of state (such as full attention) of each of vLLM's KV cache groups.
        decode_steps: finished steps in which requests decoded.
    """

    def __init__(self, index: int, scheduler: Scheduler, kinds: Kinds) -> None:
        self.index = index
        self.scheduler = scheduler
        self.kinds = kinds
        self.in_flight: deque[SchedulerOutput] = deque()
        self.decode_steps = 0
        self._drafts: DraftTokenIds | None = None
        """Drafts of the last step, for the bitmask of the next (asynchronous scheduling only)."""
        self._finished_at = 0.0
        self._thinking_without_drafts = (
            scheduler.vllm_config.reasoning_config is not None and not scheduler.use_v2_model_runner
        )

    @property
    def connector(self) -> PATConnector:
        """The scheduler's KV connector, through which carried KV is announced."""
        connector: Any = self.scheduler.connector
        return connector

    @property
    def num_seqs(self) -> int:
        """Unfinished requests, whatever the pause state."""
        return sum(self.scheduler.get_request_counts())

    def may_step(self, depth: int) -> bool:
        """Whether another step may be started with at most `depth` in flight.

        A structured-output request needs its last token before its next bitmask can be made, so
        its replica keeps to one step at a time.
        """
        if not self.scheduler.has_requests():
            return False
        if not self.in_flight:
            return True
        return len(self.in_flight) < depth and not any(
            step.has_structured_output_requests for step in self.in_flight
        )

    def schedule(self, throttle_prefills: bool) -> SchedulerOutput:
        """Schedule a step and count it as in flight."""
        step = self.scheduler.schedule(throttle_prefills)
        self.in_flight.append(step)
        return step

    def encoder_inputs_to_send(self, step: SchedulerOutput) -> EncoderInputs | None:
        """Data of images that the workers lack for a step that was just scheduled."""
        if self.scheduler.use_v2_model_runner:
            return None  # the step has it: requests that come back are new to that runner
        return encoder_inputs_to_send(step, self.scheduler.requests)

    def grammar_bitmask(self, step: SchedulerOutput) -> GrammarOutput | None:
        """The bitmask of a step that was just scheduled, where it has grammars."""
        if self._drafts is not None:
            # Asynchronous scheduling puts placeholders in a step. A grammar needs the drafts.
            self.scheduler.update_draft_token_ids_in_output(self._drafts, step)
            self._drafts = None
        return self.scheduler.get_grammar_bitmask(step)

    def finish(
        self, output: ModelRunnerOutput, drafts: DraftTokenIds | None
    ) -> dict[int, EngineCoreOutputs]:
        """Update the scheduler from the output of its oldest step in flight.

        Args:
            drafts: for the next step, where the scheduler has to know them.
        """
        outputs = self.scheduler.update_from_output(self.in_flight.popleft(), output)
        if drafts is not None and self.scheduler.scheduler_config.async_scheduling:
            self._drafts = drafts
        elif drafts is not None:
            self.scheduler.update_draft_token_ids(drafts)
            if self._thinking_without_drafts:
                self._drop_drafts_of_thinking(drafts.req_ids)
        return outputs

    def _drop_drafts_of_thinking(self, request_ids: Iterable[str]) -> None:
        """Verify no drafts of requests with a thinking budget.

        Over drafts Model Runner V1 loses its place in the phrase that ends thinking.
        """
        for request_id in request_ids:
            request = self.scheduler.requests.get(request_id)
            params = request and request.sampling_params
            if request and params and params.thinking_token_budget is not None:
                request.spec_token_ids = []

    def cadence(self, now: float, seconds: float) -> float:
        """Seconds from the end of the last step to that of one which ends now.

        Args:
            seconds: since this step was started. Where the replica had waited before that for more
                than half as long, it was idle, and only these seconds count.
        """
        between = now - seconds - self._finished_at
        self._finished_at = now
        return seconds + between if between < 0.5 * seconds else seconds


def is_empty_step(step: SchedulerOutput) -> bool:
    """Whether a worker has nothing to do or to learn from this step."""
    return not (
        step.total_num_scheduled_tokens
        or step.finished_req_ids
        or step.preempted_req_ids
        or step.free_encoder_mm_hashes
        or step.kv_cache_block_copies
    )


class ReplicaFactory:
    """Makes the replicas of a layout, each with block pools of the layout's size.

    Schedulers live exactly as long as their layout is active, so that a prefix-cache entry cannot
    outlive the memory it describes. Their emptied block pools go to the next ones.
    """

    def __init__(
        self, vllm_config: VllmConfig, setup: Setup, kv_cache_config: KVCacheConfig, **stock: Any
    ) -> None:
        """`kv_cache_config` is the base layout's; `stock` goes to vLLM's scheduler as it is."""
        quiet_connectors()
        self.takes_images = takes_images(vllm_config.model_config)
        self._vllm_config = vllm_config
        self._setup = setup
        self._base_kv_cache = kv_cache_config
        self._stock = stock
        self._configs: dict[Layout, tuple[VllmConfig, KVCacheConfig]] = {}
        self._pools = BlockPools()
        self._budgets = Budgets()
        assert vllm_config.model_config is not None
        num_kv_heads = vllm_config.model_config.get_total_num_kv_heads()
        ahead = reads_ahead(vllm_config.speculative_config)
        self.kinds = kinds_of(kv_cache_config, setup.base, num_kv_heads, ahead)

    def make(self, layout: Layout) -> list[Replica]:
        """The replicas of `layout`, without requests."""
        if layout not in self._configs:
            self._configs[layout] = self._configure(layout)
        config, kv_cache_config = self._configs[layout]
        scheduler_cls = config.scheduler_config.get_scheduler_cls()
        with block_pools_from(self._pools.take), multimodal_budgets_from(self._budgets.take):
            replicas = [
                Replica(
                    index,
                    scheduler_cls(  # type: ignore[arg-type]
                        vllm_config=config, kv_cache_config=kv_cache_config, **self._stock
                    ),
                    self.kinds,
                )
                for index in range(layout.replicas)
            ]
        for replica in replicas:
            # With a KV connector vLLM would hold the blocks of preempted requests back.
            free_blocks_at_once(replica.scheduler)
            # vLLM 0.31 would end a pause before the requests that a switch carried.
            drain_carried_requests(replica.scheduler)
        return replicas

    def discard(self, replicas: Iterable[Replica]) -> None:
        """Take back replicas that will not run again."""
        for replica in replicas:
            replica.scheduler.shutdown()
            self._pools.keep(replica.scheduler)

    def seconds_to_make(self, layout: Layout) -> float:
        """What `make` takes, from the second time on."""
        self.discard(self.make(layout))
        begun = time.perf_counter()
        replicas = self.make(layout)
        seconds = time.perf_counter() - begun
        self.discard(replicas)
        return seconds

    def _configure(self, layout: Layout) -> tuple[VllmConfig, KVCacheConfig]:
        kv_cache_config = layout_kv_cache_config(
            self._base_kv_cache, layout, self._setup.base, self.kinds
        )
        config = layout_config(self._vllm_config, self._setup, layout)
        config.cache_config.num_gpu_blocks = kv_cache_config.num_blocks
        # The class that stock vLLM would choose.
        config.scheduler_config.scheduler_cls = None  # of the layout's own copy
        # By this connector a switch announces migrated KV, as if a remote engine had sent it.
        config.kv_transfer_config = KVTransferConfig(
            kv_connector="PATConnector",
            kv_connector_module_path="pat_vllm.kv_transfer.connector",
            kv_role="kv_consumer",
        )
        return config, kv_cache_config
