"""Durations simple enough to compute runs by hand, batches, and a policy that takes notes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from benchmarks.simulator.traces import LengthTrace
from pat_vllm.layout import Layout
from pat_vllm.predictor.state import LiveState
from pat_vllm.profile import Profile, StepShape
from pat_vllm.reporting import BatchReport, SwitchReport
from tests.support.modelled_profile import modelled_profile
from tests.support.schedules import FollowSchedule, LayoutSchedule

ONE, TWO = Layout(1, 2), Layout(2, 1)
LAYOUTS = tuple(Layout.of(tp, 4) for tp in (1, 2, 4))
_PROFILE = modelled_profile("llama-3.1-8b", "A40", 8)


def capacity_of(
    max_num_seqs: int = 256,
    max_batch_tokens: int = 8192,
    kv_tokens: Mapping[int, int] | None = None,
    kv_bytes_per_token: int = 0,
) -> Profile:
    """A profile with the same limits in every layout, and much memory where `kv_tokens` is not
    given. What else it has nobody looks at."""
    sizes = (1, 2, 4, 8)
    return _PROFILE.model_copy(
        update={
            "max_num_seqs": dict.fromkeys(sizes, max_num_seqs),
            "max_batch_tokens": dict.fromkeys(sizes, max_batch_tokens),
            "kv_tokens": {**dict.fromkeys(sizes, 1 << 40), **(kv_tokens or {})},
            "kv_bytes_per_token": kv_bytes_per_token,
        }
    )


FREE = capacity_of()


@dataclass(frozen=True)
class Constant:
    """A step takes 1 s in tp=1 and less with more ranks, whatever it computes."""

    switch: float = 2.0

    def step_seconds(self, layout: Layout, shape: StepShape, now: float) -> float:
        return {1: 1.0, 2: 0.75, 4: 0.5}[layout.tp]

    def switch_seconds(self, source: Layout, target: Layout, live: Any, tokens: Any) -> Any:
        return self.switch if source != target else 0.0


@dataclass(frozen=True)
class Linear:
    """A step reads weights and KV and pays for every request; communication grows with tp."""

    request: float = 0.3
    switch: float = 1.0
    token: float = 1e-4

    def step_seconds(self, layout: Layout, shape: StepShape, now: float) -> float:
        tp = layout.tp
        read = (1.0 + self.token * shape.context) / tp
        work = self.request * shape.batch / tp**0.3 + 1e-3 * shape.prefill / tp
        return float(read + work + 0.05 * tp + 0.02 * shape.busy)

    def switch_seconds(self, source: Layout, target: Layout, live: Any, tokens: Any) -> Any:
        return (self.switch + 1e-3 * tokens) if source != target else 0.0


@dataclass(frozen=True)
class Verifying:
    """A step takes 1 s, and a little for drafts and context."""

    def step_seconds(self, layout: Layout, shape: StepShape, now: float) -> float:
        return float((1.0 + 0.01 * shape.drafts + 1e-4 * shape.context) / layout.tp**0.5)

    def switch_seconds(self, source: Layout, target: Layout, live: Any, tokens: Any) -> Any:
        return 0.5


def batch(
    *lengths: int,
    prompt: int = 4,
    arrivals: Iterable[float] | None = None,
    groups: Iterable[int] | None = None,
    max_tokens: int = 100_000,
    acceptance: float = 0.0,
) -> LengthTrace:
    """Requests of these lengths, all at once and with prompts of their own by default."""
    count = len(lengths)
    return LengthTrace(
        name="test",
        lengths=lengths,
        arrivals=tuple(arrivals or ()),
        groups=tuple(groups or ()),
        num_prompt_tokens=(prompt,) * count,
        max_tokens=max_tokens,
        acceptance=acceptance,
    )


def follow(start: Layout, *switches: tuple[int, Layout]) -> FollowSchedule:
    """A policy that begins in `start` and switches after so many responses."""
    return FollowSchedule(LayoutSchedule(start, switches))


class Recorder(FollowSchedule):
    """Follows a schedule, and notes every event and the groups that it saw."""

    learns = True

    def __init__(self, schedule: LayoutSchedule) -> None:
        super().__init__(schedule)
        self.events: list[tuple[Any, ...]] = []
        self.groups: set[int] = set()

    def choose(self, state: LiveState) -> Layout:
        requests = state.requests()
        assert len(requests) == state.num_seqs
        self.groups.update(requests.group.tolist())
        return super().choose(state)

    def arrived(self, now: float, repeated: bool = False) -> None:
        self.events.append(("arrived", now))

    def ended(self, now: float, num_output_tokens: int, complete: bool | None) -> None:
        super().ended(now, num_output_tokens, complete)
        self.events.append(("finished", now, num_output_tokens, complete))

    def switched(self, report: SwitchReport) -> None:
        self.events.append(("switched", report.at, str(report.target), report.num_seqs))

    def idle(self, now: float) -> None:
        self.events.append(("idle", now))

    def batch_over(self, now: float, batch: BatchReport | None = None) -> None:
        super().batch_over(now, batch)
        self.events.append(("batch over", now))
