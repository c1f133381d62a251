"""What layouts and drafts saved in a batch. Pure.

A policy looks at the batch now and then. Between two looks lies an *interval*: the requests were in
one layout, with or without drafts, and a number of tokens was generated. What the interval took is
measured. What the same tokens would have taken without drafts, or in the base layout, is the word
of the model of step times.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.predictor.forecast import BatchForecast, forecast
from pat_vllm.predictor.planner import Plan, Planner
from pat_vllm.predictor.state import Ints, LiveRequests, LiveState
from pat_vllm.reporting import BatchSavings, BatchTimes, RingBuffer, SwitchReport

MAX_BATCHES = 1_000
_FOLD = 20_000
"""Intervals that are kept before they are added up."""
_TOGETHER = 1.5
"""More responses than this many times the most at once, and they are no batch that began
together."""
_NOTHING = BatchTimes(0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A batch at one moment.

    Attributes:
        at: seconds on the monotonic clock.
        layout: the active layout.
        num_seqs: unfinished requests.
        context: tokens of their contexts, summed.
        longest: tokens of the longest of them.
        tokens: generated tokens, less a constant. Those of ended requests count.
        prompts: prompt tokens that have yet to be computed.
        prompt: mean tokens of a prompt; infinite where `tokens` is wrong once a request arrives.
    """

    at: float
    layout: Layout
    num_seqs: int
    context: int
    longest: int
    tokens: int
    prompts: int = 0
    prompt: float = 0.0


@dataclass(frozen=True, slots=True)
class Interval:
    """What happened between two looks.

    Attributes:
        layout: in which its tokens were generated.
        seconds: measured, with `stall`: that of a switch to `layout`.
        drafts: whether drafts were verified.
        counts: False where its time is taken as it was, for all ways to generate its tokens.
        tokens: that each request got, in the mean.
        live: requests that got them, in the mean; and `context`, `longest` of these.
    """

    layout: Layout
    seconds: float
    stall: float
    drafts: bool
    counts: bool
    tokens: float
    live: float
    context: float
    longest: float


