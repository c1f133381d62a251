"""The line about a rollout."""

from dataclasses import replace

from pat_openrlhf.rollouts import describe

from pat_vllm.layout import Layout
from pat_vllm.reporting import PredictorReport, RefusedSwitch, Report, SwitchReport

ONE, TWO = Layout.of(1, 2), Layout.of(2, 2)
SWITCH = SwitchReport(
    at=11.5,
    source=ONE,
    target=TWO,
    reason="policy",
    live=8,
    migrated=8,
    recomputed=0,
    kv_bytes=1,
    seconds=0.0254,
    quiesce=0,
    plan=0,
    states=0,
    kv=0,
    weights=0,
    activate=0,
    rpc=0,
    finish=0,
)
QUIET = Report(layout=ONE, layouts=(ONE, TWO), switches=(), refused=(), timeline=())


def test_switches_of_this_rollout():
    before = replace(SWITCH, at=9.0)
    home = replace(SWITCH, at=12.5, source=TWO, target=ONE, reason="idle", live=0)
    report = replace(QUIET, switches=(before, SWITCH, home))
    assert describe(report, started=10.0, seconds=2.5, responses=64) == (
        "64 responses in 2.50 s; 1x2 -> 2x1 at 1.50 s, 8 live, 25 ms"
    )


def test_no_switch():
    assert describe(QUIET, 10.0, 2.5, 64) == "64 responses in 2.50 s; no switch"


def test_refused_switches():
    refused = tuple(RefusedSwitch(at, ONE, TWO, "no room") for at in (9.0, 11.0, 12.0))
    assert describe(replace(QUIET, refused=refused), 10.0, 2.5, 64).endswith("no switch; 2 refused")


def test_what_was_learnt():
    report = replace(QUIET, predictor=PredictorReport(batches=3, responses=96, siblings=0.412))
    assert describe(report, 10.0, 2.5, 32).endswith(
        "; learnt from 96 responses in 3 batches, siblings 0.41"
    )
