"""Metrics: what happens in an engine is what Prometheus shows, and what the dashboard asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from itertools import permutations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import REGISTRY, CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client import values as prometheus_values
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.prometheus import get_prometheus_registry
from vllm.v1.request import RequestStatus

import pat_vllm
from benchmarks.without_workers import engine_config
from pat_vllm import plugin
from pat_vllm.kv_transfer.connector import PATConnector
from pat_vllm.layout import Layout
from pat_vllm.metrics import names
from pat_vllm.metrics.names import METRICS, Kind, Metric, known_series
from pat_vllm.metrics.prometheus import PATMetrics
from pat_vllm.metrics.updates import Update, Updates, updates_of
from pat_vllm.patches.front_end import tell_loggers
from pat_vllm.reporting import (
    REFUSALS,
    SWITCH_REASONS,
    BatchSavings,
    BatchTimes,
    PredictorReport,
    RefusedSwitch,
)
from pat_vllm.scheduler import switch as switch_module
from pat_vllm.scheduler.monitor import Monitor
from pat_vllm.scheduler.scheduler import PATScheduler
from pat_vllm.scheduler.stats import send_metrics
from tests.engines import Job, engine, run
from tests.support.mutation import mutated
from tests.test_reporting import a_switch
from tests.test_scheduler import add, no_plan, step

DOCS = Path(__file__).parents[1] / "docs"
DASHBOARD = DOCS / "grafana" / "pat-vllm.json"
REPLICAS, GROUP = Layout(1, 2), Layout(2, 1)
LAYOUTS = [Layout(1, 4), Layout(2, 2), Layout(4, 1)]
BY_NAME = {one.name: one for one in METRICS}
LABELS = ("model_name", "engine")

Series = tuple[str, tuple[tuple[str, str], ...]]


def series(metric: Metric, **labels: Any) -> Series:
    return metric.exported[0], tuple(sorted((name, str(value)) for name, value in labels.items()))


def samples(registry: CollectorRegistry = REGISTRY) -> dict[Series, float]:
    """PAT's values, by exported name and by labels but those that vLLM gives each metric."""
    found = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name.startswith("vllm:pat_") and not sample.name.endswith("_created"):
                assert set(LABELS) <= sample.labels.keys()
                labels = {k: v for k, v in sample.labels.items() if k not in LABELS}
                found[sample.name, tuple(sorted(labels.items()))] = sample.value
    return found


# ---------------------------------------------------------------- updates


def taken(updates: Updates) -> list[Update]:
    """What is taken, after it has travelled as vLLM's statistics do."""
    data = updates.take()
    if data is None:
        return []
    assert json.loads(json.dumps(data)) == data
    found = updates_of(msgspec.msgpack.decode(msgspec.msgpack.encode(data)))
    assert all(len(one.labels) == len(BY_NAME[one.name].labels) for one in found)
    return found


def gauges(found: list[Update], metric: Metric) -> dict[tuple[str, ...], float]:
    return {tuple(one.labels): one.value for one in found if one.name == metric.name}


def check_gauges_travel_when_they_change() -> None:
    updates = Updates()
    assert updates.take() is None
    updates.state(LAYOUTS[0], [3, 2, 0, 1])
    found = taken(updates)
    assert gauges(found, names.TENSOR_PARALLEL_SIZE) == {(): 1}
    assert gauges(found, names.NUM_REPLICAS) == {(): 4}
    assert gauges(found, names.NUM_REQUESTS) == {("0",): 3, ("1",): 2, ("2",): 0, ("3",): 1}
    updates.state(LAYOUTS[0], [3, 2, 0, 1])
    assert updates.take() is None
    updates.draft_length(1, 4)
    updates.draft_length(1, 2)
    updates.state(LAYOUTS[0], [3, 1, 0, 1])
    assert not updates.has_events
    assert taken(updates) == [
        Update(names.DRAFT_LENGTH.name, ["1"], 2),
        Update(names.NUM_REQUESTS.name, ["1"], 1),
    ]
    # Replicas that are gone have no requests and no drafts.
    updates.state(LAYOUTS[2], [5])
    found = taken(updates)
    assert gauges(found, names.NUM_REQUESTS) == {("0",): 5, ("1",): 0, ("3",): 0}
    assert gauges(found, names.DRAFT_LENGTH) == {("1",): 0}
    assert gauges(found, names.TENSOR_PARALLEL_SIZE) == {(): 4}


