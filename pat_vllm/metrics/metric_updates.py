"""From what happens in an engine to updates of its metrics. Pure.

The engine core gathers updates, and vLLM's statistics carry them to the front end, which has the
registry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pat_vllm.layout import Layout
from pat_vllm.metrics import names
from pat_vllm.reporting import BatchReport, DraftCounts, RefusedSwitch, SwitchReport
from pat_vllm.reporting.listener import EngineListener


class Update(NamedTuple):
    """What happens to one series: a gauge is set to `value`, a counter grows by it, a histogram
    observes it."""

    name: str
    labels: Sequence[str]
    value: float


class MetricUpdates(EngineListener):
    """Gathers what happened since the last `take`. For one thread."""

    def __init__(self) -> None:
        self._events: list[Update] = []
        self._gauges: dict[tuple[str, tuple[str, ...]], float] = {}
        self._shown: dict[tuple[str, tuple[str, ...]], float] = {}
        self._state: tuple[Layout, Sequence[int]] | None = None
        self._totals: Counter[str] = Counter()
        """Of counters without labels that grow with each step."""

    @property
    def has_events(self) -> bool:
        """Whether something happened that does not wait for the next statistics."""
        return bool(self._events)

    # Gauges

    def state(self, layout: Layout, num_seqs: Sequence[int]) -> None:
        """The layout in use, and the unfinished requests of each replica."""
        if self._state == (layout, num_seqs):
            return
        before = 0 if self._state is None else len(self._state[1])
        self._state = layout, num_seqs
        self._set(names.TENSOR_PARALLEL_SIZE, (), layout.tp)
        self._set(names.NUM_REPLICAS, (), layout.replicas)
        for replica, number in enumerate(num_seqs):
            self._set(names.NUM_REQUESTS, (str(replica),), number)
        for replica in range(len(num_seqs), before):  # there is no such replica any more
            self._set(names.NUM_REQUESTS, (str(replica),), 0)
            if (names.DRAFT_LENGTH, (str(replica),)) in self._shown:
                self._set(names.DRAFT_LENGTH, (str(replica),), 0)

    def drafted(
        self, now: float, layout: Layout, replica: int, length: int, counts: DraftCounts
    ) -> None:
        self._set(names.DRAFT_LENGTH, (str(replica),), length)
        if counts.repeated_drafted:
            self._totals[names.REPEATED_DRAFTED] += counts.repeated_drafted
            self._totals[names.REPEATED_ACCEPTED] += counts.repeated_accepted

    # Events

    def switched(self, report: SwitchReport) -> None:
        pair = str(report.source), str(report.target)
        self._add(names.SWITCHES, (*pair, report.reason), 1)
        self._add(names.STALL, (report.reason,), report.seconds)

    def refused(self, refused: RefusedSwitch) -> None:
        self._add(names.REFUSED, (refused.reason,), 1)

    def batch_over(self, now: float, batch: BatchReport | None = None) -> None:
        if batch is None:
            return
        control = (str(batch.control).lower(),)
        self._add(names.BATCHES, control, 1)
        self._add(names.BATCH_SECONDS, control, batch.seconds)
        self._add(names.BATCH_TOKENS, control, batch.tokens)

    # To the front end

    def take(self) -> dict[str, Any] | None:
        """What happened, as msgpack and JSON can carry it, for `updates_of`; None: nothing."""
        gauges = [Update(*series, value) for series, value in self._gauges.items()]
        totals = [Update(name, (), value) for name, value in self._totals.items()]
        if not (taken := [*self._events, *totals, *gauges]):
            return None
        self._events, self._gauges = [], {}
        self._totals.clear()
        return {"updates": [[name, list(labels), value] for name, labels, value in taken]}

    def _add(self, name: str, labels: tuple[str, ...], value: float) -> None:
        self._events.append(Update(name, labels, value))

    def _set(self, name: str, labels: tuple[str, ...], value: float) -> None:
        series = name, labels
        if self._shown.get(series) != value:
            self._shown[series] = self._gauges[series] = value


def updates_of(taken: Mapping[str, Any]) -> list[Update]:
    """Inverse of `MetricUpdates.take`."""
    return [Update(*fields) for fields in taken["updates"]]
