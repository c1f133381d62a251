"""The best that any policy could have done: schedules made knowing every length. Pure.

A schedule says in which layout to be once so many responses have ended. Every one that counts is
replayed by the simulator, under the mechanics that all policies are subject to.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.predictor.policy import Policy
from pat_vllm.predictor.state import LiveState
from pat_vllm.profiling.profile import StepShape
from pat_vllm.simulator.engine import CHUNK, SimulatedEngine
from pat_vllm.simulator.replay import simulate
from pat_vllm.simulator.replica import ReplicaCapacity
from pat_vllm.simulator.run import SimulatedRun
from pat_vllm.simulator.truth import Truth

if TYPE_CHECKING:
    from pat_vllm.simulator.traces import LengthTrace

_EXHAUSTIVE = 1_000
"""Up to this many schedules that switch when a response ends, all are tried."""
_EVERY_THRESHOLD = 24
"""Up to this many requests every threshold is tried, above a grid of them."""
_SEARCH_CHUNK = 256
"""Steps at once while schedules are compared; the best are replayed in finer chunks."""
_FINALISTS = 4
_MOST_FOR_BEAM = 256
"""Requests from which on the beam search would take minutes, and is left out."""
_BEAM = 2
"""Partial schedules that are kept for each number of ended responses and each layout."""


@dataclass(frozen=True)
class LayoutSchedule:
    """Begin in `start`, and be in `layout` once `ended` responses have ended, for each of
    `switches` = ((ended, layout), ...), ascending."""

    start: Layout
    switches: tuple[tuple[int, Layout], ...] = ()

    def __str__(self) -> str:
        steps = (f" -> {layout} after {ended}" for ended, layout in self.switches)
        return f"{self.start}{''.join(steps)}"


class FollowSchedule(Policy):
    """Follows a given schedule, batch after batch."""

    def __init__(self, schedule: LayoutSchedule) -> None:
        self.home = schedule.start
        self._schedule = schedule
        self._ended = 0

    def choose(self, state: LiveState) -> Layout:
        target = self._schedule.start
        for ended, layout in self._schedule.switches:
            if self._ended >= ended:
                target = layout
        return target

    def finished(self, now: float, group: int, num_output_tokens: int, complete: bool) -> None:
        self._ended += 1

    def idle(self, now: float) -> None:
        self._ended = 0


def oracle(
    trace: LengthTrace,
    layouts: Sequence[Layout],
    truth: Truth,
    capacity: ReplicaCapacity,
    *,
    most_switches: int | None = None,
    chunk: int = CHUNK,
) -> tuple[LayoutSchedule, SimulatedRun]:
    """The best schedule found, and its replay.

    For a few requests it is the best schedule there is; with more, it comes from a beam search by
    dynamic programming over ended responses and layouts (up to `_MOST_FOR_BEAM` requests), the
    static layouts, one- and two-threshold schedules, and small changes to the best of them.

    Args:
        most_switches: limit on a schedule's switches, the way home not counted; None: no limit.
    """
    small = len(layouts) ** len(trace.lengths) <= _EXHAUSTIVE
    coarse = chunk if small else max(chunk, _SEARCH_CHUNK)

    def seconds(schedule: LayoutSchedule, chunk: int = coarse) -> float:
        return simulate(trace, FollowSchedule(schedule), truth, capacity, chunk=chunk).seconds

    search = _Search(trace, layouts, truth, capacity, coarse)
    statics = [LayoutSchedule(layout) for layout in layouts]
    allowed = len(trace.lengths) if most_switches is None else most_switches
    schedules = set(statics)
    if len(trace.lengths) <= _MOST_FOR_BEAM:
        schedules.update(search.beam(None if small else _BEAM, allowed))
    if not small:
        schedules.update(p for p in _thresholds(trace, layouts) if len(p.switches) <= allowed)
    times = {schedule: seconds(schedule) for schedule in schedules}
    best = min(times, key=times.__getitem__)
    if not small:
        best = _improve(best, len(trace.lengths), times, seconds)
    finalists = {*statics, *sorted(times, key=times.__getitem__)[:_FINALISTS]}
    runs = {
        schedule: simulate(trace, FollowSchedule(schedule), truth, capacity, chunk=chunk)
        for schedule in finalists
    }
    # Where responses end together, a schedule may have a switch that it never comes to.
    best = min(runs, key=lambda schedule: (runs[schedule].seconds, len(schedule.switches)))
    return best, runs[best]


class _Search:
    """Dynamic programming over (responses that have ended, layout) with the simulator's engine.

    Two partial schedules that meet there are compared by their time so far plus an estimate of the
    rest, because replicas that run freely leave different work to do.
    """

    def __init__(
        self,
        trace: LengthTrace,
        layouts: Sequence[Layout],
        truth: Truth,
        capacity: ReplicaCapacity,
        chunk: int,
    ) -> None:
        self._trace, self._layouts = trace, layouts
        self._truth, self._capacity, self._chunk = truth, capacity, chunk
        self._step = self._step_times()

    def beam(self, width: int | None, most_switches: int) -> list[LayoutSchedule]:
        """The best schedules, at most one for each last layout; all are tried if `width` is None,
        and the best of all is returned."""
        total = len(self._trace.lengths)
        reached: dict[int, dict[Layout, list[tuple[float, LayoutSchedule, SimulatedEngine]]]]
        reached = defaultdict(lambda: defaultdict(list))
        for layout in self._layouts:
            engine = SimulatedEngine(
                self._trace, self._truth, self._capacity, layout, chunk=self._chunk
            )
            engine.advance_to_completion()
            reached[engine.done][layout].append((0.0, LayoutSchedule(layout), engine))
        for ended in range(1, total):
            for states in reached.pop(ended, {}).values():
                states.sort(key=lambda state: state[0])
                for _, schedule, engine in states[:width]:
                    for then, after in self._successors(schedule, engine, most_switches):
                        estimate = after.now + self._rest(after)
                        reached[after.done][after.layout].append((estimate, then, after))
        best = []
        for layout, states in reached[total].items():
            for _, schedule, engine in states:
                home = self._truth.switch_seconds(layout, schedule.start, 0, 0)
                best.append((engine.now + (home if layout != schedule.start else 0.0), schedule))
        best.sort(key=lambda one: one[0])
        return [schedule for _, schedule in best[: len(self._layouts)]]

    def _successors(
        self, schedule: LayoutSchedule, engine: SimulatedEngine, most_switches: int
    ) -> Iterator[tuple[LayoutSchedule, SimulatedEngine]]:
        for layout in self._layouts:
            then, after = schedule, engine.clone()
            if layout != engine.layout:
                if len(schedule.switches) >= most_switches or not engine.num_seqs:
                    continue
                then = replace(schedule, switches=(*schedule.switches, (engine.done, layout)))
                after.switch(layout, "policy")
            # Responses that ended while it drained leave a choice of their own.
            if after.done == engine.done:
                after.advance_to_completion()
            yield then, after

    def _rest(self, engine: SimulatedEngine) -> float:
        """Seconds that the rest would take in lockstep, always in the fastest layout."""
        left = np.sort(engine.remaining())
        if not len(left):
            return 0.0
        steps = np.diff(left, prepend=0)
        return float(steps @ self._step[len(left) : 0 : -1])

    def _step_times(self) -> np.ndarray:
        """Step time in the fastest layout by the number of live requests, [requests + 1]."""
        order = np.argsort(-np.asarray(self._trace.lengths), kind="stable")
        prompts = np.asarray(self._trace.num_prompt_tokens)[order]
        generated = np.asarray(self._trace.lengths)[order]
        fastest = np.zeros(len(order) + 1)
        for live in range(1, len(order) + 1):
            # With `live` left, each has made about as many tokens as the next one to end will.
            context = int(prompts[:live].sum() + live * generated[live - 1])
            longest = int(prompts[:live].max() + generated[live - 1])
            fastest[live] = min(
                self._truth.step_seconds(
                    layout.tp,
                    StepShape(
                        min(-(-live // layout.replicas), self._capacity.most_seqs(layout.tp)),
                        -(-context // layout.replicas),
                        longest,
                        busy=min(live, layout.replicas),
                    ),
                    0.0,
                )
                for layout in self._layouts
            )
        return fastest


def _thresholds(trace: LengthTrace, layouts: Sequence[Layout]) -> Iterator[LayoutSchedule]:
    """Schedules of one switch on a grid of live requests, and of two to higher tp each."""
    total = len(trace.lengths)
    grid = sorted({round(total * 0.75**i) for i in range(1, 60)} - {0, total}, reverse=True)
    if total <= _EVERY_THRESHOLD:
        grid = list(range(total - 1, 0, -1))
    for low, high in itertools.permutations(layouts, 2):
        for live in grid:
            yield LayoutSchedule(low, ((total - live, high),))
    for one, two, three in itertools.combinations(sorted(layouts), 3):
        for first, second in itertools.combinations(grid[::2], 2):
            yield LayoutSchedule(one, ((total - first, two), (total - second, three)))


def _improve(
    best: LayoutSchedule,
    total: int,
    times: dict[LayoutSchedule, float],
    seconds: Callable[[LayoutSchedule], float],
) -> LayoutSchedule:
    """Move or drop single switches for as long as that helps; `times` is filled in."""
    while True:
        for schedule in _neighbours(best, total):
            if schedule not in times:
                times[schedule] = seconds(schedule)
        better = min(_neighbours(best, total), key=times.__getitem__, default=best)
        if times[better] >= times[best]:
            return best
        best = better


def _neighbours(schedule: LayoutSchedule, total: int) -> Iterator[LayoutSchedule]:
    for index, (ended, layout) in enumerate(schedule.switches):
        before, after = schedule.switches[:index], schedule.switches[index + 1 :]
        yield LayoutSchedule(schedule.start, (*before, *after))
        for step in (-8, -3, -1, 1, 3, 8):
            low = before[-1][0] if before else 0
            high = after[0][0] if after else total
            if low < ended + step < high:
                yield LayoutSchedule(schedule.start, (*before, (ended + step, layout), *after))
