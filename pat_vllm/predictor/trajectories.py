"""How trajectories of several turns go on: which wait, how many return, and when. Pure.

While a tool runs, a trajectory has no request, yet it is work to come. What is learnt: how often a
turn is followed by another one, by its index; how long tools take; how many tokens they append. A
plan then looks at sampled futures of all trajectories, those that wait included. Times of tools are
as long in every layout. So of each moment only the share counts in which trajectories decode.

Where no request has continued another one, nothing waits and nothing is sampled.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pat_vllm.predictor.forecast import BatchForecast
from pat_vllm.predictor.state import REMEMBERED_TURNS, Floats, Ints, LiveRequests, Turn

_GAPS = 512
"""Times of tools, and what they appended, that are remembered."""
_KEPT = 0.5
"""Weight of a batch's counts after each later one."""
_ENOUGH = 8.0
"""Turns of an index that say by themselves how often another follows."""
_SILENCE = 1.5
"""After this many times the longest gap that was seen a trajectory is not expected any more."""
_FEW = 0.01
"""Expected returns below which a batch is over. Waiting costs an idle engine nothing. A batch that
ends too soon costs a user the layout that was asked for."""
_MOST_TURNS = 16
"""Later turns are not looked at."""
_MOMENTS = 64
"""Moments at which a future is looked at."""
_FAR = 16.0
"""From so many times the longest live turn on, what lies behind it has moments of its own."""
_MOST_WAITING = 4096
"""Trajectories that wait, of those that are likeliest to return, whose futures are sampled."""
_PARTS = 16
"""Parts of a forecast."""
_SEED = 0
"""Every time the same: looks differ by what was seen, not by luck."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    since: float
    held: int
    index: int


@dataclass(frozen=True)
class Futures:
    """Sampled turns. Times are in tokens: how many a request makes meanwhile.

    Attributes:
        begin, end: of each turn, float64 [turns, futures]; equal where there is none.
        held: tokens of its context when it begins, likewise.
        over: when each trajectory has ended, float64 [trajectories, futures].
    """

    begin: Floats
    end: Floats
    held: Floats
    over: Floats


class Trajectories:
    """Learns how trajectories go on, and knows which wait."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}
        self._left: dict[int, _Waiting] = {}  # by the last batch, as it seems
        self._late: dict[int, _Waiting] = {}  # not waited for any more
        self._gaps: deque[float] = deque(maxlen=_GAPS)
        self._appended: deque[int] = deque(maxlen=_GAPS)
        # By the index of a turn: how often another followed, and how often it was the last.
        self._followed, self._last = np.zeros((2, _MOST_TURNS))

    @property
    def go_on(self) -> bool:
        """Whether a turn was seen to follow another."""
        return bool(self._gaps)

    def arrived(self, now: float, turn: Turn, num_prompt_tokens: int) -> None:
        if not turn.index:
            self._close()
            return
        if turn.trajectory in self._left:
            self._waiting, self._left = self._left | self._waiting, {}  # it was not over
        before = self._waiting.pop(turn.trajectory, None)
        if before is None:
            before = self._late.pop(turn.trajectory, None)
            if before is None:
                return
            self._last[before.index] -= 1
        self._gaps.append(now - before.since)
        self._appended.append(max(0, num_prompt_tokens - before.held))
        self._followed[before.index] += 1

    def ended(self, now: float, turn: Turn, num_tokens: int) -> None:
        """A request has ended, which held so many tokens. It may be continued."""
        self._waiting.pop(turn.trajectory, None)
        self._waiting[turn.trajectory] = _Waiting(now, num_tokens, min(turn.index, _MOST_TURNS - 1))
        self._give_up(now)

    def _give_up(self, now: float) -> None:
        """What has waited too long is not waited for: a server's batch may never end."""
        limit = _SILENCE * max(self._gaps) if self._gaps else math.inf
        while self._waiting:
            first, waiting = next(iter(self._waiting.items()))
            if now - waiting.since <= limit and len(self._waiting) <= REMEMBERED_TURNS:
                break
            self._late[first] = self._waiting.pop(first)
            self._last[waiting.index] += 1
        while len(self._late) > REMEMBERED_TURNS:
            del self._late[next(iter(self._late))]

    def is_over(self, now: float) -> bool:
        """Whether no trajectory that waits is expected to go on."""
        return not self.go_on or float(self._returning(now).sum()) < _FEW

    def end_of_batch(self) -> None:
        """What waits is not expected to be continued. If it is, that will be learnt."""
        self._left, self._waiting = self._left | self._waiting, {}

    def _close(self) -> None:
        """A new batch begins: what the last one left is not continued."""
        if self._left and self.go_on:
            for waiting in self._left.values():
                self._last[waiting.index] += 1
            self._followed *= _KEPT
            self._last *= _KEPT
            self._late.clear()
        self._left = {}

    def _returning(self, now: float) -> Floats:
        """Probability that each trajectory that waits goes on, float64 [waiting]."""
        index, since, _ = self._columns()
        waited = now - since
        gaps = np.sort(self._gaps)
        longer = 1 - np.searchsorted(gaps, waited) / len(gaps)
        # The longest gap that was seen need not be the longest that there is.
        longer = np.where(waited < _SILENCE * gaps[-1], np.maximum(longer, 0.5 / len(gaps)), 0.0)
        goes_on = self._share()[index] * longer
        return goes_on / np.maximum(goes_on + 1 - self._share()[index], 1e-12)

    def _share(self) -> Floats:
        """Share of the turns of each index that others follow, float64 [indices]."""
        seen = self._followed + self._last
        unsure = 2 * np.clip(1 - seen / _ENOUGH, 0, 1)
        share: Floats = (self._followed + unsure / 2) / np.maximum(seen + unsure, 1e-12)
        return share

    def _columns(self) -> tuple[Ints, Floats, Ints]:
        """Index, time since and tokens of what waits."""
        rows = [(w.index, w.since, w.held) for w in self._waiting.values()]
        index, since, held = np.array(rows, np.float64).reshape(-1, 3).T
        return index.astype(np.int64), since, held.astype(np.int64)

    # ---------------------------------------------------------------- futures

    def sample(
        self,
        now: float,
        live: LiveRequests,
        remaining: Ints,
        lengths: Callable[[int], Ints],
        token_seconds: float,
    ) -> Futures:
        """Futures of the live requests' trajectories, and of those that wait.

        Args:
            remaining: of the live requests' turns, int64 [n, futures].
            lengths: tokens of so many fresh responses in each future, int64 [count, futures].
            token_seconds: in which a request makes a token, as it is.
        """
        random = np.random.default_rng(_SEED)
        gaps, appended = np.array(self._gaps), np.array(self._appended)
        returning = self._returning(now)
        likely = np.argsort(-returning, kind="stable")[:_MOST_WAITING]
        index, since, waiting = (column[likely] for column in self._columns())
        count, futures = len(live) + len(index), remaining.shape[1]
        share = self._share()
        back = random.random((len(index), futures)) < returning[likely, None]

        time = np.concatenate((remaining, np.zeros(back.shape))).astype(np.float64)
        held = np.concatenate((live.context, waiting))[:, None] + time
        begin = [np.zeros_like(time)]
        ends, contexts = [time.copy()], [held - time]
        turn = np.concatenate((np.minimum(live.turn, _MOST_TURNS - 1), index))
        drawn, over = lengths(count), time.copy()
        # Of what waits, a part of the gap has passed.
        passed = np.append(np.zeros(len(live)), now - since)[:, None]
        goes_on = random.random(time.shape) < share[turn][:, None]
        goes_on[len(live) :] = back
        for number in range(_MOST_TURNS):
            if not goes_on.any():
                break
            which = random.integers(len(gaps), size=time.shape)
            start = time + np.maximum(gaps[which] - passed, 0) / token_seconds
            stop = start + np.roll(drawn, number, axis=0)
            held = held + appended[which]
            begin.append(np.where(goes_on, start, 0.0))
            ends.append(np.where(goes_on, stop, 0.0))
            contexts.append(held)
            held, time = held + stop - start, np.where(goes_on, stop, time)
            over, passed = np.where(goes_on, stop, over), np.zeros_like(passed)
            turn = np.minimum(turn + 1, _MOST_TURNS - 1)
            goes_on &= random.random(time.shape) < share[turn][:, None]
        begins, stops, held = (np.concatenate(arrays) for arrays in (begin, ends, contexts))
        return Futures(begins, stops, held, over)


