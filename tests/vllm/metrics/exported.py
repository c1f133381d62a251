"""PAT's metrics as a registry of prometheus_client shows them."""

from __future__ import annotations

from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry

from tests.unit.metrics.test_metric_updates import OF_VLLM, exported

Series = tuple[str, tuple[tuple[str, str], ...]]
"""An exported name, and labels with their values."""


def series(metric: str, **labels: Any) -> Series:
    """What a registry calls a gauge or counter; of a histogram, its buckets."""
    return exported(metric)[0], tuple(sorted((name, str(value)) for name, value in labels.items()))


def samples(registry: CollectorRegistry = REGISTRY) -> dict[Series, float]:
    """PAT's values, by exported name and by labels but those that vLLM gives each metric."""
    values = {}
    for family in registry.collect():
        for sample in family.samples:
            if sample.name.startswith("vllm:pat_") and not sample.name.endswith("_created"):
                assert {*OF_VLLM} <= sample.labels.keys()
                labels = {k: v for k, v in sample.labels.items() if k not in OF_VLLM}
                values[sample.name, tuple(sorted(labels.items()))] = sample.value
    return values
