"""What a worker keeps for each layout: TP group, config copy, model runner, KV views."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
import vllm.distributed.parallel_state as parallel_state
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
from vllm.platforms import current_platform

from pat_vllm.kv_transfer.connector import PATConnector
from pat_vllm.kv_transfer.kv_buffer import SharedKVBuffer
from pat_vllm.kv_transfer.plan import EXCHANGE_CHANNELS
from pat_vllm.layout import Layout
from pat_vllm.models.drafters import has_weights
from pat_vllm.models.kinds import class_of, served
from pat_vllm.patches.runners import is_v2
from pat_vllm.patches.schedulers import quiet_connectors
from pat_vllm.worker.layout_config import KV_LAYOUTS

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.parallel_state import GroupCoordinator
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1

    from pat_vllm.worker.request_state import RequestStateTransfer

    ModelRunner: TypeAlias = RunnerV1 | RunnerV2


@dataclass
class LayoutRuntime:
    """One layout on one rank. Its parts are made once, at start.

    Attributes:
        config: what a static vLLM engine of this tp would have.
        group: the rank's TP group in this layout.
        runner: vLLM's model runner, built on `config` and `group`.
        kv_cache_config: set when the KV cache is allocated, as is `connector`.
    """

    layout: Layout
    config: VllmConfig
    group: GroupCoordinator
    runner: ModelRunner = None  # type: ignore[assignment]
    kv_cache_config: KVCacheConfig | None = None
    connector: PATConnector | None = None

    @property
    def attention_backends(self) -> tuple[str, ...]:
        """Names of the attention backends that vLLM chose, each once, sorted."""
        backends = [layer.get_attn_backend() for layer in self._attention_layers.values()]
        return tuple(sorted({backend.get_name() for backend in backends}))

    @property
    def _attention_layers(self) -> dict[str, AttentionLayerBase]:
        layers = self.config.compilation_config.static_forward_context
        return {
            name: layer for name, layer in layers.items() if isinstance(layer, AttentionLayerBase)
        }

    def check_kv_cache_specs(self, specs: Mapping[str, KVCacheSpec]) -> None:
        """Check that layouts can share a KV cache of these specs, by layer.

        Raises:
            ValueError: they cannot; names the attention backend and what helps.
        """
        self._check_drafter(specs)
        for name, spec in specs.items():
            if class_of(spec) is not None:
                continue
            backend = self._attention_layers[name].get_attn_backend()
            remedy = ""
            if getattr(spec, "num_head_slots", None) is not None:
                remedy = "; set attention_backend='TRITON_ATTN'"
            raise ValueError(
                f"PAT supports {served()} with a slot for each KV head only, but the "
                f"attention backend {backend.get_name()} ({backend.__name__}) keeps {spec} for "
                f"layer {name}{remedy}"
            )

    def _check_drafter(self, specs: Mapping[str, KVCacheSpec]) -> None:
        """Check that a drafter's layers can join the groups of the target's. Raises ValueError."""
        if not has_weights(self.config.speculative_config):
            return
        runner: Any = self.runner
        drafters: set[str] = (
            runner.speculator.draft_attn_layer_names
            if is_v2(self.runner)
            else runner.drafter._draft_attn_layer_names
        )
        targets = {name: spec for name, spec in specs.items() if name not in drafters}
        for name in sorted(drafters & specs.keys()):
            if specs[name] not in targets.values():
                other = next(iter(targets))
                raise ValueError(
                    f"PAT needs a drafter whose KV is as a layer's of the target, but the layer "
                    f"{name} of the drafter has the KV cache {specs[name]}, and {other} of the "
                    f"target {targets[other]}; set speculative_config to None or to another model"
                )

    def check_kv_cache_layouts(self, names: Sequence[str]) -> list[str]:
        """The KV cache layouts that both the attention backends and PAT take.

        Raises:
            ValueError: PAT takes none of them; names the backends and what helps.
        """
        if common := [name for name in names if name in KV_LAYOUTS]:
            return common
        raise ValueError(
            f"PAT serves the KV cache layouts {', '.join(KV_LAYOUTS)}, but the attention backends "
            f"{', '.join(self.attention_backends)} only {', '.join(names)}; set "
            "attention_backend='TRITON_ATTN'"
        )

    def check_kv_cache(self, kv_cache_config: KVCacheConfig) -> None:
        """Check that the shared buffer is divided as vLLM would divide it for this layout's tp.

        Raises:
            ValueError: a layer's KV cache is another one.
        """
        specs = self.runner.get_kv_cache_spec()
        for group in kv_cache_config.kv_cache_groups:
            expected = group.kv_cache_spec
            for name in group.layer_names:
                # FlashInfer's alignment depends on the config that is current, and there was none
                # when vLLM collected the specs. Blocks that follow each other need none.
                alignment = expected.block_stride_alignment
                if replace(specs[name], block_stride_alignment=alignment) != expected:
                    raise ValueError(
                        f"layout {self.layout}: layer {name} has the KV cache {specs[name]}, where "
                        f"PAT expects {expected}; this model cannot be used with PAT"
                    )

    def register_kv(self, kv_cache_config: KVCacheConfig, buffer: SharedKVBuffer) -> None:
        """Give the layout its connector, with its views of the KV buffer."""
        quiet_connectors()
        config = copy.copy(self.config)
        config.kv_transfer_config = KVTransferConfig(kv_connector="PATConnector", kv_role="kv_both")
        self.kv_cache_config = kv_cache_config
        self.connector = PATConnector(config, KVConnectorRole.WORKER, kv_cache_config)
        self.connector.register_kv_caches(
            buffer.views(kv_cache_config, self.config.cache_config.get_resolved_kv_cache_layout())
        )


def largest_first(runtimes: Iterable[LayoutRuntime]) -> list[LayoutRuntime]:
    """Layouts by the size of the buffers that they share, descending; else in their order.

    Model Runner V2 has a row in them for each request, V1 for each token of a step. Only the first
    layout allocates them; the others use their first rows.
    """

    def rows(runtime: LayoutRuntime) -> int:
        scheduler = runtime.config.scheduler_config
        if runtime.config.use_v2_model_runner:
            return scheduler.max_num_seqs
        return scheduler.max_num_batched_tokens

    return sorted(runtimes, key=rows, reverse=True)


def share_buffers(runtimes: Iterable[LayoutRuntime], state_transfer: RequestStateTransfer) -> None:
    """Have loaded layouts use the per-request or per-token buffers of the one with most rows."""
    host, *others = largest_first(runtimes)
    for runtime in others:
        state_transfer.share(host.runner, runtime.runner)


def shut_down_beside(active: LayoutRuntime, runtimes: Iterable[LayoutRuntime]) -> None:
    """Shut the runner of every layout but the active one down; vLLM's worker shuts that one down.

    vLLM then gives back the pools of sleep mode, where no tensor may lie any more. So all layouts
    let go of the KV buffer.
    """
    for runtime in runtimes:
        runtime.connector = None
        if runtime is not active:
            runtime.runner.shutdown()


def make_tp_group(layout: Layout, local_rank: int, backend: str) -> GroupCoordinator:
    """This rank's TP group of a layout. Collective over all ranks.

    vLLM's own group serves the layout that spans all ranks. Names begin with "tp", by which vLLM's
    CPU backend knows the groups that get its shared-memory collectives.
    """
    if layout.replicas == 1:
        return parallel_state.get_tp_group()
    return parallel_state.init_model_parallel_group(
        [list(layout.ranks_of(replica)) for replica in range(layout.replicas)],
        local_rank,
        backend,
        group_name="tp",
    )


def seed_replica(seed: int, salt: int, switch_id: int, replica: int) -> None:
    """Seed unseeded sampling: alike on the ranks of a replica, differently in each replica.

    All ranks of a TP group sample with generators of their own, and must draw the same numbers.
    Replicas must draw different ones, or the samples of one prompt would be copies. Where the
    numbers are all 0, the seed is vLLM's own.

    These are the generators that vLLM seeds. Its `torch.manual_seed` would take as long on CPU as
    half of what a switch activates.
    """
    if any(where := (salt, switch_id, replica)):
        seed = int(np.random.SeedSequence((seed, *where)).generate_state(1)[0])
    random.seed(seed)
    np.random.seed(seed)
    torch.default_generator.manual_seed(seed)
    current_platform.manual_seed_all(seed)


def cpu_world_group() -> torch.distributed.ProcessGroup:
    """All ranks of the engine, over a CPU backend."""
    return parallel_state.get_world_group().cpu_group


def exchange_group() -> torch.distributed.ProcessGroup:
    """All ranks of the engine, over the device's backend, to move KV. Every rank calls it.

    Over NCCL it is one of its own, whose communicator takes less memory than another would.
    """
    world = parallel_state.get_world_group().device_group
    if torch.distributed.get_backend(world) != "nccl":
        return world
    options = torch.distributed.ProcessGroupNCCL.Options()
    options.config.max_ctas = EXCHANGE_CHANNELS
    ranks = torch.distributed.get_process_group_ranks(world)
    return torch.distributed.new_group(ranks, backend="nccl", pg_options=options)
