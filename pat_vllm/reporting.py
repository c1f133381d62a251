"""What happened: switches and live requests over time. Plain values, picklable."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

from pat_vllm.layout import Layout


def _plain(value: Any) -> Any:
    return asdict(value) if isinstance(value, Layout) else [asdict(one) for one in value]


@dataclass(frozen=True)
class SwitchReport:
    """One switch. Times in seconds, on the engine core's monotonic clock where absolute.

    Attributes:
        at: when the switch began.
        reason: "policy", "forced" or "idle".
        live: unfinished requests at that moment, of which `migrated` took their KV along,
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
    """

    at: float
    source: Layout
    target: Layout
    reason: str
    live: int
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


@dataclass(frozen=True)
class RefusedSwitch:
    """A switch that was not made; generation went on in `source`."""

    at: float
    source: Layout
    target: Layout
    why: str


@dataclass(frozen=True)
class LiveSample:
    """From `at` on there were `live` unfinished requests in `layout`."""

    at: float
    layout: Layout
    live: int


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
    """

    layout: Layout
    layouts: tuple[Layout, ...]
    switches: tuple[SwitchReport, ...]
    refused: tuple[RefusedSwitch, ...]
    timeline: tuple[LiveSample, ...]
    steps: Mapping[Layout, LayoutSteps] = field(default_factory=dict)

    def to_wire(self) -> dict[str, Any]:
        """As nested dicts and lists, for vLLM's message format."""
        wire = {f.name: getattr(self, f.name) for f in fields(self)}
        steps = wire.pop("steps")
        wire = {name: _plain(value) for name, value in wire.items()}
        return {**wire, "steps": [[asdict(k), asdict(v)] for k, v in steps.items()]}

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> Report:
        """Inverse of `to_wire`."""

        def record(kind: type, values: Mapping[str, Any]) -> Any:
            layouts = {"layout", "source", "target"}
            return kind(**{k: Layout(**v) if k in layouts else v for k, v in values.items()})

        return cls(
            layout=Layout(**wire["layout"]),
            layouts=tuple(Layout(**layout) for layout in wire["layouts"]),
            switches=tuple(record(SwitchReport, s) for s in wire["switches"]),
            refused=tuple(record(RefusedSwitch, s) for s in wire["refused"]),
            timeline=tuple(record(LiveSample, s) for s in wire["timeline"]),
            steps={Layout(**k): LayoutSteps(**v) for k, v in wire["steps"]},
        )
