"""A worker process, which keeps a runtime for each layout. One of them is active.

At a start, vLLM calls `init_device`, `load_model`, `initialize_from_config` and
`compile_or_warm_up_model`, in this order, on every rank. `gpu_worker.py` and `cpu_worker.py` mix
the class into vLLM's own workers.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
import vllm.distributed.parallel_state as parallel_state
from vllm.config import set_current_vllm_config
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.v1.worker.worker_base import CompilationTimes

from pat_vllm.drafts.shelf import RowUpdate, Shelf
from pat_vllm.executor.lanes import LaneHandles, WorkerLanes
from pat_vllm.executor.messages import (
    EncoderInputs,
    ResolvedKernels,
    SwitchCommand,
    SwitchTimes,
    TransferRates,
)
from pat_vllm.executor.os_resources import OsResources, os_resources_here
from pat_vllm.executor.parent_watchdog import exit_when_orphaned
from pat_vllm.kv_transfer.exchange import Exchange
from pat_vllm.kv_transfer.kv_buffer import SharedKVBuffer
from pat_vllm.kv_transfer.plan import BlockMove
from pat_vllm.layout import Layout, device_of
from pat_vllm.models.drafters import has_weights, reads_ahead
from pat_vllm.patches.dead_engine import let_others_remove_rings
from pat_vllm.patches.drafts import prepare_drafter, tokens_on_device
from pat_vllm.patches.groups import destroy_tp_groups, install_tp_group, probe_p2p_between
from pat_vllm.patches.linear_attention import prepare_mamba2
from pat_vllm.patches.runners import (
    attention_workspace,
    buffers_of,
    threefold_positions_in,
    use_attention_workspace,
)
from pat_vllm.start.setup import Setup
from pat_vllm.worker.drafters.install import install_drafter
from pat_vllm.worker.images import put_encoder_inputs
from pat_vllm.worker.layout_config import (
    keep_block_size,
    kinds_of,
    layout_config,
    layout_kv_cache_config,
)
from pat_vllm.worker.layout_weights import LayoutWeights
from pat_vllm.worker.request_state import RequestStateTransfer, gather_states, state_transfer_for
from pat_vllm.worker.runtime import (
    LayoutRuntime,
    cpu_world_group,
    exchange_group,
    largest_first,
    make_tp_group,
    seed_replica,
    share_buffers,
    shut_down_beside,
)
from pat_vllm.worker.side_stream import SideStream
from pat_vllm.worker.warmup import warm_up, warm_up_moves
from pat_vllm.worker.weight_updates import WeightUpdatesMixin

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.device_communicators.shm_broadcast import Handle
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.outputs import DraftTokenIds
    from vllm.v1.worker.gpu_worker import Worker as _Base

    from pat_vllm.worker.runtime import ModelRunner
else:
    _Base = object  # vLLM's worker is the next base of the class that mixes this in

logger = init_logger(__name__)

_PROBE_BYTES = 1 << 20
"""Bytes sent to each rank to measure the exchange's bandwidth at start."""


