"""Metrics from the scheduler through vLLM's statistics to the registry, without an engine."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client import values as prometheus_values
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.metrics.loggers import PrometheusStatLogger, StatLoggerManager
from vllm.v1.metrics.prometheus import get_prometheus_registry
from vllm.v1.request import RequestStatus

from pat_vllm import plugin
from pat_vllm.kv_transfer.connector import PATConnector
from pat_vllm.layout import Layout
from pat_vllm.metrics import names
from pat_vllm.metrics.metric_updates import MetricUpdates, Update, updates_of
from pat_vllm.metrics.names import METRICS
from pat_vllm.metrics.prometheus import PATMetrics, naming_connector
from pat_vllm.patches.front_end import tell_loggers
from pat_vllm.reporting import (
    REFUSALS,
    SWITCH_REASONS,
    BatchReport,
    RefusedSwitch,
)
from pat_vllm.scheduler.switching import switch as switch_module
from pat_vllm.scheduler.switching import switch_plan
from tests.unit.metrics.test_metric_updates import (
    LAYOUTS,
    OF_VLLM,
    exported,
    expressions,
    names_in,
    taken,
    values_of,
)
from tests.unit.reporting.samples import switch_report
from tests.vllm.metrics.exported import samples, series
from tests.vllm.scheduler.test_scheduler import add, no_plan, scheduler, step
from tests.vllm.without_workers import engine_config

__all__ = ["scheduler"]


def registered(registry: CollectorRegistry, tp: int = 2) -> PATMetrics:
    """As vLLM's Prometheus logger makes them, for four ranks of which `tp` are a group."""
    engine: Any = SimpleNamespace(kv_transfer_config=None)
    config = naming_connector(engine, LAYOUTS, Layout.of(tp, 4))
    types = {kind: partial(kind, registry=registry) for kind in (Gauge, Counter, Histogram)}
    return PATMetrics(config, types, list(OF_VLLM), {0: ["model", "0"]})


def test_the_registry_adds_up_what_happened() -> None:
    registry, rng = CollectorRegistry(), Random(0)
    metrics, updates = registered(registry), MetricUpdates()
    before = samples(registry)
    # An engine that does not speculate has no draft lengths.
    shown = {name for metric in METRICS for name in exported(metric)} - {names.DRAFT_LENGTH}
    assert {name for name, _ in before} == shown
    home = {series(names.TENSOR_PARALLEL_SIZE): 2.0, series(names.NUM_REPLICAS): 2.0}
    assert before == dict.fromkeys(before, 0.0) | home
    expected = dict(before)
    for _ in range(200):
        source, target = rng.sample(LAYOUTS, 2)
        reason, refusal = rng.choice(SWITCH_REASONS), rng.choice(REFUSALS)
        seconds = rng.uniform(0, 15)
        batch = BatchReport(1.0, rng.random(), 8, rng.randrange(99), control=rng.random() < 0.5)
        updates.switched(switch_report(1.0, source, target, reason, seconds=seconds))
        updates.refused(RefusedSwitch(1.0, source, target, "", reason=refusal))
        updates.batch_over(1.0, batch)
        if rng.random() < 0.5:
            metrics.observe({"updates": taken(updates)})
        _, total, count = exported(names.STALL)
        expected[series(names.SWITCHES, source=source, target=target, reason=reason)] += 1
        expected[total, (("reason", reason),)] += seconds
        expected[count, (("reason", reason),)] += 1
        for bound in names.STALL_BUCKETS:
            expected[series(names.STALL, reason=reason, le=bound)] += seconds <= bound
        expected[series(names.STALL, reason=reason, le="+Inf")] += 1
        expected[series(names.REFUSED, reason=refusal)] += 1
        control = {"control": str(batch.control).lower()}
        expected[series(names.BATCHES, **control)] += 1
        expected[series(names.BATCH_SECONDS, **control)] += batch.seconds
        expected[series(names.BATCH_TOKENS, **control)] += batch.tokens
    metrics.observe({"updates": taken(updates)})
    after = samples(registry)
    assert after.keys() == before.keys()  # each series was known at start
    assert after == pytest.approx(dict(expected))


