"""PAT's KV connector: at a switch, requests take their KV with them as if from a remote engine.

Scheduler side: the new layout's stock schedulers ask it how many tokens of a request are computed
elsewhere, allocate blocks for them, and hold the request until the load has finished. So
admission, block allocation and prefix caching at a switch are vLLM's own. `SwitchPlan` drives it.
Worker side: each layout registers its views of the KV buffer. `PATWorkerMixin._move_kv` has it load
blocks from the views of the layout that is left to those of the layout that is entered.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    SupportsHMA,
)

from pat_vllm.kv_transfer.exchange import Exchange, Part
from pat_vllm.kv_transfer.plan import BlockMove, RankMoves
from pat_vllm.metrics.prometheus import PATMetrics, PATStats
from pat_vllm.models.kinds import NULL_BLOCK, class_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.forward_context import ForwardContext
    from vllm.v1.attention.backend import AttentionMetadata
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


@dataclass
class LoadMetadata(KVConnectorMetadata):
    """From the scheduler side: the blocks of each carried request, by group, null ones included."""

    blocks: dict[str, tuple[list[int], ...]]


class PATConnector(KVConnectorBase_V1, SupportsHMA):
    """Carries KV between the layouts of one engine. See the module's docstring."""

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        groups = kv_cache_config.kv_cache_groups
        self._group_of = {name: i for i, group in enumerate(groups) for name in group.layer_names}
        self._carried: dict[str, int] = {}
        """Computed tokens of announced requests without blocks yet, by request id."""
        self._allocated: dict[str, tuple[list[int], ...]] = {}
        """Blocks for announced requests since the last step, by request id and KV cache group."""
        self._specs = [group.kv_cache_spec for group in groups]
        self._regions: list[dict[int, str]] = []
        """For each region of the KV buffer, the layer that each group has there."""
        self._segments: dict[str, list[torch.Tensor]] = {}
        """By layer, the views that `StateKind.segments` makes of its blocks."""
        self.kv_caches: dict[str, torch.Tensor] = {}

    # ---------------------------------------------------------------- scheduler side

    def announce(self, carried: Mapping[str, int]) -> None:
        """Note how many first tokens of each request (by id) are computed in another layout."""
        self._carried = dict(carried)

    def withdraw(self) -> None:
        """Forget what was announced and not allocated. It will be recomputed."""
        self._carried.clear()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int, bool]:
        tokens = self._carried.get(request.request_id, 0) - num_computed_tokens
        return (tokens, True) if tokens > 0 else (0, False)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        if num_external_tokens > 0:
            del self._carried[request.request_id]
            self._allocated[request.request_id] = blocks.get_block_ids()

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> LoadMetadata:
        metadata = LoadMetadata(self._allocated)
        self._allocated = {}
        return metadata

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        self._carried.pop(request.request_id, None)
        return False, None

    def reset_cache(self) -> bool:
        # Nothing is kept outside vLLM's own blocks.
        return True

    # ---------------------------------------------------------------- front end

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> PATMetrics:
        """PAT's metrics, which show more than this connector does."""
        return PATMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> PATStats:
        return PATStats(data or {})

    # ---------------------------------------------------------------- worker side

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Take the layout's views of the KV buffer: layer name -> [blocks, heads, tokens, content].

        A region may have one layer each of several KV cache groups, with blocks of its own.
        """
        self.kv_caches, self._segments = kv_caches, {}
        regions: dict[int, dict[int, str]] = defaultdict(dict)
        for name, view in kv_caches.items():
            spec = self._specs[group := self._group_of[name]]
            kind = class_of(spec)
            assert kind is not None
            self._segments[name] = kind.segments(spec, view)
            regions[view.storage_offset() * view.element_size()][group] = name
        self._regions = [regions[offset] for offset in sorted(regions)]

    def load(
        self,
        source: PATConnector,
        exchange: Exchange,
        rank: int,
        world_size: int,
        moves: Sequence[BlockMove],
    ) -> None:
        """Copy blocks from `source`'s views to this layout's, as the moves of all ranks say.

        Collective: every rank calls it, with `exchange` over the same ranks. One exchange per
        region bounds the staging memory to one layer's moves; it is sound because a layer takes
        the same bytes of the buffer in every layout.
        """
        exchange.bytes_sent = 0
        # Regions in which the same groups have layers move the same blocks: they share a staging.
        for _, alike in groupby(self._regions, key=lambda region: region.keys()):
            regions = [self._views(region, source) for region in alike]
            parts = [
                Part(RankMoves.of(rank, world_size, [m for m in moves if m.group in groups]), *pair)
                for groups, pair in regions[0]
            ]
            with exchange.staging(parts):
                for region in regions:
                    exchange.run([pair for _, pair in region])

    @torch.inference_mode()
    def clear_null_block(self) -> None:
        """Zero the null block, as in stock vLLM. Other layouts have requests' blocks in its memory.

        To be called when nothing in those blocks has to be read any more.
        """
        for view in self.kv_caches.values():
            view[NULL_BLOCK].zero_()

    def _views(
        self, region: Mapping[int, str], source: PATConnector
    ) -> list[tuple[list[int], tuple[torch.Tensor, torch.Tensor]]]:
        """The views through which the blocks of a region move.

        Returns:
            KV cache groups that share a view, since their blocks have one shape, and that view in
            the source and in the target layout. Each segment of a block is an entry of its own.
        """
        groups: dict[Any, list[int]] = defaultdict(list)
        views = {}
        for group, name in sorted(region.items()):
            for pair in zip(source._segments[name], self._segments[name], strict=True):
                lie = tuple(
                    (view.storage_offset(), view.shape, view.stride(), view.dtype) for view in pair
                )
                groups[lie].append(group)
                views[lie] = pair
        return [(groups[lie], views[lie]) for lie in groups]

    def start_load_kv(self, forward_context: ForwardContext, **kwargs: Any) -> None:
        return  # forward passes load nothing; switches do, by `load`

    def wait_for_layer_load(self, layer_name: str) -> None:
        return

    def save_kv_layer(
        self,
        layer_name: str,
        kv_layer: torch.Tensor,
        attn_metadata: AttentionMetadata,
        **kwargs: Any,
    ) -> None:
        return  # KV is read where it lies, at the switch

    def wait_for_save(self) -> None:
        return