class PATWorkerMixin(WeightUpdatesMixin, _Base):
    """What PAT adds to a vLLM worker of a platform.

    vLLM's worker code is not changed. Where it builds something, it runs once per layout. Before
    that, `_activate` points the worker's attributes at the layout's objects.
    """

    local_rank: int
    weight_transfer_engine: Any
    _setup: Setup

    # ---------------------------------------------------------------- start

    def init_device(self) -> None:
        """Join the world, then make each layout's group, config and model runner."""
        exit_when_orphaned()
        let_others_remove_rings()
        # All ranks are on one node, so this is the index among the node's devices.
        self.local_rank = device_of(self.local_rank, self.parallel_config.world_size)
        engine_config = self.vllm_config
        self._setup = Setup.of(engine_config)
        layouts = self._setup.layouts
        with probe_p2p_between(self._devices_of_group):
            super().init_device()  # makes one TP group, of all ranks
            self._all_ranks = parallel_state.get_tp_group()
            groups = {
                layout.tp: make_tp_group(layout, self.local_rank, current_platform.dist_backend)
                for layout in layouts
            }
        self._seed = engine_config.model_config.seed
        self._buffer = SharedKVBuffer()
        self._shelf = Shelf()  # earlier responses, for drafters
        self._runtimes = {
            layout: LayoutRuntime(
                layout,
                layout_config(engine_config, self._setup, layout, self.rank),
                groups[layout.tp],
            )
            for layout in layouts
        }
        self._base = self._runtimes[layouts[0]]  # `Setup.layouts` has the base layout first
        self._weights = LayoutWeights(self._setup, self._runtimes, self.rank)
        looks_beside = has_weights(engine_config.speculative_config) and bool(
            self._setup.history_bytes
        )
        # Runners share buffers of the one with most rows, so that is made first.
        for runtime in (by_size := largest_first(self._runtimes.values())):
            install_tp_group(runtime.group)
            with (
                set_current_vllm_config(runtime.config),
                buffers_of(by_size[0].runner),
                tokens_on_device(looks_beside),
            ):
                runtime.runner = self._make_runner(runtime.config)
            if self._setup.history_bytes:
                install_drafter(runtime.runner, self._shelf)
            prepare_drafter(runtime.runner)
        self._state_transfer: RequestStateTransfer = state_transfer_for(self._base.runner)
        self._exchange = Exchange(exchange_group(), self.device)
        self._side = SideStream(self.device)  # for weights that move while KV does
        self._activate(self._base)
        # vLLM titles this process by its rank in the TP group before it loads the model.
        install_tp_group(self._all_ranks)

    def _devices_of_group(self, tp: int) -> list[int]:
        """Indices of the devices of this rank's TP group in the layout of this tp."""
        ranks = self.parallel_config.world_size
        layout = Layout.of(tp, ranks)
        group = layout.ranks_of(layout.replica_of(self.rank))
        return [device_of(rank, ranks) for rank in group]

    def _make_runner(self, config: VllmConfig) -> ModelRunner:
        """vLLM's model runner for this platform and config."""
        raise NotImplementedError

    def load_model(self, **kwargs: Any) -> None:
        """Load the base layout from disk, and derive the others from it."""
        loaded: list[LayoutRuntime] = []
        positions: list[Any] = []
        for runtime in self._each_layout():
            with (
                self._weights.loading_into(runtime),
                threefold_positions_in(positions, runtime.runner, self._setup.max_num_seqs),
            ):
                super().load_model(**kwargs)
            prepare_mamba2(runtime.runner)
            if loaded:
                keep_block_size(runtime.config, self._base.config)
            # vLLM does so after loading, with the engine's config, which has no attention layers.
            current_platform.update_block_size_for_backend(runtime.config)
            if runtime is self._base:
                engine = self.weight_transfer_engine  # vLLM makes one with each model
            loaded.append(runtime)
            share_buffers(loaded, self._state_transfer)
        self._weights.finish_loading()
        self.weight_transfer_engine = engine

    def get_kv_cache_spec(self) -> dict[str, KVCacheSpec]:
        """As in vLLM, in the base layout. Raises ValueError if layouts cannot share it."""
        specs = super().get_kv_cache_spec()
        self._active.check_kv_cache_specs(specs)
        return specs

    def get_supported_kv_cache_layouts(self) -> list[str]:
        """As in vLLM, without the KV cache layouts that PAT cannot serve."""
        return self._active.check_kv_cache_layouts(super().get_supported_kv_cache_layouts())

    def set_kv_cache_layout(self, *args: Any, **kwargs: Any) -> None:
        """As in vLLM, whose versions give it different arguments, in every layout's config."""
        for _ in self._each_layout():
            super().set_kv_cache_layout(*args, **kwargs)

    def update_max_model_len(self, max_model_len: int) -> None:
        for _ in self._each_layout():
            super().update_max_model_len(max_model_len)

    def initialize_from_config(self, kv_cache_config: KVCacheConfig) -> None:
        """Allocate the KV buffer for the base layout, and view it from every other."""
        num_kv_heads = self.vllm_config.model_config.get_total_num_kv_heads()
        ahead = reads_ahead(self.vllm_config.speculative_config)
        self._kinds = kinds_of(kv_cache_config, self._base.layout, num_kv_heads, ahead)
        workspace: torch.Tensor | None = None
        for runtime in self._each_layout():
            config = layout_kv_cache_config(
                kv_cache_config, runtime.layout, self._base.layout, self._kinds
            )
            runtime.check_kv_cache(config)
            with set_current_vllm_config(runtime.config), use_attention_workspace(workspace):
                super().initialize_from_config(config)
            if runtime is self._base and len(self._runtimes) > 1:
                workspace = attention_workspace(runtime.runner)
            runtime.register_kv(config, self._buffer)
            if len(self._runtimes) > 1:
                self._state_transfer.watch(runtime.runner)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[Any]:
        """As in vLLM, with the KV cache allocated once and found again by the other layouts."""
        inner = super()._maybe_get_memory_pool_context(tag)
        return self._buffer.allocation(inner) if tag == "kv_cache" else inner

    def compile_or_warm_up_model(self) -> CompilationTimes:
        """Compile, capture and warm up every layout; measure what switching rests on."""
        language_model = encoder = 0.0
        prefill_rate: dict[Layout, float] = {}
        for layout, runtime in self._runtimes.items():
            self._enter(runtime)
            with set_current_vllm_config(runtime.config):
                times = super().compile_or_warm_up_model()
            language_model += times.language_model
            encoder += times.encoder
            assert runtime.kv_cache_config is not None
            prefill_rate[layout] = warm_up(self, runtime.kv_cache_config.num_blocks, self._kinds)
            runtime.runner.reset_mm_cache()  # vLLM does so in the active layout, later
        warm_up_moves(self._runtimes.values(), self._kinds, self._move_kv)
        self._synchronize_device()
        bandwidth = self._exchange.measure(_PROBE_BYTES)
        self._rates = TransferRates(bandwidth, prefill_rate)
        runtime = self._runtimes[self._setup.default_layout]
        assert runtime.connector is not None
        # Where this layout has its null block, warm-ups of the others have written.
        runtime.connector.clear_null_block()
        self._enter_for_a_call(runtime)  # the first call of a user may be an update of weights
        self.pat_reseed(0)
        return CompilationTimes(language_model=language_model, encoder=encoder)

    def pat_transfer_rates(self) -> TransferRates:
        """Rates that this rank measured while warming up."""
        return self._rates

    def pat_resolved_kernels(self) -> ResolvedKernels:
        """What this rank chose where the engine's configuration leaves the choice to it."""
        return ResolvedKernels(self._base.attention_backends, self._weights.strategy)

    def pat_reseed(self, salt: int) -> None:
        """Seed the sampling of unseeded requests, now and at each switch.

        Args:
            salt: another number gives other samples.
        """
        self._salt = salt
        seed_replica(self._seed, salt, 0, self._active.layout.replica_of(self.rank))

    def shutdown(self) -> None:
        """As in vLLM, for every layout's runner and group and for the memory that layouts share."""
        if (lanes := self.__dict__.pop("_lanes", None)) is not None:
            lanes.shutdown()
        runtimes, self._runtimes = getattr(self, "_runtimes", {}), {}
        if runtimes:
            shut_down_beside(self._active, runtimes.values())
            del self._weights, self._buffer
        super().shutdown()
        if runtimes:
            # After the CUDA graphs, which NCCL's communicators may be in.
            destroy_tp_groups((runtime.group for runtime in runtimes.values()), self._all_ranks)

    # ---------------------------------------------------------------- steps

    def pat_open_lanes(self, handles: LaneHandles) -> tuple[Handle, OsResources]:
        """Open this rank's ends of the lanes.

        Returns:
            The handle of the ring back, and what of this worker's may outlive it.
        """
        self._lanes = WorkerLanes(handles, self.rank, self._runtimes, self.device)
        ring = self._lanes.reply_handle()
        return ring, os_resources_here(ring, self.distributed_init_method)

    def pat_lanes_ready(self) -> None:
        """Block until the engine has opened its ends."""
        self._lanes.wait_until_ready()

    def drafts_of_step(self, constrained: bool) -> DraftTokenIds | None:
        """What the drafter proposes after a step, where the scheduler has to know it.

        With asynchronous scheduling, drafts stay on the device. Only grammars have to see them.

        Args:
            constrained: whether the step had grammars.
        """
        if self.vllm_config.speculative_config is None:
            return None
        if self.vllm_config.scheduler_config.async_scheduling and not constrained:
            return None
        return self.take_draft_token_ids()

    def take_draft_rows(self, update: RowUpdate) -> None:
        """Keep earlier responses, from which the drafters of all layouts copy drafts."""
        self._shelf.take(update)

    def take_encoder_inputs(self, inputs: EncoderInputs) -> None:
        """Give requests of a Model Runner V1 back what the next step encodes of their images."""
        put_encoder_inputs(self.model_runner, inputs)

    def pat_echo(self, text: str) -> str:
        """Reply with the text. Replies that came before it are to earlier calls."""
        return text

    def pat_serve_lane(self) -> None:
        """Run the steps of the active layout's lane, until asked to leave it."""
        self._lanes.serve(self._active.layout, self)

    # ---------------------------------------------------------------- switching

    def _activate(self, runtime: LayoutRuntime) -> None:
        """Make a layout the one that vLLM's worker code sees."""
        install_tp_group(runtime.group)
        self._active = runtime
        self.model_runner = runtime.runner  # type: ignore[assignment]
        self.vllm_config = runtime.config
        self.scheduler_config = runtime.config.scheduler_config
        self.parallel_config = runtime.config.parallel_config
        self.cache_config = runtime.config.cache_config
        self.compilation_config = runtime.config.compilation_config

    def _each_layout(self) -> Iterator[LayoutRuntime]:
        """Make each layout the active one, the base layout first, and that again at the end."""
        for runtime in self._runtimes.values():
            self._activate(runtime)
            yield runtime
        self._activate(self._base)

    def _enter(self, runtime: LayoutRuntime) -> None:
        """Make a layout the active one, with its weights in place."""
        self._activate(runtime)
        self._weights.arrange(runtime.layout)

    @torch.inference_mode()
    def pat_switch(self, command: SwitchCommand) -> SwitchTimes:
        """Carry out a switch, as `PATExecutorMixin.switch` asks. No step is in flight.

        Collective over all ranks. Steps are numbered as in `scheduler/switching/switch.py`.

        Returns:
            What each part took on this rank.
        """
        clock = time.perf_counter
        source, target = self._runtimes[command.source], self._runtimes[command.target]
        assert source is self._active, f"rank {self.rank} is in {self._active.layout}"
        assert target.connector is not None
        # Embeddings of images, which B's schedulers know nothing of, lie where KV is staged.
        source.runner.reset_encoder_cache()

        # Before 4: what the source's runners keep of requests, for 6; and states of linear
        # attention come to where they are without drafts.
        started = clock()
        states = gather_states(
            self._state_transfer, source.runner, command, self.rank, cpu_world_group()
        )
        self._state_transfer.settle(source.runner, command.placement)
        gathered = clock()

        # 5. Reshard: queued first on a GPU, where it runs beside 4.
        with self._side.overlap():
            weight_bytes = self._weights.arrange(target.layout)
        resharded = clock()

        # 4. Move KV.
        kv_bytes = 0
        if command.moves:
            self._move_kv(source, target, command.moves)
            # The cost model learns from this time, so wait until the device has moved the bytes.
            self._side.wait_for_current()
            kv_bytes = self._exchange.bytes_sent
        target.connector.clear_null_block()
        moved = clock()
        self._side.wait()
        weights_done = clock()

        # 6. Activate.
        self._state_transfer.clear(source.runner)
        self._activate(target)
        replica = command.target.replica_of(self.rank)
        seed_replica(self._seed, self._salt, command.switch_id, replica)
        self._state_transfer.restore(target.runner, states)
        return SwitchTimes(
            states=gathered - started,
            # Rows of weights move beside the KV; this is what they add to the stall.
            weights=resharded - gathered + weights_done - moved,
            kv=moved - resharded,
            activate=clock() - weights_done,
            kv_bytes=kv_bytes,
            weight_bytes=weight_bytes,
        )

    def _move_kv(
        self, source: LayoutRuntime, target: LayoutRuntime, moves: Sequence[BlockMove]
    ) -> None:
        """Carry out this rank's part of the moves of all ranks. Collective."""
        assert source.connector is not None and target.connector is not None
        target.connector.load(
            source.connector, self._exchange, self.rank, source.layout.world_size, moves
        )

    def _synchronize_device(self) -> None:
        assert self.device is not None
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
