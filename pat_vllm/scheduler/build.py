"""What a `PATScheduler` consists of, made from vLLM's config and the engine's executor."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from pat_vllm.drafts.history_file import HistoryFile
from pat_vllm.metrics.metric_updates import MetricUpdates
from pat_vllm.predictor.cost import CostModel
from pat_vllm.profiling.load import load_or_measure
from pat_vllm.reporting import EngineHistory
from pat_vllm.scheduler.draft_rows import DraftRows
from pat_vllm.scheduler.layout_controller import LayoutController
from pat_vllm.scheduler.make_policy import make_policy
from pat_vllm.scheduler.monitor import Monitor
from pat_vllm.scheduler.replica import ReplicaFactory
from pat_vllm.scheduler.replica_set import ReplicaSet
from pat_vllm.scheduler.requests import RequestTable
from pat_vllm.scheduler.speculation import DraftLengths, lengths_to_plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig

    from pat_vllm.executor.executor import PATExecutorMixin
    from pat_vllm.layout import Layout
    from pat_vllm.start.setup import Setup


def build(
    vllm_config: VllmConfig,
    executor: PATExecutorMixin,
    kv_cache_config: KVCacheConfig,
    log_stats: bool,
    **stock: Any,
) -> tuple[ReplicaSet, LayoutController, Monitor]:
    """Make them. Takes a profile first if the policy needs one and none is kept.

    Args:
        kv_cache_config: the base layout's.
        log_stats: whether vLLM keeps statistics.
        stock: what else goes to vLLM's scheduler as it is.
    """
    setup, speculative = executor.setup, vllm_config.speculative_config
    config, layouts = setup.options, setup.layouts
    factory = ReplicaFactory(vllm_config, setup, kv_cache_config, log_stats=log_stats, **stock)
    kv_bytes = sum(kind.token_bytes for kind in factory.kinds)
    costs = CostModel(config.kv_transfer, *_carry_rates(executor, kv_bytes), factory.kinds)
    assert vllm_config.model_config is not None
    max_model_len = vllm_config.model_config.max_model_len
    policy = make_policy(
        config,
        layouts,
        lambda path: load_or_measure(
            executor, kv_cache_config, path, seconds_to_make=factory.seconds_to_make
        ),
        costs,
        bound=max_model_len,
        draft_lengths=lengths_to_plan(speculative, setup.draft_lengths),
    )
    for layout in layouts:
        factory.discard(factory.make(layout))  # the first switch finds block pools, too
    draft_rows = _draft_rows(setup, vllm_config.model_config.get_vocab_size())
    if draft_rows.salt:
        executor.reseed(draft_rows.salt)
    monitor = Monitor(
        policy,
        EngineHistory(setup.chosen.get("found", ""), lambda: policy.control),
        RequestTable(max_model_len, getattr(config.policy, "length_bound", None)),
        speculates=speculative is not None,
        draft_rows=draft_rows,
        metrics=MetricUpdates() if log_stats else None,
    )
    replica_set = ReplicaSet(
        setup.default_layout,
        factory=factory,
        executor=executor,
        monitor=monitor,
        depth=2 if vllm_config.scheduler_config.async_scheduling else 1,
    )
    drafts = DraftLengths(speculative, setup.draft_lengths, lambda: policy.drafts)
    controller = LayoutController(
        replica_set, monitor, costs, drafts, layouts, config.policy.idle_seconds
    )
    return replica_set, controller, monitor


def _draft_rows(setup: Setup, vocab_size: int) -> DraftRows:
    state_dir = setup.options.state_dir
    return DraftRows(
        setup.history_bytes,
        setup.base.world_size,
        setup.max_num_seqs,
        HistoryFile(Path(state_dir) if state_dir else None, vocab_size),
    )


def _carry_rates(executor: PATExecutorMixin, kv_bytes: int) -> tuple[float, dict[Layout, float]]:
    """What the workers measured at start, as `CostModel` has it. `kv_bytes` is of a token."""
    rates = executor.transfer_rates()
    recompute = {layout: 1 / rate for layout, rate in rates.prefill_rate.items()}
    return kv_bytes / rates.bandwidth, recompute
