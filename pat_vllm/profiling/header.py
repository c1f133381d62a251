"""What a profile says of its engine besides the samples."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pat_vllm.config import layouts_of
from pat_vllm.layer_sizes import routing_of
from pat_vllm.limits import limits_by_tp
from pat_vllm.profiling.grid import EngineLimits
from pat_vllm.profiling.key import by_name, profile_key, title
from pat_vllm.worker.layout_config import block_ratio, kinds_of, lengths_of
from pat_vllm.worker.synthetic import FIRST_BLOCK

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from pat_vllm.executor.executor import PATExecutorMixin


def engine_limits(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> EngineLimits:
    """What an engine can be asked to do; `kv_cache_config` is the base layout's."""
    layouts = layouts_of(vllm_config)
    limits, model = limits_by_tp(vllm_config), vllm_config.model_config
    assert model is not None
    kinds = kinds_of(kv_cache_config, layouts[0], model.get_total_num_kv_heads())
    return EngineLimits(
        layouts=layouts,
        max_num_seqs={tp: one.max_num_seqs for tp, one in limits.items()},
        max_batch_tokens={tp: one.max_num_batched_tokens for tp, one in limits.items()},
        max_model_len=model.max_model_len,
        kinds=kinds,
        blocks={
            layout.tp: kv_cache_config.num_blocks * block_ratio(layout, layouts[0], kinds)
            - FIRST_BLOCK
            for layout in layouts
        },
        draft_lengths=_draft_lengths(vllm_config),
        misses=not vllm_config.use_v2_model_runner,
    )


def _draft_lengths(vllm_config: VllmConfig) -> tuple[int, ...]:
    """Those to measure. None with "ngram_gpu" on Model Runner V1: before a step it drops the drafts
    that it did not find itself, so that it cannot be told how many to verify."""
    config = vllm_config.speculative_config
    if config is None or (config.use_ngram_gpu() and not vllm_config.use_v2_model_runner):
        return ()
    return tuple(length for length in lengths_of(config) if length)


def profile_header(executor: PATExecutorMixin, kv_cache_config: KVCacheConfig) -> dict[str, Any]:
    """The fields of a `Profile` that describe its engine, as JSON values.

    What is sent to a front end compares equal to what is read from a file.
    """
    vllm_config = executor.vllm_config
    limits = engine_limits(vllm_config, kv_cache_config)
    key = profile_key(vllm_config, executor.resolved_kernels())
    base = limits.layouts[0]
    assert vllm_config.model_config is not None
    routing = routing_of(vllm_config.model_config.hf_text_config.to_dict())
    return {
        "kind": "measured",
        "title": title(key),
        "key": key,
        "ranks": base.world_size,
        "layouts": [str(layout) for layout in limits.layouts],
        "max_num_seqs": by_name(limits.max_num_seqs),
        "max_batch_tokens": by_name(limits.max_batch_tokens),
        "kv_tokens": by_name(limits.kv_tokens),
        "kv_bytes_per_token": sum(kind.token_bytes for kind in limits.kinds),
        "experts": routing and list(routing),
    }
