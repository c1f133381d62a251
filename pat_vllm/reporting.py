"""What an engine has done: the report, the history that it is made of, a trainer's log line.

Imports neither torch nor vLLM.
"""

from __future__ import annotations

import asyncio
import functools
import statistics
import time
from collections import abc, deque
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, get_args, get_origin, get_type_hints

from pat_vllm.layout import Layout

MAX_RECORDS = 10_000
"""Of each kind, records that are kept."""
_MAX_STEP_TIMES = 1_000
"""Of each layout, step times that the median is taken of."""

REPORT_SECONDS = 30.0
"""How long a trainer waits for a report."""


@dataclass(frozen=True)
class SwitchReport:
    """One switch. Times in seconds, on the engine core's monotonic clock where absolute.

    Attributes:
        at: when the switch began.
        reason: "policy", "forced" or "idle".
        num_seqs: unfinished requests at that moment, of which `migrated` took their KV along,
            `recomputed` prefill again, and the rest had not been computed yet.
        kv_bytes: KV bytes moved, over all ranks.
        seconds: the whole stall, which `quiesce` to `finish` add up to.
        quiesce: steps in flight drained.
        plan: requests placed, blocks allocated, moves listed.
        states, kv, weights, activate: on the workers (slowest rank): request states exchanged,
            KV moved, weights resharded, the layout's group and runner put in place.
        rpc: the rest of the call to the workers.
        finish: the new schedulers told.
        first_step: duration of the first step after it, or None before it has finished.
        tokens: computed tokens of the live requests together.
        weight_bytes: bytes of weights that came to another place, over all ranks.
    """

    at: float
    source: Layout
    target: Layout
    reason: str
    num_seqs: int
    migrated: int
    recomputed: int
    kv_bytes: int
    seconds: float
    quiesce: float
    plan: float
    states: float
    kv: float
    weights: float
    activate: float
    rpc: float
    finish: float
    first_step: float | None = None
    tokens: int = 0
    weight_bytes: int = 0


@dataclass(frozen=True)
class RefusedSwitch:
    """A switch that was not made; generation went on in `source`."""

    at: float
    source: Layout
    target: Layout
    why: str


@dataclass(frozen=True)
class DecisionReport:
    """A decision of the predictor policy that switched, or nearly did.

    Times in seconds; `stay`, `go` and `saving` are predictions at that moment, averaged over the
    sampled futures of the live requests.

    Attributes:
        at: when, on the engine core's monotonic clock.
        layout, target: where the engine was, and the best other place to be.
        num_seqs: unfinished requests.
        stay: until the last response ends, in `layout`.
        go: the same after a switch to `target` now, its cost included.
        cost: of that switch.
        fired: whether it was made.
        why: what decided: "saving", "probe", "margin", "hysteresis" or "later".
        step_before: predicted step time in `layout` at that moment.
        step_after: predicted step time in `target`.
        real_before: measured: median of the last steps before, or None.
        real_after: measured: median of the first steps after a switch, or None.
        real_cost: measured stall of the switch, or None.
    """

    at: float
    layout: Layout
    target: Layout
    num_seqs: int
    stay: float
    go: float
    cost: float
    fired: bool
    why: str
    step_before: float
    step_after: float
    real_before: float | None = None
    real_after: float | None = None
    real_cost: float | None = None

    @property
    def saving(self) -> float:
        """Predicted seconds that the switch saves, its cost paid."""
        return self.stay - self.go


@dataclass(frozen=True)
class PredictorReport:
    """What the predictor policy decided, and how its models do.

    Attributes:
        decisions: oldest first.
        step_error: by layout: steps that were compared with their prediction, made before they
            were learnt from, and the mean absolute error relative to the real step time.
        plans, planning, slowest_plan: how often it planned, seconds in all, seconds of the slowest.
        batches, responses: what the length model has learnt from.
        shifted: whether this batch's lengths differ from the earlier ones'.
        siblings: rank correlation (Kendall's) of the lengths of one prompt's responses, as learnt;
            0 without clear evidence.
    """

    decisions: tuple[DecisionReport, ...] = ()
    step_error: Mapping[Layout, tuple[int, float]] = field(default_factory=dict)
    plans: int = 0
    planning: float = 0.0
    slowest_plan: float = 0.0
    batches: int = 0
    responses: int = 0
    shifted: bool = False
    siblings: float = 0.0


@dataclass(frozen=True)
class LiveSample:
    """From `at` on there were `num_seqs` unfinished requests in `layout`."""

    at: float
    layout: Layout
    num_seqs: int


@dataclass(frozen=True)
class LayoutSteps:
    """Steps of all replicas in one layout: how many, and their total and median seconds."""

    steps: int
    seconds: float
    median: float