def test_gauges_travel_when_they_change() -> None:
    check_gauges_travel_when_they_change()


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        (Updates.state, {"range(len(num_seqs), before)": "range(0)"}),
        (Updates._set, {"if self._shown.get(series) != value:": "if True:"}),
        (Updates.take, {"self._events, self._gauges = [], {}": "pass"}),
    ],
    ids=["replicas stay", "all travel", "twice"],
)
def test_wrong_gauges_are_noticed(method: Any, changes: dict[str, str]) -> None:
    with mutated(method, changes), pytest.raises(AssertionError):
        check_gauges_travel_when_they_change()


def a_batch(at: float, *seconds: float) -> BatchSavings:
    return BatchSavings(at, LAYOUTS[0], BatchTimes(*seconds[:3]), BatchTimes(*seconds[3:]))


def test_a_counter_never_falls() -> None:
    updates = Updates()
    updates.saved(a_batch(1.0, -1e-9, 2.0, 1.0, 4.0, 3.0, float("nan")))
    assert all(one.value >= 0 for one in taken(updates))


# ---------------------------------------------------------------- the registry


def registered(registry: CollectorRegistry, tp: int = 2) -> PATMetrics:
    """As vLLM's Prometheus logger makes them, for four ranks of which `tp` are a group."""
    parallel = SimpleNamespace(world_size=4, tensor_parallel_size=4)
    policy = {"kind": "static", "tp": tp}
    config: Any = SimpleNamespace(
        additional_config={"pat": {"policy": policy}},
        model_config=None,
        parallel_config=parallel,
        kv_transfer_config=None,
    )

    def of(kind: Any) -> Callable[..., Any]:
        return lambda **options: kind(registry=registry, **options)

    types = {kind: of(kind) for kind in (Gauge, Counter, Histogram)}
    return PATMetrics(config, types, list(LABELS), {0: ["model", "0"]})


def test_metrics_begin_at_zero_and_in_the_home_layout() -> None:
    registry = CollectorRegistry()
    registered(registry)
    found = samples(registry)
    assert found.pop(series(names.TENSOR_PARALLEL_SIZE)) == 2
    assert found.pop(series(names.NUM_REPLICAS)) == 2
    assert found and set(found.values()) == {0.0}
    assert series(names.SWITCHES, source="tp1dp4", target="tp4dp1", reason="policy") in found
    assert series(names.REFUSED, reason="planning_failed") in found
    exported = {name for name, _ in found} | {m.exported[0] for m in METRICS[:2]}
    drafts = {*names.DRAFT_LENGTH.exported}  # an engine that does not speculate has none
    assert exported == {name for one in METRICS for name in one.exported} - drafts


SECONDS = st.floats(0.0, 100.0)
EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("switched"),
            st.permutations(LAYOUTS),
            st.sampled_from(SWITCH_REASONS),
            SECONDS,
        ),
        st.tuples(st.just("refused"), st.sampled_from(REFUSALS)),
        st.tuples(st.just("saved"), st.lists(SECONDS, min_size=6, max_size=6)),
        st.tuples(st.just("take")),
    )
)