class Savings:
    """Adds up intervals; a record for each batch. One thread writes, all may read `records`.

    It is told of the same events as a `Policy`.
    """

    def __init__(self, planner: Planner) -> None:
        self._planner = planner
        self._base = planner.layouts[0]
        self.records: RingBuffer[BatchSavings] = RingBuffer(MAX_BATCHES)
        self._ended_tokens = 0
        self._start()

    def _start(self) -> None:
        self._predicted = _NOTHING
        self._most = 0
        self._open: Snapshot | None = None
        self._layout = self._base
        self._intervals: list[Interval] = []
        self._lengths: list[int] = []
        self._prescribed: list[int] = []
        self._times = _NOTHING
        self._new_interval()

    def _new_interval(self) -> None:
        self._stall = 0.0
        self._drafts = False
        self._arrivals = 0
        self._uncounted = False

    def arrived(self) -> None:
        self._arrivals += 1

    def finished(self, num_output_tokens: int) -> None:
        """A response ended whose length was not prescribed."""
        self._lengths.append(num_output_tokens)
        self._ended_tokens += num_output_tokens

    def drafted(self, length: int) -> None:
        """A step ended whose drafter was asked for `length` tokens a request."""
        self._drafts |= length > 0

    def interrupted(self) -> None:
        self._uncounted = True

    def switched(self, report: SwitchReport) -> None:
        self._layout = report.target
        self._stall += report.seconds - report.quiesce
        # A layout that was asked for holds, and nobody looks until the batch has ended.
        self._uncounted |= report.reason == "forced"

    def planned(self, state: LiveState, live: LiveRequests, remaining: Ints, plan: Plan) -> None:
        """A plan was made; `remaining` as in `forecast`."""
        prompts = live.uncomputed
        # Nobody tells of the end of a response whose length was prescribed. What such responses
        # have left to generate tells as much.
        tokens = live.num_output_tokens.sum() - live.max_tokens[live.exact].sum()
        snapshot = Snapshot(
            at=state.now,
            layout=state.layout,
            num_seqs=state.num_seqs,
            context=int(live.context.sum()),
            longest=int(live.context.max()),
            tokens=self._ended_tokens + int(tokens),
            prompts=prompts,
            prompt=math.inf if live.exact.any() else float(live.num_prompt_tokens.mean()),
        )
        if self.observe(snapshot):
            plain, tables = plan.layout_costs, plan.layout_costs.drafts.values()
            drafted = any(length for table in tables for *_, length in table)
            if drafted:
                plain = self._planner.layout_costs(forecast(live, remaining), prompts=prompts)
            fixed, undrafted = plain.plan(self._base), plain.plan(state.layout)
            shortest = [
                min((candidate.switch_later, *candidate.switch_now.values()))
                for candidate in (undrafted, plan)
            ]
            self._predicted = BatchTimes(fixed.no_switch, *shortest)
            self._prescribed = live.max_tokens[live.exact].tolist()

    def observe(self, now: Snapshot) -> bool:
        """What a policy sees; ends an interval and begins one.

        Returns:
            Whether the batch has more requests than ever.
        """
        self._close(now)
        self._open, self._layout = now, now.layout
        if len(self._intervals) >= _FOLD:
            self._fold()
            self._lengths = []
        more = now.num_seqs > self._most
        self._most = max(self._most, now.num_seqs)
        return more

    def idle(self, at: float) -> None:
        """The batch ended at this time."""
        self.end(at, self._ended_tokens)

    def end(self, at: float, tokens: int) -> None:
        """The last request ended; `tokens` as in `Snapshot`."""
        if self._open is not None:
            at = max(at, self._open.at)
            self._close(Snapshot(at, self._open.layout, 0, 0, 0, tokens))
            lengths = self._lengths + self._prescribed
            together = 0 < len(lengths) <= _TOGETHER * self._most
            whole = self._times == _NOTHING
            if whole and together and any(s.drafts for s in self._intervals):
                counted = [s for s in self._intervals if s.counts]
                others = [s for s in self._intervals if not s.counts]
                self._intervals = others + in_step(counted, lengths)
            self._fold()
            self.records.append(BatchSavings(at, self._base, self._predicted, self._times))
        self._start()

    def _close(self, now: Snapshot) -> None:
        """The open interval ends."""
        begin = self._open
        if begin is not None:
            generated = now.tokens - begin.tokens
            live = 0.5 * (begin.num_seqs + max(1, now.num_seqs))
            tokens = generated / live
            # Prompts are cheap by the token. Many of them take time that is not told apart.
            arrived = self._arrivals * begin.prompt if self._arrivals else 0.0
            prompts = begin.prompts - now.prompts + arrived
            interval = Interval(
                layout=self._layout,
                seconds=now.at - begin.at,
                stall=self._stall,
                drafts=self._drafts,
                counts=0 < generated >= prompts and not self._uncounted,
                tokens=tokens,
                live=live,
                context=live * (begin.context / begin.num_seqs + 0.5 * tokens),
                longest=begin.longest + 0.5 * tokens,
            )
            self._intervals.append(interval)
        self._new_interval()

    def _fold(self) -> None:
        """Add the intervals up."""
        base, intervals = self._base, self._intervals
        elsewhere = [s for s in intervals if s.counts and (s.drafts or s.layout != base)]
        drafted = [s for s in elsewhere if s.drafts]
        taken = sum(s.seconds for s in intervals)
        stalled = sum(s.stall for s in intervals)
        fixed = taken - stalled - sum(s.seconds - s.stall for s in elsewhere)
        fixed += sum(self._plain_seconds(base, elsewhere)) if elsewhere else 0.0
        switching = taken - sum(s.seconds - s.stall for s in drafted)
        for layout in {s.layout for s in drafted}:
            here = [s for s in drafted if s.layout == layout]
            switching += sum(self._plain_seconds(layout, here))
        self._times += BatchTimes(fixed, switching, taken)
        self._intervals = []

    def _plain_seconds(self, layout: Layout, intervals: Sequence[Interval]) -> list[float]:
        """Predicts what the tokens of each interval take in a layout without drafts, seconds."""
        columns = [(s.live, s.tokens, s.context, s.longest) for s in intervals]
        live, tokens, context, longest = np.array(columns).T
        done = BatchForecast(live, live, tokens, context, longest)
        return (self._planner.token_seconds(layout, done) * tokens).tolist()


def in_step(intervals: Sequence[Interval], lengths: Sequence[int]) -> list[Interval]:
    """With the tokens that they would have, did all requests of the batch advance alike.

    With drafts they do not, and those that are left at the end are not the longest. Without, there
    are m live from where the next longer of `lengths` has ended until the m-th longest ends.
    """
    if not intervals:
        return []
    tokens = np.array([s.tokens for s in intervals], np.float64)
    lives, place = np.unique([s.live for s in intervals], return_inverse=True)
    ends = np.append(np.sort(lengths)[::-1], 0)
    live = np.arange(1, len(ends))
    above = np.minimum(lives.searchsorted(live), len(lives) - 1)
    below = np.maximum(above - 1, 0)
    nearest = np.where(live - lives[below] <= lives[above] - live, below, above)
    needed = np.bincount(nearest, weights=ends[:-1] - ends[1:], minlength=len(lives))
    tokens = tokens * needed[place] / np.bincount(place, weights=tokens)[place]
    return [replace(s, tokens=count) for s, count in zip(intervals, tokens.tolist(), strict=True)]
