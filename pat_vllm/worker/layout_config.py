"""A layout's own copy of the engine's `VllmConfig`, and of its KV cache config.

A worker makes the first in `init_device`, the second when it allocates the KV cache. The schedulers
make the second, too (`scheduler/replica.py`).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.kv_cache_layout import KVCacheLayout

from pat_vllm.layout import Layout
from pat_vllm.models.kinds import Kinds, StateKind, class_of, served
from pat_vllm.predictor.draft_schedule import every_length
from pat_vllm.start.limits import narrower_limit
from pat_vllm.start.setup import CHOSEN, LAYOUT, Setup

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig, SpeculativeConfig, VllmConfig

KV_LAYOUTS = tuple(
    layout.name for layout in KVCacheLayout if layout.is_layer_compact and layout.is_block_compact
)
"""Names of vLLM's KV cache layouts that PAT can serve.

In them a block of a layer is one run of bytes, which can be divided into several smaller blocks
(`block_ratio`), and a layer takes the same bytes in all layouts.
"""


def layout_config(
    vllm_config: VllmConfig, setup: Setup, layout: Layout, rank: int = 0
) -> VllmConfig:
    """The config of a static vLLM engine with this layout's tensor parallelism.

    vLLM's own code, given this config and the layout's TP group, builds the model, the attention
    backends and the CUDA graphs of that tp. What a layout changes is copied; the rest is shared.

    Args:
        rank: global rank of the worker; any, where only limits and sizes are looked at.
    """
    config = copy.copy(vllm_config)
    config.parallel_config = copy.copy(vllm_config.parallel_config)
    config.parallel_config.tensor_parallel_size = layout.tp
    config.parallel_config.world_size = layout.tp
    config.parallel_config.rank = layout.tp_rank_of(rank)
    config.parallel_config.enable_expert_parallel = setup.experts == "ep" and layout.tp > 1
    # Tells replicas apart where vLLM names ranks: compile caches, senders of weights.
    config.parallel_config.data_parallel_index = layout.replica_of(rank)
    config.additional_config = _additional_config(vllm_config, setup, layout)
    config.compilation_config = copy.deepcopy(vllm_config.compilation_config)
    config.compilation_config.static_forward_context = {}
    config.compilation_config.static_all_moe_layers = []
    # In a folder that a user has chosen, vLLM has one for each rank of a TP group, which layouts
    # would share.
    if config.compilation_config.cache_dir:
        folder = os.path.join(config.compilation_config.cache_dir, str(layout))
        config.compilation_config.cache_dir = folder
    if config.compilation_config.debug_dump_path is not None:
        config.compilation_config.debug_dump_path /= str(layout)
    config.scheduler_config = _scheduler_config(vllm_config.scheduler_config, setup, layout)
    _resize_compile_ranges(config, vllm_config)
    _resize_cuda_graphs(config, vllm_config)
    if vllm_config.speculative_config is not None:
        _make_speculative(config, vllm_config.speculative_config, setup.draft_lengths)
        _capture_every_draft_length(config, vllm_config, setup.draft_lengths)
    _limit_cuda_graphs(config, setup.options.largest_batch(layout))
    config.cache_config = copy.copy(vllm_config.cache_config)
    config.load_config = copy.copy(vllm_config.load_config)
    return config


def _additional_config(engine: VllmConfig, setup: Setup, layout: Layout) -> dict[str, Any]:
    """`additional_config` of a layout: what changes its compiled code, as vLLM's key of its compile
    cache has a hash of this dict.

    The code has strides of weights, which depend on the base layout and on whether weights lie in
    place, and the name of the TP group, a number that grows with the groups made before.
    """
    options = engine.additional_config
    assert isinstance(options, dict)
    return {
        **{name: value for name, value in options.items() if name not in ("pat", CHOSEN)},
        LAYOUT: str(layout),
        "pat_layouts": [str(each_layout) for each_layout in setup.layouts],
        "pat_weights": setup.weights,
    }


def _make_speculative(
    config: VllmConfig, engine: SpeculativeConfig, lengths: Sequence[int]
) -> None:
    """Give a layout the drafter of its tp, ready for every draft length."""
    own = copy.copy(engine)
    own.target_parallel_config = own.draft_parallel_config = config.parallel_config
    drafter = own.draft_model_config
    spread = config.parallel_config.enable_expert_parallel
    if spread and drafter is not None and not drafter.is_moe:  # as vLLM has it
        own.draft_parallel_config = copy.copy(config.parallel_config)
        own.draft_parallel_config.enable_expert_parallel = False
    own.num_speculative_tokens_per_batch_size = every_length(lengths)
    config.speculative_config = own
    # vLLM looked for a schedule of draft lengths in the user's config, which need not have one.
    config._maybe_override_dynamic_sd_cudagraph_mode()


def _capture_every_draft_length(
    config: VllmConfig, engine: VllmConfig, lengths: Sequence[int]
) -> None:
    """Capture CUDA graphs for the batches with the most drafts, and for the largest batch with each
    draft length, too.

    vLLM does so for the batches to which its schedule gives a draft length. With PAT any batch may
    have any draft length. Sizes that vLLM would not have chosen are the user's, and stay.
    """
    compilation = config.compilation_config
    sizes, largest = compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size
    if not sizes or not largest or not config.use_v2_model_runner:
        return
    if not _vllm_chose_sizes(engine):
        return
    assert engine.speculative_config is not None
    fixed = copy.copy(engine)
    fixed.speculative_config = copy.copy(engine.speculative_config)
    fixed.speculative_config.num_speculative_tokens_per_batch_size = None
    most = config.scheduler_config.max_num_seqs
    tokens = (1 + length for length in lengths)
    added = (min(most, largest // of_request) * of_request for of_request in tokens)
    every = {*sizes, *_capture_sizes(fixed, config.scheduler_config), *filter(None, added)}
    compilation.cudagraph_capture_sizes = sorted(every)
    compilation.max_cudagraph_capture_size = max(every)


def _resize_compile_ranges(config: VllmConfig, engine: VllmConfig) -> None:
    """Compile for the ranges of batch sizes that vLLM has for the tp of `config`.

    The batch size up to which vLLM fuses all-reduces with norms depends on the tp. vLLM adds its
    own ends of ranges to the user's, so the user's are those that it would not have added.
    """
    ranges = engine.compilation_config.compile_ranges_endpoints
    if ranges is None:
        return
    of_engine = copy.copy(engine)
    of_engine.compilation_config = copy.copy(engine.compilation_config)
    of_engine.compilation_config.compile_ranges_endpoints = None
    of_engine._set_compile_ranges()
    added: list[int] = of_engine.compilation_config.compile_ranges_endpoints or []
    if config.parallel_config.tensor_parallel_size == 1:
        config.compilation_config.pass_config.fuse_allreduce_rms = False
    config.compilation_config.compile_ranges_endpoints = sorted(set(ranges) - set(added))
    config._set_compile_ranges()


def _scheduler_config(engine: SchedulerConfig, setup: Setup, layout: Layout) -> SchedulerConfig:
    """A layout's copy, with its limits, by which vLLM admits requests and sizes buffers."""
    options, limits = setup.options, setup.limits[layout.tp]
    config = copy.copy(engine)
    config.max_num_seqs = limits.max_num_seqs
    config.max_num_batched_tokens = limits.max_num_batched_tokens
    config.max_num_encoder_input_tokens = max(
        config.max_num_encoder_input_tokens, limits.max_num_batched_tokens
    )
    config.max_num_active_seqs = narrower_limit(
        config.max_num_active_seqs, layout, limits.max_num_seqs, options
    )
    config.max_num_scheduled_tokens = narrower_limit(
        config.max_num_scheduled_tokens, layout, limits.max_num_batched_tokens, options
    )
    return config