@dataclass(frozen=True)
class Report:
    """State and history of an engine.

    Attributes:
        layout: the active layout.
        layouts: all that are kept ready, base first.
        switches, refused: oldest first; the last `MAX_RECORDS` of each.
        timeline: live requests and layout, a sample per change; the last `MAX_RECORDS`.
        steps: by layout.
        predictor: what the predictor policy did; empty for other policies.
    """

    layout: Layout
    layouts: tuple[Layout, ...]
    switches: tuple[SwitchReport, ...]
    refused: tuple[RefusedSwitch, ...]
    timeline: tuple[LiveSample, ...]
    steps: Mapping[Layout, LayoutSteps] = field(default_factory=dict)
    predictor: PredictorReport = PredictorReport()

    def to_wire(self) -> dict[str, Any]:
        """As nested dicts and lists, for vLLM's message format."""
        return _plain(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Report:
        """Inverse of `to_wire`."""
        return _typed(wire, cls)


def _plain(value: Any) -> Any:
    """Dataclasses as dicts, tuples as lists, mappings (whose keys may be anything) as pairs."""
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return [[_plain(k), _plain(v)] for k, v in value.items()]
    if isinstance(value, tuple | list):
        return [_plain(one) for one in value]
    return value


_types_of = functools.cache(get_type_hints)
"""The types of a class's fields, by name. To work them out takes longer than to make a record."""


def _typed(value: Any, kind: Any) -> Any:
    """Inverse of `_plain` for a type."""
    if isinstance(kind, type) and is_dataclass(kind):
        types = _types_of(kind)
        return kind(**{name: _typed(one, types[name]) for name, one in value.items()})
    arguments = get_args(kind)
    match get_origin(kind):
        case abc.Mapping:
            return {_typed(k, arguments[0]): _typed(v, arguments[1]) for k, v in value}
        case origin if origin is tuple and arguments[1:] == (...,):
            return tuple(_typed(one, arguments[0]) for one in value)
        case origin if origin is tuple:
            return tuple(_typed(one, type_) for one, type_ in zip(value, arguments, strict=True))
    return value


class History:
    """Bounded records of switches, steps and live requests."""

    def __init__(self) -> None:
        self._switches: deque[SwitchReport] = deque(maxlen=MAX_RECORDS)
        self._refused: deque[RefusedSwitch] = deque(maxlen=MAX_RECORDS)
        self._timeline: deque[LiveSample] = deque(maxlen=MAX_RECORDS)
        self._count: dict[Layout, int] = {}
        self._seconds: dict[Layout, float] = {}
        self._recent: dict[Layout, deque[float]] = {}
        self._now: tuple[Layout, int] | None = None

    def live(self, layout: Layout, live: int) -> None:
        """Note the number of live requests; called before each step."""
        if self._now != (layout, live):
            self._now = (layout, live)
            self._timeline.append(LiveSample(time.monotonic(), layout, live))

    def step(self, layout: Layout, seconds: float) -> None:
        """Note a finished step."""
        if layout not in self._count:
            self._count[layout] = 0
            self._seconds[layout] = 0.0
            self._recent[layout] = deque(maxlen=_MAX_STEP_TIMES)
        self._count[layout] += 1
        self._seconds[layout] += seconds
        self._recent[layout].append(seconds)
        if self._switches and self._switches[-1].first_step is None:
            self._switches[-1] = replace(self._switches[-1], first_step=seconds)

    def switch(self, switch: SwitchReport) -> None:
        """Note a switch."""
        self._switches.append(switch)

    def refused(self, refused: RefusedSwitch) -> None:
        """Note a switch that was not made."""
        self._refused.append(refused)

    def report(self, layout: Layout, layouts: Sequence[Layout]) -> Report:
        """All of it."""
        return Report(
            layout=layout,
            layouts=tuple(layouts),
            switches=tuple(self._switches),
            refused=tuple(self._refused),
            timeline=tuple(self._timeline),
            steps={
                one: LayoutSteps(count, self._seconds[one], statistics.median(self._recent[one]))
                for one, count in self._count.items()
            },
        )


async def describe_awaited(
    report: Awaitable[Report], started: float, seconds: float, responses: int
) -> str:
    """`describe`, of a report that has been asked for; if none comes, the line says why.

    A log line is no reason to fail a rollout that is complete. Whether the engine lives is for the
    caller to check afterwards.
    """
    try:
        return describe(await asyncio.wait_for(report, REPORT_SECONDS), started, seconds, responses)
    except Exception as error:
        return f"{_made(seconds, responses)}; no report of the engine: {error!r}"


def describe(report: Report, started: float, seconds: float, responses: int) -> str:
    """What the engine did in a rollout.

    Args:
        report: of the engine, after the rollout.
        started: when the rollout began, on the system's monotonic clock, as in the report.
        seconds: it took.
        responses: it made.
    """
    parts = [_made(seconds, responses)]
    switches = [s for s in report.switches if s.at >= started and s.reason != "idle"]
    parts += [_switch(one, started) for one in switches]
    if not switches:
        parts.append("no switch")
    if refused := sum(one.at >= started for one in report.refused):
        parts.append(f"{refused} refused")
    if (predictor := report.predictor).responses:
        parts.append(
            f"learnt from {predictor.responses} responses in {predictor.batches} batches, "
            f"siblings {predictor.siblings:.2f}"
        )
    return "; ".join(parts)


def _made(seconds: float, responses: int) -> str:
    return f"{responses} responses in {seconds:.2f} s"


def _switch(one: SwitchReport, started: float) -> str:
    return (
        f"{one.source} -> {one.target} at {one.at - started:.2f} s, {one.num_seqs} live, "
        f"{one.seconds * 1e3:.0f} ms"
    )
