"""PAT's metrics in vLLM's registry: what `PATConnector` gives vLLM's loggers.

vLLM's Prometheus logger asks the KV connector of an engine for metrics of its own, and hands it the
connector's part of the statistics of each step. Gauges, counters and histograms are of the classes
that the logger uses: prometheus_client's, which several API servers can share, or Ray's.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from prometheus_client import Counter, Gauge, Histogram
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from pat_vllm.layout import Layout
from pat_vllm.metrics.metric_updates import MetricUpdates, updates_of
from pat_vllm.metrics.names import METRICS, STALL_BUCKETS, known_series

if TYPE_CHECKING:
    from vllm.config import VllmConfig


_OPTIONS: dict[type, dict[str, Any]] = {
    Gauge: {"multiprocess_mode": "mostrecent"},
    Histogram: {"buckets": list(STALL_BUCKETS)},
}
_UPDATE: dict[type, str] = {Gauge: "set", Counter: "inc", Histogram: "observe"}
"""What an update does to a series."""
_LAYOUTS, _DEFAULT_LAYOUT = "pat_layouts", "pat_default_layout"
"""Keys in the extra config of the connector that loggers see; values are names of layouts."""


class PATMetrics(KVConnectorPromMetrics):
    """Registers PAT's metrics, with the values of an idle engine, and applies updates to them."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        """See vLLM's `KVConnectorBase_V1.build_prom_metrics`."""
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._metrics = {
            name: metric_types[kind](
                name=name,
                documentation=documentation,
                labelnames=[*labelnames, *labels],
                **_OPTIONS.get(kind, {}),
            )
            for name, (kind, documentation, labels) in METRICS.items()
        }
        self._series: dict[tuple[int, str, tuple[str, ...]], Any] = {}
        assert vllm_config.kv_transfer_config is not None
        extra = vllm_config.kv_transfer_config.kv_connector_extra_config
        layouts = [Layout.parse(name) for name in extra[_LAYOUTS]]
        layout, idle = Layout.parse(extra[_DEFAULT_LAYOUT]), MetricUpdates()
        idle.state(layout, (0,) * layout.replicas)
        first = idle.take()
        assert first is not None
        for engine_idx in per_engine_labelvalues:
            # A series that began with its first event would hide that event from `rate`.
            for name, labels in known_series(layouts):
                self._of(engine_idx, name, labels)
            self.observe(first, engine_idx)

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Apply what `MetricUpdates.take` gave."""
        for name, labels, value in updates_of(transfer_stats_data):
            series = self._of(engine_idx, name, tuple(labels))
            getattr(series, _UPDATE[METRICS[name][0]])(value)

    def _of(self, engine_idx: int, name: str, labels: tuple[str, ...]) -> Any:
        key = engine_idx, name, labels
        if key not in self._series:
            values = *self.per_engine_labelvalues[engine_idx], *labels
            self._series[key] = self._metrics[name].labels(*values)
        return self._series[key]


class PATStats(KVConnectorStats):
    """PAT's part of the statistics for vLLM's log lines, which leave it out: PAT has its own."""

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        return self

    def is_empty(self) -> bool:
        return True


def naming_connector(
    vllm_config: VllmConfig, layouts: Iterable[Layout], default_layout: Layout
) -> VllmConfig:
    """A copy of an engine's config that names PAT's connector, for vLLM's loggers alone.

    The engine's own names none: its core and workers make PAT's connector themselves, for switches.

    Args:
        layouts: the engine's, for whose series the metrics are registered.
        default_layout: the layout in which it starts.
    """
    config = copy.copy(vllm_config)
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="PATConnector",
        kv_connector_module_path="pat_vllm.kv_transfer.connector",
        kv_role="kv_producer",  # or vLLM adds a gauge, num_requests_kv_fetch_by_stage
        kv_connector_extra_config={
            _LAYOUTS: [str(layout) for layout in layouts],
            _DEFAULT_LAYOUT: str(default_layout),
        },
    )
    return config