def _resize_cuda_graphs(config: VllmConfig, engine: VllmConfig) -> None:
    """Capture the batch sizes that vLLM would for the limits of `config`.

    Sizes that vLLM would not have chosen for the engine are the user's, and stay.
    """
    if engine.compilation_config.cudagraph_capture_sizes and _vllm_chose_sizes(engine):
        chosen = _capture_sizes(engine, config.scheduler_config)
        config.compilation_config.cudagraph_capture_sizes = chosen
        config.compilation_config.max_cudagraph_capture_size = chosen[-1]


def _vllm_chose_sizes(engine: VllmConfig) -> bool:
    """Whether the batch sizes that are captured are vLLM's, and not the user's."""
    sizes = engine.compilation_config.cudagraph_capture_sizes
    return _capture_sizes(engine, engine.scheduler_config) == sizes


def _capture_sizes(engine: VllmConfig, scheduler: SchedulerConfig) -> list[int]:
    """The batch sizes, in tokens, that vLLM captures in an engine with these limits, ascending."""
    config = copy.copy(engine)
    config.scheduler_config = scheduler
    config.compilation_config = copy.copy(engine.compilation_config)
    config.compilation_config.cudagraph_capture_sizes = None  # type: ignore[assignment]
    config.compilation_config.max_cudagraph_capture_size = None  # type: ignore[assignment]
    config._set_cudagraph_sizes()
    return config.compilation_config.cudagraph_capture_sizes


