"""What happens in an engine is what Prometheus shows."""

from __future__ import annotations

import time
from itertools import permutations
from typing import Any

import pytest

import pat_vllm
from pat_vllm.layout import Layout
from pat_vllm.metrics import names
from pat_vllm.metrics.names import METRICS
from pat_vllm.reporting import SWITCH_REASONS
from tests.engine.specs import DRAFTS
from tests.support.engines import Job, run
from tests.unit.metrics.test_metric_updates import exported
from tests.vllm.metrics.exported import samples, series

pytestmark = pytest.mark.engine(DRAFTS)

VERIFIED = "vllm:spec_decode_num_draft_tokens"


def test_the_registry_says_what_the_report_says(llm: Any) -> None:
    def watch(number: int) -> None:
        if number in (8, 16, 24):
            assert pat_vllm.switch(llm, tp=1 if number == 16 else 2)
        shown.append(samples()[series(names.NUM_REQUESTS, replica=0)])

    def drafted() -> float:
        (counter,) = (metric for metric in llm.get_metrics() if metric.name == VERIFIED)
        return counter.value

    # An engine in this process makes no step after its last output. The next one tells the rest.
    tell_the_rest = {"rest": Job([5, 7, 9], {"max_tokens": 3})}
    run(llm, tell_the_rest)
    pat_vllm.report(llm)  # that work is over
    began, before, drafted_before = time.monotonic(), samples(), drafted()
    shown: list[float] = []
    for batch in range(2):
        sampling = {"max_tokens": 40, "ignore_eos": True}
        run(llm, {f"{batch}-{i}": Job([5 + i, 7, 9], sampling) for i in range(4)}, watch)
    switches = pat_vllm.report(llm, since=began).switches
    run(llm, tell_the_rest)
    after = samples()

    assert [switch.reason for switch in switches] == 2 * ["forced", "forced", "forced", "idle"]
    for source, target in permutations((Layout(1, 2), Layout(2, 1))):
        for reason in SWITCH_REASONS:
            matching = [s for s in switches if (s.source, s.reason) == (source, reason)]
            key = series(names.SWITCHES, source=source, target=target, reason=reason)
            assert after[key] - before[key] == len(matching)
    total = exported(names.STALL)[1]
    stalls = [(total, (("reason", reason),)) for reason in SWITCH_REASONS]
    stalled = sum(after[key] - before[key] for key in stalls)
    assert stalled == pytest.approx(sum(switch.seconds for switch in switches))
    assert {0.0, 2.0, 4.0} <= {*shown}
    assert after[series(names.TENSOR_PARALLEL_SIZE)] == 1
    assert after[series(names.NUM_REPLICAS)] == 2

    assert after[series(names.DRAFT_LENGTH, replica=0)] == 1
    assert METRICS.keys() <= {metric.name for metric in llm.get_metrics()}
    of_batches = sum(sample.counts.drafted for sample in pat_vllm.report(llm, since=began).drafts)
    assert drafted() - drafted_before == of_batches > 0
