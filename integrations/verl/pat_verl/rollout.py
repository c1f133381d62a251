"""What an engine did between two reports, as one line of a log."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from pat_vllm.layout import Layout
from pat_vllm.reporting import Report, SwitchReport


@dataclass(frozen=True)
class Rollout:
    """What an engine did between two of its reports.

    Attributes:
        switches: oldest first, without those home, which find no request.
        refused: switches that were not made.
        peak: most unfinished requests at a time.
        steps: by layout, of all replicas.
        batches, responses: what the length model has learnt from since the start.
    """

    switches: tuple[SwitchReport, ...]
    refused: int
    peak: int
    steps: Mapping[Layout, int]
    batches: int
    responses: int

    @classmethod
    def between(cls, before: Report | None, after: Report) -> Rollout:
        """From the report at its start (None: the engine's start) and the one at its end."""
        since = -1.0 if before is None else _last(before)
        earlier = {} if before is None else before.steps
        steps = {
            layout: done.steps - (earlier[layout].steps if layout in earlier else 0)
            for layout, done in after.steps.items()
        }
        return cls(
            switches=tuple(s for s in after.switches if s.at > since and s.reason != "idle"),
            refused=sum(refused.at > since for refused in after.refused),
            peak=max((sample.live for sample in after.timeline if sample.at > since), default=0),
            steps={layout: count for layout, count in steps.items() if count},
            batches=after.predictor.batches,
            responses=after.predictor.responses,
        )

    def __str__(self) -> str:
        seconds = sum(switch.seconds for switch in self.switches)
        made = "1 switch" if len(self.switches) == 1 else f"{len(self.switches)} switches"
        parts = [f"{made} in {seconds:.3f} s"]
        if self.switches:
            path = ", ".join(f"{s.source} -> {s.target} at {s.live} live" for s in self.switches)
            parts[0] += f" ({path})"
        if self.refused:
            parts.append(f"{self.refused} refused")
        parts.append(f"at most {self.peak} live")
        parts.append("steps " + ", ".join(f"{at}: {count}" for at, count in self.steps.items()))
        if self.batches:
            parts.append(f"lengths learnt from {self.batches} batches, {self.responses} responses")
        return "; ".join(parts)


def _last(report: Report) -> float:
    """When the last thing in it happened."""
    return max(
        (one.at for one in (*report.switches, *report.refused, *report.timeline)), default=-1.0
    )
