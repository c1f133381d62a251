"""The metrics that PAT exports: names, labels, buckets. Pure.

Draft tokens that were verified and accepted are in vLLM's own counters
(`vllm:spec_decode_num_draft_tokens`, `vllm:spec_decode_num_accepted_tokens`), over all replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import permutations, product

from pat_vllm.layout import Layout
from pat_vllm.reporting import REFUSALS, SWITCH_REASONS

WAYS = ("fixed", "switching", "drafting")
"""The ways to do a batch that `BatchTimes` knows: values of the label `way`."""
ESTIMATES = ("predicted", "realised")
"""Values of the label `estimate`, see `BatchSavings`."""


class Kind(Enum):
    """What a metric is to Prometheus."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True)
class Metric:
    """A metric.

    Attributes:
        name: vLLM's way to name it; a counter without the suffix that Prometheus adds.
        labels: those beside the model's name and the engine's index, which every metric has.
        buckets: upper bounds, of a histogram.
    """

    name: str
    kind: Kind
    documentation: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()

    @property
    def exported(self) -> tuple[str, ...]:
        """The names in the exposition."""
        if self.kind is Kind.COUNTER:
            return (f"{self.name}_total",)
        if self.kind is Kind.HISTOGRAM:
            return tuple(f"{self.name}_{suffix}" for suffix in ("bucket", "sum", "count"))
        return (self.name,)


TENSOR_PARALLEL_SIZE = Metric(
    "vllm:pat_tensor_parallel_size",
    Kind.GAUGE,
    "Tensor-parallel size of the layout in use.",
)
NUM_REPLICAS = Metric(
    "vllm:pat_num_replicas",
    Kind.GAUGE,
    "Replicas of the layout in use.",
)
NUM_REQUESTS = Metric(
    "vllm:pat_num_requests_by_replica",
    Kind.GAUGE,
    "Number of unfinished requests, running or waiting, in each replica of the layout in use.",
    labels=("replica",),
)
DRAFT_LENGTH = Metric(
    "vllm:pat_num_speculative_tokens_by_replica",
    Kind.GAUGE,
    "Draft tokens that each replica's last step asked for, for each request.",
    labels=("replica",),
)
SWITCHES = Metric(
    "vllm:pat_switches",
    Kind.COUNTER,
    "Number of switches from one layout to another. "
    "Reason labels: 'policy'; 'forced' = a user asked for it; 'idle' = the engine went home.",
    labels=("source", "target", "reason"),
)
STALL = Metric(
    "vllm:pat_switch_stall_seconds",
    Kind.HISTOGRAM,
    "Histogram of the time for which a switch held up generation, in seconds. "
    "With reason 'idle' there was nothing to hold up.",
    labels=("reason",),
    buckets=(0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0, 10.0),
)
REFUSED = Metric(
    "vllm:pat_refused_switches",
    Kind.COUNTER,
    "Number of switches that were not made; generation went on in the layout in use. "
    "Reason 'planning_failed' is a mistake of PAT's, whose traceback is in the log.",
    labels=("reason",),
)
BATCHES = Metric(
    "vllm:pat_batches",
    Kind.COUNTER,
    "Number of batches whose savings the predictor policy has estimated. A batch ends after its "
    "last output: an `LLM` shows that with its next request.",
)
BATCH_SECONDS = Metric(
    "vllm:pat_batch_seconds",
    Kind.COUNTER,
    "Seconds of these batches, done in three ways: 'fixed' = in the base layout without drafts, "
    "'switching' = in the layouts they were in, switches included, without drafts, "
    "'drafting' = with drafts, too. 'predicted' by the plan that saw most requests; of 'realised', "
    "'drafting' is measured and the others are estimated. Layouts saved fixed - switching, drafts "
    "switching - drafting.",
    labels=("estimate", "way"),
)

METRICS = (
    *(TENSOR_PARALLEL_SIZE, NUM_REPLICAS, NUM_REQUESTS, DRAFT_LENGTH),
    *(SWITCHES, STALL, REFUSED, BATCHES, BATCH_SECONDS),
)


def known_series(layouts: Sequence[Layout]) -> Iterator[tuple[Metric, tuple[str, ...]]]:
    """Counters and histograms with all labels that are known at start, for an engine's layouts.

    They begin at 0: of a series that begins with its first event, `rate` would not see that event.
    """
    for source, target in permutations(layouts, 2):
        for reason in SWITCH_REASONS:
            yield SWITCHES, (str(source), str(target), reason)
    for reason in SWITCH_REASONS:
        yield STALL, (reason,)
    for reason in REFUSALS:
        yield REFUSED, (reason,)
    yield BATCHES, ()
    for labels in product(ESTIMATES, WAYS):
        yield BATCH_SECONDS, labels