@given(EVENTS)
def test_the_registry_adds_up_what_happened(events: list[Any]) -> None:
    registry = CollectorRegistry()
    metrics, updates = registered(registry), Updates()
    before = samples(registry)
    expected: dict[Series, float] = dict.fromkeys(before, 0.0)
    for kind, *values in events:
        if kind == "switched":
            (source, target, _), reason, seconds = values
            report: Any = SimpleNamespace(
                source=source, target=target, reason=reason, seconds=seconds
            )
            updates.switched(report)
            expected[series(names.SWITCHES, source=source, target=target, reason=reason)] += 1
            _, total, count = names.STALL.exported
            expected[total, (("reason", reason),)] += seconds
            expected[count, (("reason", reason),)] += 1
            for bound in (*names.STALL.buckets, float("inf")):
                if seconds <= bound:
                    le = "+Inf" if bound == float("inf") else str(bound)
                    expected[series(names.STALL, reason=reason, le=le)] += 1
        elif kind == "refused":
            updates.refused(RefusedSwitch(1.0, LAYOUTS[0], LAYOUTS[1], "", True, *values))
            expected[series(names.REFUSED, reason=values[0])] += 1
        elif kind == "saved":
            updates.saved(a_batch(1.0, *values[0]))
            expected[series(names.BATCHES)] += 1
            ways = [(e, w) for e in names.ESTIMATES for w in names.WAYS]
            for (estimate, way), seconds in zip(ways, values[0], strict=True):
                expected[series(names.BATCH_SECONDS, estimate=estimate, way=way)] += seconds
        else:
            metrics.observe({"updates": taken(updates)})
    metrics.observe({"updates": taken(updates)})
    found = samples(registry)
    assert found.keys() == before.keys()  # each series was known at start
    for gauge in (names.TENSOR_PARALLEL_SIZE, names.NUM_REPLICAS):
        expected[series(gauge)] = 2
    assert found == pytest.approx(expected)


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


def test_every_name_is_vllms_way() -> None:
    assert len(BY_NAME) == len(METRICS)
    for one in METRICS:
        assert re.fullmatch(r"vllm:pat_[a-z_]+", one.name) and not one.name.endswith("_total")
        assert one.documentation.endswith(".")
        assert not {*one.labels} & {*LABELS, "le"}
        assert list(one.buckets) == sorted(one.buckets)
    assert all(len(labels) == len(one.labels) for one, labels in known_series(LAYOUTS))


