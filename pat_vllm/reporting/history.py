"""Keeps what the report shows, at microseconds per step."""

from __future__ import annotations

import bisect
import math
import statistics
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, TypeVar

from pat_vllm.layout import Layout
from pat_vllm.reporting.control import compare
from pat_vllm.reporting.listener import EngineListener
from pat_vllm.reporting.values import (
    BatchReport,
    DraftCounts,
    DraftSample,
    LayoutSteps,
    LiveSample,
    RefusedSwitch,
    Report,
    SwitchReport,
)

if TYPE_CHECKING:
    from pat_vllm.profile import StepShape

MAX_RECORDS = 10_000
"""Switches, refused switches, timeline and draft samples, and batches that are kept, of each."""
_DRAFT_SECONDS = 1.0
"""Steps whose drafts are counted together lie within this time."""
_MAX_STEP_TIMES = 1_000
"""The median step time of a layout is that of this many last steps."""


_R = TypeVar("_R")
_at = attrgetter("at")


class RingBuffer(Generic[_R]):
    """The last records of one kind, ordered by their time `at`.

    One thread writes. Every thread may read: a report is also asked for beside a running engine.
    """

    def __init__(self, limit: int) -> None:
        """Keep the last `limit` records."""
        self._records: deque[_R] = deque(maxlen=limit)
        self._lock = threading.Lock()

    def append(self, record: _R) -> None:
        """Add a record, not earlier than the others."""
        with self._lock:
            self._records.append(record)

    def last(self, back: int = 1) -> _R | None:
        """The `back`-th record from the end; None if it is not there (any more)."""
        return self._records[-back] if back <= len(self._records) else None

    def replace_last(self, record: _R, back: int = 1) -> None:
        """Put `record` in the place of the `back`-th from the end, which has the same time."""
        with self._lock:
            self._records[-back] = record

    def since(self, at: float = -math.inf) -> tuple[_R, ...]:
        """The records with this time or a later one, oldest first."""
        with self._lock:
            records = tuple(self._records)
        return records[bisect.bisect_left(records, at, key=_at) :]


@dataclass(slots=True)
class _StepTimes:
    count: int = 0
    recent: deque[float] = field(default_factory=lambda: deque(maxlen=_MAX_STEP_TIMES))
    by_draft_length: defaultdict[int, float] = field(default_factory=lambda: defaultdict(float))


class EngineHistory(EngineListener):
    """Bounded records of switches, steps and unfinished requests, at microseconds per step.

    The engine's thread writes. `report` may be called from every thread.
    """

    def __init__(self, chosen: str = "", control: Callable[[], bool] = lambda: False) -> None:
        """Have no history.

        Args:
            chosen: how the engine's layouts were, in a line.
            control: whether a batch that begins now is one to compare others with.
        """
        self._chosen = chosen
        self._control = control
        self._switches: RingBuffer[SwitchReport] = RingBuffer(MAX_RECORDS)
        self._refused: RingBuffer[RefusedSwitch] = RingBuffer(MAX_RECORDS)
        self._timeline: RingBuffer[LiveSample] = RingBuffer(MAX_RECORDS)
        self._batches: RingBuffer[BatchReport] = RingBuffer(MAX_RECORDS)
        self._batch: BatchReport | None = None
        """The batch that is not over, as far as its responses have ended."""
        self._unfinished = 0
        self._drafts: deque[DraftSample] = deque(maxlen=MAX_RECORDS)
        self._counting: dict[int, DraftSample] = {}
        self._errors = 0
        self._steps: defaultdict[Layout, _StepTimes] = defaultdict(_StepTimes)
        self._lock = threading.Lock()  # of `_steps`, `_drafts` and `_counting`
        self._first_step_due = False
        self._now: tuple[Layout, int, tuple[int, ...]] | None = None

    def live(self, layout: Layout, num_seqs: int, by_replica: tuple[int, ...] = ()) -> None:
        """Note the number of unfinished requests. To be called before each step."""
        now = (layout, num_seqs, by_replica)
        if self._now != now:
            self._now = now
            self._timeline.append(LiveSample(time.monotonic(), *now))

    def arrived(self, now: float, repeated: bool = False) -> None:
        if self._batch is None:
            self._batch = BatchReport(now, 0.0, 0, 0, control=self._control())
        self._unfinished += 1

    def ended(self, now: float, num_output_tokens: int, complete: bool | None) -> None:
        if (batch := self._batch) is not None:
            self._batch = replace(
                batch,
                at=now,
                seconds=batch.seconds + now - batch.at,
                responses=batch.responses + 1,
                tokens=batch.tokens + num_output_tokens,
            )
            self._unfinished -= 1

    def stepped(self, now: float, layout: Layout, shape: StepShape, seconds: float) -> None:
        with self._lock:
            times = self._steps[layout]
            times.count += 1
            times.recent.append(seconds)
            times.by_draft_length[shape.k] += seconds
        if self._first_step_due:
            self._first_step_due = False
            switch = self._switches.last()
            assert switch is not None
            self._switches.replace_last(replace(switch, first_step=seconds))

    def drafted(
        self, now: float, layout: Layout, replica: int, length: int, counts: DraftCounts
    ) -> None:
        with self._lock:
            sample = self._counting.get(replica)
            if (
                sample is not None
                and (sample.layout, sample.num_speculative_tokens) == (layout, length)
                and now - sample.at < _DRAFT_SECONDS
            ):
                self._counting[replica] = sample.plus(counts)
                return
            self._counting[replica] = DraftSample(now, layout, replica, length, 1, counts)
            if sample is not None:
                self._drafts.append(sample)

    def idle(self, now: float) -> None:
        # The steps of the next requests are counted apart.
        with self._lock:
            self._drafts.extend(self._counting.values())
            self._counting.clear()

    def end_batch(self) -> BatchReport | None:
        """Note that the batch is over. Returns it, if there was one."""
        if self._batch is None:
            return None
        ended, self._batch = self._batch, None
        self._batches.append(ended)
        return ended

    def switched(self, report: SwitchReport) -> None:
        self._switches.append(report)
        self._first_step_due = True
        if self._batch is not None and report.reason != "idle":
            self._batch = replace(self._batch, switches=self._batch.switches + 1)

    def refused(self, refused: RefusedSwitch) -> None:
        self._refused.append(refused)
        self._errors += not refused.expected  # a mistake of PAT's

    def report(self, layout: Layout, layouts: Iterable[Layout], since: float = -math.inf) -> Report:
        """The report, without the predictor's part.

        Args:
            since: seconds on the monotonic clock; earlier records are left out.
        """
        with self._lock:
            steps = {
                step_layout: LayoutSteps(
                    times.count, statistics.median(times.recent), dict(times.by_draft_length)
                )
                for step_layout, times in self._steps.items()
            }
            drafts = [d for d in (*self._drafts, *self._counting.values()) if d.at >= since]
        batches, going_on = self._batches.since(since), self._batch
        # Between its requests, as while tools run, a batch is told of as if it were over.
        if going_on is not None and not self._unfinished and going_on.at >= since:
            batches += (going_on,)
        return Report(
            layout=layout,
            layouts=tuple(layouts),
            switches=self._switches.since(since),
            refused=self._refused.since(since),
            timeline=self._timeline.since(since),
            drafts=tuple(sorted(drafts, key=_at)),
            steps=steps,
            errors=self._errors,
            chosen=self._chosen,
            batches=batches,
            control=compare(self._batches.since()),
        )
