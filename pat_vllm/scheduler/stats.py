"""Scheduler statistics of several replicas as those of one engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.v1.engine import EngineCoreOutputs

from pat_vllm.patches.compat import add_hits_by_source, clear_kv_fetches

if TYPE_CHECKING:
    from vllm.v1.metrics.stats import PrefixCacheStats, SchedulerStats
    from vllm.v1.spec_decode.metrics import SpecDecodingStats

    from pat_vllm.metrics.metric_updates import MetricUpdates
    from pat_vllm.scheduler.scheduler import PATScheduler


def whole_engine(stats: SchedulerStats, engine: PATScheduler) -> SchedulerStats:
    """Turn the gauges of one replica's `stats` into those of all.

    What counts events since the last time (prefix-cache hits, evictions) stays the replica's own,
    for each replica reports its own. KV cache usage is the mean, as the pools are equally large.
    """
    running, waiting = engine.get_request_counts()
    deferred = sum(
        len(replica.scheduler.deferred_waiting) for replica in engine.replica_set.replicas
    )
    stats.num_running_reqs = running
    stats.num_waiting_reqs = waiting - deferred
    stats.num_skipped_waiting_reqs = deferred
    stats.kv_cache_usage = engine.get_kv_cache_usage()
    # Only switches use the schedulers' KV connector; it is no cache, and nothing is fetched.
    stats.connector_prefix_cache_stats = None
    clear_kv_fetches(stats)
    return stats


_OF_EACH_GPU = ("num_flops_per_gpu", "num_read_bytes_per_gpu", "num_write_bytes_per_gpu")


def mean_of_gpus(stats: SchedulerStats, replicas: int) -> None:
    """Have one replica's `stats` say what its steps are in the mean of all replicas' GPUs."""
    if (perf := stats.perf_stats) is not None:
        for name in _OF_EACH_GPU:
            setattr(perf, name, getattr(perf, name) // replicas)


def add_prefix_cache_stats(into: PrefixCacheStats, other: PrefixCacheStats) -> None:
    """Add the counts of `other` to `into`."""
    into.reset |= other.reset
    if not (other.requests or other.preempted_requests):
        return  # as in most steps: nothing was admitted, so nothing was looked up
    into.requests += other.requests
    into.queries += other.queries
    into.hits += other.hits
    into.preempted_requests += other.preempted_requests
    into.preempted_queries += other.preempted_queries
    into.preempted_hits += other.preempted_hits
    add_hits_by_source(into, other)


def merge_stats(into: SchedulerStats, other: SchedulerStats) -> None:
    """Add the events of `other`, of the same engine, to `into`; gauges are alike."""
    add_prefix_cache_stats(into.prefix_cache_stats, other.prefix_cache_stats)
    into.kv_cache_eviction_events += other.kv_cache_eviction_events
    into.cudagraph_stats = into.cudagraph_stats or other.cudagraph_stats
    if into.perf_stats is None:
        into.perf_stats = other.perf_stats
    elif (perf := other.perf_stats) is not None:
        for name in _OF_EACH_GPU:
            setattr(into.perf_stats, name, getattr(into.perf_stats, name) + getattr(perf, name))
    if into.spec_decoding_stats is None:
        into.spec_decoding_stats = other.spec_decoding_stats
    elif other.spec_decoding_stats is not None:
        add_spec_decoding_stats(into.spec_decoding_stats, other.spec_decoding_stats)


def add_spec_decoding_stats(into: SpecDecodingStats, other: SpecDecodingStats) -> None:
    """Add the counts of `other` to `into`."""
    into.num_drafts += other.num_drafts
    into.num_draft_tokens += other.num_draft_tokens
    into.num_accepted_tokens += other.num_accepted_tokens
    for counts, more in (
        (into.num_accepted_tokens_per_pos, other.num_accepted_tokens_per_pos),
        (into.num_draft_tokens_per_pos, other.num_draft_tokens_per_pos),
    ):
        counts[:] = [count + added for count, added in zip(counts, more, strict=True)]


def merge_outputs(into: dict[int, EngineCoreOutputs], other: dict[int, EngineCoreOutputs]) -> None:
    """Add one replica's outputs to those of others, by client."""
    for client, outputs in other.items():
        merged = into.get(client)
        if merged is None:
            into[client] = outputs
            continue
        merged.outputs.extend(outputs.outputs)
        # Tokens of a later step did not come before it was scheduled.
        merged.timestamp = max(merged.timestamp, outputs.timestamp)
        if outputs.finished_requests:
            merged.finished_requests = (merged.finished_requests or set()) | (
                outputs.finished_requests
            )
        if outputs.scheduler_stats is not None:
            if merged.scheduler_stats is None:
                merged.scheduler_stats = outputs.scheduler_stats
            else:
                merge_stats(merged.scheduler_stats, outputs.scheduler_stats)


def send_metrics(
    updates: MetricUpdates,
    outputs: dict[int, EngineCoreOutputs],
    make_stats: Callable[[], SchedulerStats | None],
) -> None:
    """Have outputs take PAT's updates of metrics along, as the KV connector's statistics.

    They go to one client, as vLLM's own statistics do. Events go out where no replica has finished
    a step, too: nothing may come after the engine has returned.

    Args:
        outputs: by client.
        make_stats: makes statistics, where `outputs` has none.
    """
    carrier = next(
        (output for output in outputs.values() if output.scheduler_stats is not None), None
    )
    if carrier is None and updates.has_events:
        carrier = next(iter(outputs.values()), None) or outputs.setdefault(0, EngineCoreOutputs())
        carrier.scheduler_stats = make_stats()
    if carrier is not None and carrier.scheduler_stats is not None:
        carrier.scheduler_stats.kv_connector_stats = updates.take()
