"""The metrics that PAT exports: names, labels, buckets. Pure.

Draft tokens that were verified and accepted are in vLLM's own counters
(`vllm:spec_decode_num_draft_tokens`, `vllm:spec_decode_num_accepted_tokens`), over all replicas.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

from prometheus_client import Counter, Gauge, Histogram

from pat_vllm.layout import Layout
from pat_vllm.reporting import REFUSALS, SWITCH_REASONS

TENSOR_PARALLEL_SIZE = "vllm:pat_tensor_parallel_size"
NUM_REPLICAS = "vllm:pat_num_replicas"
NUM_REQUESTS = "vllm:pat_num_requests_by_replica"
DRAFT_LENGTH = "vllm:pat_num_speculative_tokens_by_replica"
REPEATED_DRAFTED = "vllm:pat_repeated_draft_tokens"
REPEATED_ACCEPTED = "vllm:pat_repeated_accepted_tokens"
SWITCHES = "vllm:pat_switches"
STALL = "vllm:pat_switch_stall_seconds"
REFUSED = "vllm:pat_refused_switches"
BATCHES = "vllm:pat_batches"
BATCH_SECONDS = "vllm:pat_batch_seconds"
BATCH_TOKENS = "vllm:pat_batch_tokens"

METRICS: Mapping[str, tuple[type[Gauge | Counter | Histogram], str, tuple[str, ...]]] = {
    TENSOR_PARALLEL_SIZE: (Gauge, "Tensor-parallel size of the layout in use.", ()),
    NUM_REPLICAS: (Gauge, "Replicas of the layout in use.", ()),
    NUM_REQUESTS: (
        Gauge,
        "Number of unfinished requests, running or waiting, in each replica of the layout in use.",
        ("replica",),
    ),
    DRAFT_LENGTH: (
        Gauge,
        "Draft tokens that each replica's last step asked for, for each request.",
        ("replica",),
    ),
    REPEATED_DRAFTED: (
        Counter,
        "Number of draft tokens of requests to whose prompt there were earlier responses. vLLM's "
        "own counter has those of all requests.",
        (),
    ),
    REPEATED_ACCEPTED: (Counter, "Number of these draft tokens that were accepted.", ()),
    SWITCHES: (
        Counter,
        "Number of switches from one layout to another. "
        "Reason labels: 'policy'; 'forced' = a user asked; 'idle' = back to the default layout.",
        ("source", "target", "reason"),
    ),
    STALL: (
        Histogram,
        "Histogram of the time for which a switch held up generation, in seconds. "
        "With reason 'idle' there was nothing to hold up.",
        ("reason",),
    ),
    REFUSED: (
        Counter,
        "Number of switches that were not made; generation went on in the layout in use. "
        "Reason 'planning_failed' is a mistake of PAT's, whose traceback is in the log.",
        ("reason",),
    ),
    BATCHES: (
        Counter,
        "Number of batches that ended. A batch ends after its last output: an `LLM` shows that "
        "with its next request. Control labels: 'true' = it was kept in one layout, for the "
        "others to be compared with it; 'false'.",
        ("control",),
    ),
    BATCH_SECONDS: (
        Counter,
        "Seconds of these batches, from the first arrival to the last output.",
        ("control",),
    ),
    BATCH_TOKENS: (Counter, "Number of tokens that these batches generated.", ("control",)),
}
"""By name: what it is to Prometheus, its help, and its labels beside the model's name and the
engine's index, which every metric has. Names are formed as vLLM's; to a counter's Prometheus adds
`_total`."""

STALL_BUCKETS = (
    *(0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5),
    *(1.0, 2.0, 5.0, 10.0),
)
"""Upper bounds, in seconds."""


def known_series(layouts: Sequence[Layout]) -> Iterator[tuple[str, tuple[str, ...]]]:
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
    yield REPEATED_DRAFTED, ()
    yield REPEATED_ACCEPTED, ()
    for metric in (BATCHES, BATCH_SECONDS, BATCH_TOKENS):
        for control in ("false", "true"):
            yield metric, (control,)