def _limit_cuda_graphs(config: VllmConfig, largest_batch: int | None) -> None:
    """Capture no graphs for batches that the layout will not see; `largest_batch` in requests."""
    compilation = config.compilation_config
    sizes = compilation.cudagraph_capture_sizes
    if sizes and largest_batch is not None:
        tokens = largest_batch * config.uniform_decode_query_len
        enough = next((size for size in sorted(sizes) if size >= tokens), max(sizes))
        compilation.cudagraph_capture_sizes = [size for size in sizes if size <= enough]
        compilation.max_cudagraph_capture_size = enough


def keep_block_size(config: VllmConfig, base: VllmConfig) -> None:
    """Have vLLM give a layout blocks of as many tokens as the base layout has.

    In a model with linear attention, vLLM gives attention blocks of as many tokens as make them as
    large as a state. In a wider layout states shrink, KV heads that are copied do not, and blocks
    would have fewer tokens. Of what it is given, vLLM takes a multiple.
    """
    config.cache_config.block_size = base.cache_config.block_size
    config.cache_config.user_specified_block_size = True


def layout_kv_cache_config(
    base_config: KVCacheConfig, layout: Layout, base: Layout, kinds: Kinds
) -> KVCacheConfig:
    """The KV cache config of a layout, whose blocks are smaller than those of the base layout.

    The same bytes hold more blocks (see `block_ratio`), each with fewer heads. Used by the workers,
    which view one buffer, and by the schedulers, so that both agree.

    Raises:
        ValueError: blocks cannot be divided so, or a block is not one run of bytes beside the other
            blocks of its layer, so that layouts would not alias layer by layer.
    """
    config, ratio = copy.deepcopy(base_config), block_ratio(layout, base, kinds)
    config.num_blocks *= ratio
    blocks_of = {}
    for group, kind in zip(config.kv_cache_groups, kinds, strict=True):
        spec = group.kv_cache_spec
        blocks_of.update(dict.fromkeys(group.layer_names, spec.page_size_bytes))
        group.kv_cache_spec = kind.narrow(spec, layout, ratio)
    for tensor in config.kv_cache_tensors:
        block = blocks_of[tensor.layers[0]]
        if tensor.block_stride != block or (
            len(tensor.layers) > 1 and tensor.layer_stride != block * base_config.num_blocks
        ):
            raise ValueError(
                "PAT needs a KV cache in which each block of a layer is one run of bytes and the "
                "blocks of a layer follow each other, which they do not in the resolved layout "
                f"{config.kv_cache_layout!r}; set VLLM_KV_CACHE_LAYOUT={' or '.join(KV_LAYOUTS)}"
            )
        tensor.block_stride //= ratio
    return config


def kinds_of(
    base_config: KVCacheConfig, base: Layout, num_kv_heads: int, reads_ahead: bool = False
) -> tuple[StateKind, ...]:
    """The kinds of the engine's KV cache groups, in vLLM's order.

    Args:
        base_config: KV cache config of a rank of the layout `base`.
        num_kv_heads: number of KV heads that the model's config names.
        reads_ahead: whether there is a drafter for which vLLM drops the last block of a hit. Of an
            MTP module it drops that of the module's group only; where groups differ, PAT may count
            a block less than vLLM finds.

    Raises:
        ValueError: layouts cannot share these groups.
    """
    kinds = []
    for group in base_config.kv_cache_groups:
        spec = group.kv_cache_spec
        if (served_by := class_of(spec)) is None:
            raise ValueError(f"PAT supports {served()} only, but the KV cache is {spec}")
        heads = served_by.heads_in(spec, num_kv_heads, base.tp)
        kind = served_by.of(spec, heads, len(group.layer_names), dropped=int(reads_ahead))
        if not kind.padded and len(kind.heads_of(base, 0)) != spec.num_heads:
            raise ValueError(
                f"PAT needs the same {heads} KV heads in all layers, but some have a KV "
                f"cache of {spec.num_heads} on each of {base.tp} ranks: this model cannot be used "
                "with PAT"
            )
        kinds.append(kind)
    if len({kind.block_size for kind in kinds if not kind.padded}) > 1:
        sizes = ", ".join(str(kind.block_size) for kind in kinds)
        raise ValueError(
            f"PAT needs blocks of the same number of tokens in all layers, and these have {sizes}: "
            "this model cannot be used with PAT"
        )
    return tuple(kinds)


def block_ratio(layout: Layout, base: Layout, kinds: Kinds) -> int:
    """How many blocks of `layout` take the bytes of one block of `base`, in every group.

    Groups whose blocks may be padded (linear attention) follow the other groups, if there are any.

    Raises:
        ValueError: two groups have different ratios, or a padded block would not hold its state.
    """
    ratios = {kind.ratio(layout, base) for kind in kinds if not kind.padded}
    (ratio, *others) = ratios or {kind.ratio(layout, base) for kind in kinds}
    if others or any(kind.ratio(layout, base) < ratio for kind in kinds):
        raise ValueError(f"blocks of groups of KV caches are cut in different ways in {layout}")
    return ratio