def test_several_api_servers_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM has them write: each to its files, counters are summed, of gauges the last counts."""
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    one = a_switch(1.0)
    for process in (1, 2):
        to_files = prometheus_values.MultiProcessValue(
            process_identifier=lambda process=process: process
        )
        monkeypatch.setattr(prometheus_values, "ValueClass", to_files)
        metrics, updates = registered(CollectorRegistry()), Updates()
        for _ in range(process):
            updates.switched(one)
        updates.state(LAYOUTS[0], [process] * 4)
        metrics.observe({"updates": taken(updates)})
    found = samples(get_prometheus_registry())
    pair = {"source": one.source, "target": one.target, "reason": one.reason}
    assert found[series(names.SWITCHES, **pair)] == 3
    assert found[names.STALL.exported[2], (("reason", one.reason),)] == 3
    assert found[series(names.NUM_REQUESTS, replica=3)] == 2
    assert found[series(names.TENSOR_PARALLEL_SIZE)] == 1


# ---------------------------------------------------------------- the engine core


@pytest.fixture
def scheduler() -> Any:
    """For eight ranks, in the layout tp8dp1, without workers."""
    config, stock = engine_config(8, num_blocks=80)
    return PATScheduler(vllm_config=config, **stock)


def carried(outputs: dict[int, Any]) -> list[Update]:
    """The updates in the outputs of a step: of one client at most."""
    parts = [
        one.scheduler_stats.kv_connector_stats
        for one in outputs.values()
        if one.scheduler_stats is not None and one.scheduler_stats.kv_connector_stats
    ]
    assert len(parts) <= 1
    return [update for part in parts for update in updates_of(part)]


def check_updates_travel_with_statistics(scheduler: Any) -> None:
    add(scheduler, 5)
    assert gauges(carried(step(scheduler)), names.NUM_REQUESTS) == {("0",): 5}
    assert carried(step(scheduler)) == []
    assert scheduler.controller.request(2) is True
    found = carried(step(scheduler))
    assert gauges(found, names.SWITCHES) == {("tp8dp1", "tp2dp4", "forced"): 1}
    (stall,) = scheduler.controller.report().switches
    assert gauges(found, names.STALL) == {("forced",): stall.seconds}
    assert gauges(found, names.NUM_REPLICAS) == {(): 4}
    assert sum(gauges(found, names.NUM_REQUESTS).values()) == 5
    # Home again, with nobody left whose output the statistics could go with.
    scheduler.finish_requests(None, RequestStatus.FINISHED_ABORTED)
    found = carried(step(scheduler))
    assert gauges(found, names.SWITCHES) == {("tp2dp4", "tp8dp1", "idle"): 1}
    assert gauges(found, names.TENSOR_PARALLEL_SIZE) == {(): 8}
    assert {*gauges(found, names.NUM_REQUESTS).values()} == {0}
    assert carried(step(scheduler)) == []


def test_updates_travel_with_statistics(scheduler: Any) -> None:
    check_updates_travel_with_statistics(scheduler)


def test_lost_events_are_noticed(scheduler: Any) -> None:
    changes = {"carrier is None and updates.has_events": "False"}
    with mutated(send_metrics, changes), pytest.raises(AssertionError):
        check_updates_travel_with_statistics(scheduler)


def test_refusals_by_reason(scheduler: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    add(scheduler, 2)
    step(scheduler)
    executor = scheduler.replica_set.executor
    monkeypatch.setattr(executor, "is_sleeping", True)
    assert scheduler.controller.request(2) is False
    monkeypatch.setattr(executor, "is_sleeping", False)
    monkeypatch.setattr(executor, "refresh_weights", lambda: False)
    assert scheduler.controller.request(2) is False
    monkeypatch.undo()
    monkeypatch.setattr(switch_module, "plan_moves", no_plan)
    with pytest.raises(switch_module.PlanningFailed):
        scheduler.controller.request(2)
    monkeypatch.undo()
    next(iter(scheduler.replica_set.replicas[0].scheduler.requests.values())).resumable = True
    assert scheduler.controller.request(2) is False
    refused = scheduler.controller.report().refused
    assert tuple(one.reason for one in refused[:2]) == REFUSALS[:2]
    assert {one.reason for one in refused} == {*REFUSALS}
    assert gauges(carried(step(scheduler)), names.REFUSED) == {(one,): 1 for one in REFUSALS}


def test_without_statistics_nothing_is_kept() -> None:
    config, stock = engine_config(8, num_blocks=80)
    scheduler = PATScheduler(vllm_config=config, **{**stock, "log_stats": False})
    add(scheduler, 2)
    assert scheduler.monitor.metrics is None
    assert all(one.scheduler_stats is None for one in step(scheduler).values())


def test_each_batch_is_counted_once() -> None:
    batches = [a_batch(at, 4.0, 3.0, 2.0, 4.0, 2.0, 1.0) for at in (10.0, 10.0, 20.0)]
    ended: list[BatchSavings] = []

    def report(since: float) -> PredictorReport:
        return PredictorReport(savings=tuple(b for b in ended if b.at >= since))

    quiet: Any = SimpleNamespace(idle=lambda *now: None, report=report)
    updates = Updates()
    monitor = Monitor(quiet, quiet, None, speculates=False, metrics=updates)  # type: ignore[arg-type]
    counts = []
    for more in (0, 2, 0, 1):
        ended += batches[len(ended) : len(ended) + more]
        monitor.idle()
        counts.append(sum(one.name == names.BATCHES.name for one in taken(updates)))
    assert counts == [0, 2, 0, 1]


# ---------------------------------------------------------------- the dashboard


def expressions() -> list[tuple[str, str]]:
    """The dashboard's expressions, and the legend of each."""
    dashboard = json.loads(DASHBOARD.read_text())
    targets = [target for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [one for one in dashboard["templating"]["list"] if one["type"] == "query"]
    return [
        *((target["expr"], target["legendFormat"]) for target in targets),
        *((one["query"]["query"], "") for one in variables),
    ]


def names_in(expression: str) -> set[str]:
    return set(re.findall(r"vllm:\w+", expression))


def test_the_dashboard_shows_every_metric() -> None:
    ours = {name for one in METRICS for name in one.exported}
    used = {name for expr, _ in expressions() for name in names_in(expr) if "vllm:pat_" in name}
    assert used <= ours
    assert all(used & {*one.exported} for one in METRICS)


def test_the_docs_name_every_metric() -> None:
    named = {one for one in names_in((DOCS / "metrics.md").read_text()) if "vllm:pat_" in one}
    counters = {f"{one.name}_total" for one in METRICS if one.kind is Kind.COUNTER}
    assert named == counters | {one.name for one in METRICS if one.kind is not Kind.COUNTER}


def test_the_dashboard_asks_for_labels_that_are_there() -> None:
    of_name = {name: {*one.labels, *LABELS} for one in METRICS for name in one.exported}
    for expr, legend in expressions():
        assert expr.count("(") == expr.count(")") and expr.count("{") == expr.count("}")
        for name, selector in re.findall(r"(vllm:\w+)\{([^}]*)\}", expr):
            asked = dict(re.findall(r'(\w+)[!=]~?"([^"]*)"', selector))
            assert asked.keys() <= of_name.get(name, {*LABELS}), expr
            for label, values in (
                ("way", names.WAYS),
                ("estimate", names.ESTIMATES),
                ("reason", (*SWITCH_REASONS, *REFUSALS)),
            ):
                assert asked.get(label, values[0]) in values
        shown = set(re.findall(r"\{\{(\w+)\}\}", legend))
        kept = [{*part.split(", ")} for part in re.findall(r"by \(([^)]*)\)", expr)]
        there = [of_name.get(name, {*LABELS}) | {"le"} for name in names_in(expr)]
        assert all(shown <= one for one in (kept or there)), expr
        assert all(one <= labels for one in kept for labels in there), expr


# ---------------------------------------------------------------- an engine


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 4}
    with engine("repeating", 2, {}, disable_log_stats=False, speculative_config=drafts) as llm:
        yield llm