def test_several_api_servers_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM has them write: each to its files, counters are summed, of gauges the last counts."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    switch = switch_report(1.0)
    for process in (1, 2):
        to_files = prometheus_values.MultiProcessValue(
            process_identifier=lambda process=process: process
        )
        monkeypatch.setattr(prometheus_values, "ValueClass", to_files)
        metrics, updates = registered(CollectorRegistry()), MetricUpdates()
        for _ in range(process):
            updates.switched(switch)
        updates.state(LAYOUTS[0], [process] * 4)
        metrics.observe({"updates": taken(updates)})
    values = samples(get_prometheus_registry())
    pair = {"source": switch.source, "target": switch.target, "reason": switch.reason}
    assert values[series(names.SWITCHES, **pair)] == 3
    assert values[exported(names.STALL)[2], (("reason", switch.reason),)] == 3
    assert values[series(names.NUM_REQUESTS, replica=3)] == 2
    assert values[series(names.TENSOR_PARALLEL_SIZE)] == 1


def test_only_loggers_of_engines_with_pat_see_the_connector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def stock(self: Any, vllm_config: Any, engine_idxs: Any = None) -> None:
        seen.append((vllm_config, engine_idxs))

    monkeypatch.setattr(StatLoggerManager, "__init__", stock)
    for _ in range(2):  # each engine of a process does it
        tell_loggers(plugin._config_for_loggers)
    pat, _ = engine_config(8, num_blocks=80)
    other: Any = SimpleNamespace(scheduler_config=SimpleNamespace(scheduler_cls=None))
    StatLoggerManager(vllm_config=pat, engine_idxs=[0])
    StatLoggerManager(vllm_config=other, engine_idxs=[1])
    (first, _), second = seen
    assert second == (other, [1])
    assert KVConnectorFactory.get_connector_class(first.kv_transfer_config) is PATConnector
    assert pat.kv_transfer_config is None and first.cache_config is pat.cache_config


def test_the_dashboard_asks_for_what_vllms_logger_exports() -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 4}
    config, _ = engine_config(8, num_blocks=80, speculative_config=drafts)
    PrometheusStatLogger(plugin._config_for_loggers(config), [0])
    suffixes = {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"]}
    shown = {
        f"{family.name}{suffix}"
        for family in REGISTRY.collect()
        for suffix in suffixes.get(family.type, [""])
    }
    for expr, _ in expressions():
        assert names_in(expr) <= shown


def carried(outputs: dict[int, Any]) -> list[Update]:
    """The updates in the outputs of a step: of one client at most."""
    parts = [
        output.scheduler_stats.kv_connector_stats
        for output in outputs.values()
        if output.scheduler_stats is not None and output.scheduler_stats.kv_connector_stats
    ]
    assert len(parts) <= 1
    return [update for part in parts for update in updates_of(part)]


def test_updates_travel_with_statistics_even_if_nobody_is_left(scheduler: Any) -> None:
    """Home again after the last request, without an output that they could go with."""
    add(scheduler, 5)
    step(scheduler)
    assert scheduler.controller.request_switch(2) is True
    step(scheduler)
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    updates = carried(step(scheduler))
    assert values_of(updates, names.SWITCHES) == {("tp2dp4", "tp8dp1", "idle"): 1}
    assert values_of(updates, names.TENSOR_PARALLEL_SIZE) == {(): 8}
    assert {*values_of(updates, names.NUM_REQUESTS).values()} == {0}


def test_refusals_by_reason(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add(scheduler, 2)
    step(scheduler)
    executor = scheduler.replica_set.executor
    for name, value in (("is_sleeping", True), ("refresh_weights", lambda: False)):
        with monkeypatch.context() as patch:
            patch.setattr(executor, name, value)
            assert scheduler.controller.request_switch(2) is False
    with monkeypatch.context() as patch:
        patch.setattr(switch_plan, "plan_moves", no_plan)
        with pytest.raises(switch_module.PlanningFailed):
            scheduler.controller.request_switch(2)
    next(iter(scheduler.replica_set.replicas[0].scheduler.requests.values())).resumable = True
    assert scheduler.controller.request_switch(2) is False
    refused = scheduler.controller.report().refused
    assert tuple(refusal.reason for refusal in refused[:2]) == REFUSALS[:2]
    assert {refusal.reason for refusal in refused} == {*REFUSALS}
    assert values_of(carried(step(scheduler)), names.REFUSED) == {
        (reason,): 1 for reason in REFUSALS
    }


def test_each_batch_is_counted_once(scheduler: Any) -> None:
    counts = []
    for number in (0, 2, 1):
        if number:
            add(scheduler, number)
            step(scheduler)
            scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
        counts.append(values_of(carried(step(scheduler)), names.BATCHES))
    assert counts == [{}, {("false",): 1}, {("false",): 1}]
