"""Records of reports, for tests."""

from __future__ import annotations

from typing import Any

from pat_vllm.layout import Layout
from pat_vllm.reporting import DecisionReport, SwitchReport

ONE, TWO = Layout(1, 2), Layout(2, 1)
_PARTS = ("quiesce", "plan", "states", "kv", "weights", "activate", "rpc", "finish")


def switch_report(
    at: float,
    source: Layout = ONE,
    target: Layout = TWO,
    reason: str = "policy",
    num_seqs: int = 4,
    seconds: float = 0.25,
) -> SwitchReport:
    """A switch whose parts all take equally long."""
    parts: Any = dict.fromkeys(_PARTS, seconds / len(_PARTS))
    return SwitchReport(
        at=at,
        source=source,
        target=target,
        reason=reason,
        num_seqs=num_seqs,
        migrated=num_seqs,
        recomputed=0,
        kv_bytes=5_000_000,
        seconds=seconds,
        **parts,
    )


def decision_report(at: float, fired: bool = True, why: str = "plan") -> DecisionReport:
    """A decision to go from `ONE` to `TWO`."""
    return DecisionReport(at, ONE, TWO, 4, 2.0, 1.5, 0.1, fired, why, 0.03, 0.02)
