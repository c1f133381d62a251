"""The cheapest path of layouts and draft lengths from now to the end of the batch. Pure.

The number of live requests only falls while nobody asks for more, and everybody can see it. So a
plan is a layout and a draft length k for each number of live requests, and its expected time adds
up over them:

    sum over m of  E[tokens of a request with exactly m live]
                   * step time(layout(m), m, k(m)) / tokens per step(k(m))  +  switches

The expectations come from sampled futures of the live requests. A change of k costs nothing, so in
each layout k is the one with the least time per token. The best layouts follow by dynamic
programming from the last response backwards, over as many switches as pay, in any direction. The
plan uses only what will be known by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.predictor.acceptance import PLAIN, Drafting
from pat_vllm.predictor.state import Floats, Ints, LiveRequests
from pat_vllm.speculation import Schedule

_EXACT_LIVE = 8
"""Up to this many live requests each number is planned for by itself, above in groups."""
_GROUP_RATIO = 0.85
"""Least of the live requests in a group relative to its most."""
_PREFILL_CHUNK = 512
"""Prompt tokens that a step is taken to compute where many wait."""

StepSeconds = Callable[..., Floats]
"""Seconds of steps, by what `StepTimeModel.seconds` takes."""
SwitchSeconds = Callable[[Layout, Layout, Floats, Floats], Floats]
"""Seconds of switches, by source, target, live requests and their tokens."""


@dataclass(frozen=True)
class Course:
    """How a batch is expected to thin out: groups of numbers of live requests, few ones first.

    Attributes:
        live: mean live requests in the group, [groups].
        most: most live requests in it, with which the group begins, [groups].
        steps: expected decode steps in it, of a token for each request, [groups].
        context: mean tokens of all live contexts together, [groups].
        longest: mean of the longest context, [groups].
    """

    live: Floats
    most: Floats
    steps: Floats
    context: Floats
    longest: Floats


@dataclass(frozen=True)
class Plan:
    """Expected seconds until the last response ends.

    Attributes:
        layout: where the engine is.
        never: without any switch.
        stay: without a switch now, but with those that pay later.
        go: by other layout: with a switch to it now, later ones included.
        cost: by other layout: of that switch, part of `go`.
        step: by layout: of a decode step at the present number of live requests.
        drafts: by layout: draft length by the number of requests in a replica's step, for all
            numbers from 1 on that it may have.
    """

    layout: Layout
    never: float
    stay: float
    go: Mapping[Layout, float]
    cost: Mapping[Layout, float]
    step: Mapping[Layout, float]
    drafts: Mapping[Layout, Schedule]

    @property
    def best(self) -> Layout:
        """Where to be now."""
        target = min(self.go, key=self.go.__getitem__, default=self.layout)
        return target if self.go.get(target, math.inf) < self.stay else self.layout


def course(live: LiveRequests, remaining: Ints) -> Course:
    """What sampled futures say about the number of live requests.

    Args:
        live: n requests, at least one.
        remaining: tokens that each still generates in each future, int64 [n, futures].
    """
    count = len(live)
    order = np.argsort(-remaining, axis=0)
    ends = np.take_along_axis(remaining, order, axis=0)  # [m - 1]: the m-th last end
    # With m live the m-th last has not ended and the next one before it has.
    before = np.vstack([ends[1:], np.zeros((1, ends.shape[1]), ends.dtype)])
    steps = ends - before
    middle = 0.5 * (ends + before)
    contexts = live.context[order]
    alive = np.arange(1, count + 1)[:, None]
    total = np.cumsum(contexts, axis=0) + alive * middle
    longest = np.maximum.accumulate(contexts, axis=0) + middle

    starts = _groups(count)
    mean_steps = steps.mean(axis=1)
    # Where no step is expected a group still needs a sensible state: hence the small weight.
    weight = mean_steps + 1e-9
    of_group = np.add.reduceat(weight, starts)

    def mean(values: Floats) -> Floats:
        return np.add.reduceat(values * weight, starts) / of_group

    per_future = np.maximum(steps, 1e-9)
    weights = per_future.sum(axis=1)
    return Course(
        live=mean(alive[:, 0].astype(float)),
        most=np.append(starts[1:], count).astype(float),
        steps=np.add.reduceat(mean_steps, starts),
        context=mean((total * per_future).sum(axis=1) / weights),
        longest=mean((longest * per_future).sum(axis=1) / weights),
    )


@lru_cache(maxsize=4096)
def _groups(count: int) -> Ints:
    """First index (number of live requests less one) of each group, ascending."""
    starts = []
    most = count
    while most > _EXACT_LIVE:
        least = max(_EXACT_LIVE, min(most - 1, math.floor(most * _GROUP_RATIO)))
        starts.append(least)
        most = least
    starts.extend(range(most - 1, -1, -1))
    return np.array(starts[::-1])


@dataclass(frozen=True)
class _Pace:
    """How fast a layout is with the best draft lengths, in each group of a course.

    Attributes:
        token: seconds in which every live request gets a token, [groups].
        tokens: that a request gets per step, [groups].
        running: requests in a replica's step, [groups].
        lengths: draft lengths to use, [groups].
    """

    token: Floats
    tokens: Floats
    running: Floats
    lengths: Ints


class Planner:
    """Finds the cheapest path of layouts and draft lengths."""

    def __init__(
        self,
        layouts: Sequence[Layout],
        step: StepSeconds,
        switch: SwitchSeconds,
        *,
        max_num_seqs: Mapping[int, int],
        kv_tokens: Mapping[int, int],
    ) -> None:
        """Plan for an engine.

        Args:
            max_num_seqs: requests that a replica runs at once, by tp.
            kv_tokens: tokens whose KV a replica's memory holds, by tp.
        """
        self.layouts = tuple(layouts)
        self._step = step
        self._switch = switch
        self._max_num_seqs = max_num_seqs
        self._kv_tokens = kv_tokens

    def token_seconds(self, layout: Layout, course: Course, drafting: Drafting = PLAIN) -> Floats:
        """Seconds in which every live request gets a token, in each group of a course."""
        return self._pace(layout, course, drafting).token

    def _pace(self, layout: Layout, course: Course, drafting: Drafting) -> _Pace:
        """How fast a layout is.

        Requests are taken to be spread evenly; what a replica cannot hold at once waits, so that
        a token of each takes longer than a step.
        """
        busy = np.minimum(layout.replicas, np.ceil(course.live))
        batch = np.maximum(1.0, course.live / busy)
        mean_context = course.context / course.live
        held = self._kv_tokens[layout.tp] / np.maximum(1.0, mean_context)
        running = np.minimum(batch, np.clip(held, 1.0, self._max_num_seqs[layout.tp]))
        steps = self._step(  # [lengths, groups]
            layout.tp,
            running,
            running * mean_context,
            course.longest,
            0,
            busy,
            drafting.drafts[:, None] * running,
            drafting.lengths[:, None],
        )
        seconds = steps * (batch / running)
        tokens = seconds / drafting.tokens[:, None]
        best = tokens.argmin(axis=0)
        # Later it will be known what is best. Until then, what may be best is tried.
        hoped = (seconds / drafting.hoped[:, None]).argmin(axis=0)
        return _Pace(
            token=tokens.min(axis=0),
            tokens=drafting.tokens[best],
            running=running,
            lengths=drafting.lengths[hoped],
        )

    def fastest(self, course: Course, more: float, drafting: Drafting = PLAIN) -> Layout:
        """The layout in which a token takes least time, with `more` live requests than now."""
        now = course.most[-1]
        busier = Course(
            live=np.array([now + more]),
            most=np.array([now + more]),
            steps=np.ones(1),
            context=course.context[-1:] * (now + more) / now,
            longest=course.longest[-1:],
        )
        return min(self.layouts, key=lambda one: self.token_seconds(one, busier, drafting)[0])

    def plan(
        self,
        layout: Layout,
        course: Course,
        *,
        prompts: int = 0,
        horizon: float = math.inf,
        afterwards: Layout | None = None,
        optimism: Mapping[Layout, float] | None = None,
        drafting: Drafting = PLAIN,
    ) -> Plan:
        """Plan from `layout` on.

        Args:
            prompts: prompt tokens that have yet to be computed, before anything else.
            horizon: seconds after which requests are expected that make this plan void.
            afterwards: where the engine will want to be then; a plan that ends elsewhere pays for
                the way.
            optimism: by layout, a factor on its step times (below 1: what if it is faster).
            drafting: the draft lengths, and what they are expected to give.
        """
        paces = {one: self._pace(one, course, drafting) for one in self.layouts}
        for one, factor in (optimism or {}).items():
            paces[one] = replace(paces[one], token=paces[one].token * factor)
        per_token = {one: pace.token for one, pace in paces.items()}
        steps = course.steps
        if horizon < math.inf:
            steps = _cut(steps, per_token[layout], horizon)
        seconds = [(per_token[one] * steps).tolist() for one in self.layouts]
        if prompts:
            for one, times in zip(self.layouts, seconds, strict=True):
                times[-1] += self._prefill_seconds(one, prompts)
        switch = self._switch_seconds(course, paces)

        # Plain lists: there are few layouts, and numpy's calls would take longer than the sums.
        everywhere = range(len(self.layouts))
        last = len(course.live) - 1
        value = [0.0 for _ in everywhere]  # by layout: seconds from here to the end
        if afterwards is not None:
            then = self.layouts.index(afterwards)
            value = [switch[one][then][last] for one in everywhere]
        end = value
        for group in range(last):
            value = [seconds[one][group] + value[one] for one in everywhere]
            value = [
                min([switch[source][target][group] + value[target] for target in everywhere])
                for source in everywhere
            ]
        value = [seconds[one][last] + value[one] for one in everywhere]

        here = self.layouts.index(layout)
        cost = {
            one: switch[here][there][last]
            for there, one in enumerate(self.layouts)
            if there != here
        }
        return Plan(
            layout=layout,
            never=sum(seconds[here]) + end[here],
            stay=value[here],
            go={one: cost[one] + value[self.layouts.index(one)] for one in cost},
            cost=cost,
            step={one: float(pace.token[last] * pace.tokens[last]) for one, pace in paces.items()},
            drafts={
                one: _schedule(pace, self._max_num_seqs[one.tp]) for one, pace in paces.items()
            },
        )

    def _prefill_seconds(self, layout: Layout, tokens: int) -> float:
        """Seconds to compute prompts of so many tokens, spread over the replicas."""
        share = max(1, min(tokens // layout.replicas, _PREFILL_CHUNK))
        chunk = self._step(layout.tp, 0, 0, 0, share, layout.replicas)
        return float(chunk) * tokens / (share * layout.replicas)

    def _switch_seconds(
        self, course: Course, paces: Mapping[Layout, _Pace]
    ) -> list[list[list[float]]]:
        """Seconds that switches take when a group begins, [source][target][group]."""
        none = [0.0] * len(course.live)
        # The first step in the target has no drafts to verify: it gives one token.
        first = {one: pace.token * (pace.tokens - 1) for one, pace in paces.items()}
        seconds = []
        for source, pace in paces.items():
            # Replicas step freely: one that has finished its step waits for the others, half a
            # step in the mean.
            waits = 0.5 * (1 - 1 / source.replicas) * (pace.token * pace.tokens)
            seconds.append(
                [
                    none
                    if target == source
                    else (
                        waits
                        + self._switch(source, target, course.most, course.context)
                        + first[target]
                    ).tolist()
                    for target in self.layouts
                ]
            )
        return seconds


def _schedule(pace: _Pace, most: int) -> Schedule:
    """Draft lengths by the requests in a replica's step, 1 to `most`.

    Each number takes the length of the group that runs the nearest number. Of groups that run as
    many in a replica, it is the one that comes first.
    """
    running = pace.running.round(6)  # equal numbers may differ by rounding errors
    order = running.argsort(kind="stable")
    running, lengths = running[order], pace.lengths[order]
    last = np.append(running[1:] > running[:-1], True)
    running, lengths = running[last], lengths[last]
    between = 0.5 * (running[1:] + running[:-1])
    lengths = lengths[between.searchsorted(np.arange(1, most + 1), "right")]
    begins = np.append(0, np.flatnonzero(np.diff(lengths)) + 1)
    ends = np.append(begins[1:], most)
    return tuple(zip((begins + 1).tolist(), ends.tolist(), lengths[begins].tolist(), strict=True))


def _cut(steps: Floats, seconds: Floats, horizon: float) -> Floats:
    """Steps of each group that are made within `horizon` seconds, many live requests first."""
    before = np.append(np.cumsum((steps * seconds)[::-1])[::-1][1:], 0.0)
    left = np.maximum(0.0, horizon - before)
    return np.minimum(steps, left / seconds)