def forecast_of_turns(futures: Futures) -> BatchForecast:
    """What lies ahead, in parts that follow each other in time; the last one first.

    Args:
        futures: with a turn that is live now, in each of them.
    """
    near, horizon = float(futures.end[futures.begin == 0].max()), float(futures.over.max())
    # The moments are in the middle of stretches that grow with their distance.
    if horizon > _FAR * near:
        # Or none might be near enough to meet the turns that are live.
        half = np.linspace(0, 1, _MOMENTS // 2 + 1) ** 2
        edges = np.append(near * half, near + (horizon - near) * half[1:])
    else:
        edges = horizon * np.linspace(0, 1, _MOMENTS + 1) ** 2
    middle, width = 0.5 * (edges[1:] + edges[:-1]), np.diff(edges)
    live, context, longest, waiting = np.zeros((4, _MOMENTS, futures.over.shape[1]))
    for i in range(live.shape[1]):
        real = futures.end[:, i] > futures.begin[:, i]
        begin, end, held = (array[real, i] for array in (futures.begin, futures.end, futures.held))
        first, last = begin.argsort(), end.argsort()
        begun, ended = begin[first].searchsorted(middle), end[last].searchsorted(middle)
        live[:, i] = begun - ended
        # A context is what was held, and a token for each since the turn began.
        base = held - begin
        total = np.append(0, base[first].cumsum())[begun] - np.append(0, base[last].cumsum())[ended]
        context[:, i] = total + live[:, i] * middle
        longest[:, i] = np.append(0, np.maximum.accumulate(base[first]))[begun] + middle
        over = np.sort(futures.over[:, i])
        waiting[:, i] = len(over) - over.searchsorted(middle) - live[:, i]
    # Tools take as long in every layout: only the share in which trajectories decode counts.
    steps = width[:, None] * live / np.maximum(live + waiting, 1)
    parts = np.linspace(0, _MOMENTS, _PARTS + 1).astype(int)[:-1]
    weights = np.where(live > 0, width[:, None], 0.0)
    total = np.add.reduceat(weights.sum(axis=1), parts)
    nonempty = total > 0

    def mean(values: Floats) -> Floats:
        sums = np.add.reduceat((values * weights).sum(axis=1), parts)
        return (sums[nonempty] / total[nonempty])[::-1]

    mean_live = np.maximum(mean(live), 1.0)
    mean_context = np.maximum(mean(context), 1.0)
    most = np.maximum.reduceat(live.mean(axis=1), parts)[nonempty][::-1]
    return BatchForecast(
        live=mean_live,
        most=np.maximum(most, mean_live),
        steps=(np.add.reduceat(steps.mean(axis=1), parts)[nonempty])[::-1],
        context=mean_context,
        longest=np.maximum(mean(longest), 1.0),
        cached=mean(waiting) * mean_context / mean_live,
    )
