"""What became of a replayed trace: plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from pat_vllm.layout import Layout
from pat_vllm.reporting import DecisionReport, DraftSample, LiveSample, SwitchReport


@dataclass(frozen=True)
class SimulatedSteps:
    """Steps of all replicas in one layout: how many, and their seconds added up."""

    steps: int
    seconds: float


@dataclass(frozen=True)
class SimulatedRun:
    """One replayed trace. Times in seconds on the simulator's clock.

    Attributes:
        began: when the trace began.
        ended: when the last response ended.
        back: when the engine was home again, ready for its next batch.
        tokens: generated.
        finished: when each response ended, in the trace's order.
        switches: oldest first; the way home has the reason "idle".
        timeline: live requests and layout, a sample per change.
        steps: by layout.
        prefilled: prompt tokens computed, those computed again included.
        preempted: how often a request lost its KV for want of memory.
        decisions: of the policy, this run's only.
        drafts: of a policy that learns and plans draft lengths, a sample per chunk of steps; what
            was accepted is scaled up from the first steps of each.
    """

    began: float
    ended: float
    back: float
    tokens: int
    finished: tuple[float, ...]
    switches: tuple[SwitchReport, ...]
    timeline: tuple[LiveSample, ...]
    steps: Mapping[Layout, SimulatedSteps]
    prefilled: int
    preempted: int
    decisions: tuple[DecisionReport, ...]
    drafts: tuple[DraftSample, ...] = ()

    @property
    def seconds(self) -> float:
        """From the first arrival until the engine is ready for its next batch."""
        return self.back - self.began

    @property
    def generation_seconds(self) -> float:
        """From the first arrival to the last response."""
        return self.ended - self.began

    @property
    def tokens_per_second(self) -> float:
        """Throughput of the whole run."""
        return self.tokens / self.seconds

    @property
    def busy_seconds(self) -> float:
        """Seconds of steps, added up over replicas."""
        return sum(steps.seconds for steps in self.steps.values())

    @property
    def switch_seconds(self) -> float:
        """Seconds of switches, the way home included and drained steps not."""
        return sum(switch.seconds - switch.quiesce for switch in self.switches)

    @property
    def switches_on_the_way(self) -> tuple[SwitchReport, ...]:
        """The switches that carried requests."""
        return tuple(switch for switch in self.switches if switch.reason != "idle")

    def to_json(self) -> dict[str, Any]:
        """Plain values; times count from the run's beginning."""
        return {
            "seconds": self.seconds,
            "generation_seconds": self.generation_seconds,
            "tokens": self.tokens,
            "tokens_per_second": self.tokens_per_second,
            "busy_seconds": self.busy_seconds,
            "switch_seconds": self.switch_seconds,
            "prefilled": self.prefilled,
            "preempted": self.preempted,
            "steps": {str(layout): asdict(steps) for layout, steps in self.steps.items()},
            "switches": [
                {
                    "at": switch.at - self.began,
                    "source": str(switch.source),
                    "target": str(switch.target),
                    "reason": switch.reason,
                    "num_seqs": switch.num_seqs,
                    "seconds": switch.seconds,
                    "quiesce": switch.quiesce,
                }
                for switch in self.switches
            ],
            "timeline": [
                [sample.at - self.began, str(sample.layout), sample.num_seqs]
                for sample in self.timeline
            ],
        }
