"""Metrics before they reach a registry: their names, updates on their way, and the dashboard."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
from prometheus_client import Counter, Gauge, Histogram

from pat_vllm.layout import Layout
from pat_vllm.metrics import names
from pat_vllm.metrics.metric_updates import MetricUpdates, Update, updates_of
from pat_vllm.metrics.names import METRICS, STALL_BUCKETS, known_series
from pat_vllm.reporting import BatchReport, DraftCounts

DOCS = Path(__file__).parents[3] / "docs"
DASHBOARD = DOCS / "grafana" / "pat-vllm.json"
LAYOUTS = [Layout(1, 4), Layout(2, 2), Layout(4, 1)]
SUFFIXES = {Gauge: [""], Counter: ["_total"], Histogram: ["_bucket", "_sum", "_count"]}
OF_VLLM = ("model_name", "engine")
"""Labels that vLLM gives each metric."""


def exported(metric: str) -> list[str]:
    """The names in Prometheus' exposition."""
    return [metric + suffix for suffix in SUFFIXES[METRICS[metric][0]]]


def taken(updates: MetricUpdates) -> list[Update]:
    """What is taken, after it has travelled as vLLM's statistics do."""
    data = updates.take()
    if data is None:
        return []
    assert json.loads(json.dumps(data)) == data
    sent = updates_of(msgspec.msgpack.decode(msgspec.msgpack.encode(data)))
    assert all(len(update.labels) == len(METRICS[update.name][2]) for update in sent)
    return sent


def values_of(sent: list[Update], metric: str) -> dict[tuple[str, ...], float]:
    """The values of a metric by its labels."""
    return {tuple(update.labels): update.value for update in sent if update.name == metric}


def test_drafts_of_repeated_prompts_add_up_and_wait_for_the_next_statistics() -> None:
    updates = MetricUpdates()
    for counts in (DraftCounts(8, 3, 4, 2), DraftCounts(4, 1), DraftCounts(6, 5, 6, 5)):
        updates.drafted(0.0, LAYOUTS[0], 0, 4, counts)
    assert not updates.has_events
    sent = taken(updates)
    assert values_of(sent, names.REPEATED_DRAFTED) == {(): 10}
    assert values_of(sent, names.REPEATED_ACCEPTED) == {(): 7}
    assert updates.take() is None


def test_gauges_travel_when_they_change() -> None:
    updates = MetricUpdates()
    assert updates.take() is None
    updates.state(LAYOUTS[0], [3, 2, 0, 1])
    sent = taken(updates)
    assert values_of(sent, names.TENSOR_PARALLEL_SIZE) == {(): 1}
    assert values_of(sent, names.NUM_REPLICAS) == {(): 4}
    assert values_of(sent, names.NUM_REQUESTS) == {("0",): 3, ("1",): 2, ("2",): 0, ("3",): 1}
    updates.state(LAYOUTS[0], [3, 2, 0, 1])
    assert updates.take() is None
    updates.drafted(0.0, LAYOUTS[0], 1, 4, DraftCounts(8, 3))
    updates.drafted(0.0, LAYOUTS[0], 1, 2, DraftCounts(8, 3))
    updates.state(LAYOUTS[0], [3, 1, 0, 1])
    assert not updates.has_events
    assert taken(updates) == [
        Update(names.DRAFT_LENGTH, ["1"], 2),
        Update(names.NUM_REQUESTS, ["1"], 1),
    ]
    # Replicas that are gone have no requests and no drafts.
    updates.state(LAYOUTS[2], [5])
    sent = taken(updates)
    assert values_of(sent, names.NUM_REQUESTS) == {("0",): 5, ("1",): 0, ("3",): 0}
    assert values_of(sent, names.DRAFT_LENGTH) == {("1",): 0}
    assert values_of(sent, names.TENSOR_PARALLEL_SIZE) == {(): 4}


def test_batches_are_told_at_once() -> None:
    updates = MetricUpdates()
    updates.batch_over(0.0, BatchReport(9.0, 2.5, 8, 100, control=True))
    assert updates.has_events
    assert taken(updates) == [
        Update(names.BATCHES, ["true"], 1),
        Update(names.BATCH_SECONDS, ["true"], 2.5),
        Update(names.BATCH_TOKENS, ["true"], 100),
    ]


def test_metrics_are_named_as_vllms_are() -> None:
    for name, (_, documentation, labels) in METRICS.items():
        assert re.fullmatch(r"vllm:pat_[a-z_]+", name) and not name.endswith("_total")
        assert documentation.endswith(".")
        assert not {*labels} & {*OF_VLLM, "le"}
    assert list(STALL_BUCKETS) == sorted(STALL_BUCKETS)
    assert all(len(labels) == len(METRICS[name][2]) for name, labels in known_series(LAYOUTS))


def expressions() -> list[tuple[str, str]]:
    """The dashboard's expressions, and the legend of each."""
    dashboard = json.loads(DASHBOARD.read_text())
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [
        variable for variable in dashboard["templating"]["list"] if variable["type"] == "query"
    ]
    return [
        *((target["expr"], target["legendFormat"]) for target in targets),
        *((variable["query"]["query"], "") for variable in variables),
    ]


def names_in(text: str) -> set[str]:
    """The metrics of vLLM and PAT that a text names."""
    return set(re.findall(r"vllm:\w+", text))


def test_dashboard_and_docs_name_every_metric() -> None:
    ours = {name for metric in METRICS for name in exported(metric)}
    used = {name for expr, _ in expressions() for name in names_in(expr) if "vllm:pat_" in name}
    assert used <= ours
    assert all(used & {*exported(metric)} for metric in METRICS)
    named = {name for name in names_in((DOCS / "metrics.md").read_text()) if "vllm:pat_" in name}
    counters = {name for name, (kind, *_) in METRICS.items() if kind is Counter}
    assert named == {f"{name}_total" for name in counters} | (METRICS.keys() - counters)