@pytest.mark.slow
def test_the_registry_says_what_the_report_says(llm: Any) -> None:
    def watch(number: int) -> None:
        if number in (8, 16, 24):
            assert pat_vllm.switch(llm, tp=1 if number == 16 else 2)
        shown.append(samples()[series(names.NUM_REQUESTS, replica=0)])

    shown: list[float] = []
    for batch in range(2):
        sampling = {"max_tokens": 40, "ignore_eos": True}
        run(llm, {f"{batch}-{i}": Job([5 + i, 7, 9], sampling) for i in range(4)}, watch)
    report = pat_vllm.report(llm)
    # An engine in this process makes no step after its last output. The next one tells the rest.
    run(llm, {"last": Job([5, 7, 9], {"max_tokens": 3})})

    found = samples()
    assert [switch.reason for switch in report.switches] == 2 * [
        "forced",
        "forced",
        "forced",
        "idle",
    ]
    for source, target in permutations((REPLICAS, GROUP)):
        for reason in SWITCH_REASONS:
            made = [s for s in report.switches if (s.source, s.reason) == (source, reason)]
            pair = {"source": source, "target": target}
            assert found[series(names.SWITCHES, **pair, reason=reason)] == len(made)
    stalls = sum(found[names.STALL.exported[1], (("reason", r),)] for r in SWITCH_REASONS)
    assert stalls == pytest.approx(sum(s.seconds for s in report.switches))
    assert {0.0, 2.0, 4.0} <= {*shown}
    assert found[series(names.TENSOR_PARALLEL_SIZE)] == 1
    assert found[series(names.NUM_REPLICAS)] == 2
    drafted = sum(one.drafted for one in pat_vllm.report(llm).drafts)
    assert found[series(names.DRAFT_LENGTH, replica=0)] == 2 and drafted > 0
    by_vllm = {one.name: one for one in llm.get_metrics()}
    assert {one.name for one in METRICS} <= by_vllm.keys()
    assert by_vllm["vllm:spec_decode_num_draft_tokens"].value == drafted


@pytest.mark.slow
def test_the_dashboard_asks_for_what_vllm_exports(llm: Any) -> None:
    exported = {sample.name for family in REGISTRY.collect() for sample in family.samples}
    for expr, _ in expressions():
        assert names_in(expr) <= exported
