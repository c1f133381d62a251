"""The cheapest path of layouts from now to the end of the batch. Pure.

The number of live requests only falls while nobody asks for more, and everybody can see it. So a
plan is a layout for each number of live requests, and its expected time adds up over them:

    sum over m of  E[steps with exactly m live] * step time(layout(m), m)  +  switches

The expectations come from sampled futures of the live requests. The best plan follows by dynamic
programming from the last response backwards, over as many switches as pay, in any direction. It
uses only what will be known by then.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.predictor.state import Floats, Ints, LiveRequests

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
        steps: expected decode steps in it, [groups].
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
    """

    layout: Layout
    never: float
    stay: float
    go: Mapping[Layout, float]
    cost: Mapping[Layout, float]
    step: Mapping[Layout, float]

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


class Planner:
    """Finds the cheapest path of layouts."""

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

    def step_seconds(self, layout: Layout, course: Course) -> Floats:
        """Seconds in which every live request gets a token, in each group of a course.

        Requests are taken to be spread evenly; what a replica cannot hold at once waits, so that
        a token of each takes longer than a step.
        """
        busy = np.minimum(layout.replicas, np.ceil(course.live))
        batch = np.maximum(1.0, course.live / busy)
        mean_context = course.context / course.live
        held = self._kv_tokens[layout.tp] / np.maximum(1.0, mean_context)
        running = np.minimum(batch, np.clip(held, 1.0, self._max_num_seqs[layout.tp]))
        seconds = self._step(layout.tp, running, running * mean_context, course.longest, 0, busy)
        return seconds * (batch / running)

    def fastest(self, course: Course, more: float) -> Layout:
        """The layout in which a token takes least time, with `more` live requests than now."""
        now = course.most[-1]
        busier = Course(
            live=np.array([now + more]),
            most=np.array([now + more]),
            steps=np.ones(1),
            context=course.context[-1:] * (now + more) / now,
            longest=course.longest[-1:],
        )
        return min(self.layouts, key=lambda one: float(self.step_seconds(one, busier)[0]))

    def plan(
        self,
        layout: Layout,
        course: Course,
        *,
        prompts: int = 0,
        horizon: float = math.inf,
        afterwards: Layout | None = None,
        optimism: Mapping[Layout, float] | None = None,
    ) -> Plan:
        """Plan from `layout` on.

        Args:
            prompts: prompt tokens that have yet to be computed, before anything else.
            horizon: seconds after which requests are expected that make this plan void.
            afterwards: where the engine will want to be then; a plan that ends elsewhere pays for
                the way.
            optimism: by layout, a factor on its step times (below 1: what if it is faster).
        """
        per_token = {one: self.step_seconds(one, course) for one in self.layouts}
        for one, factor in (optimism or {}).items():
            per_token[one] = per_token[one] * factor
        steps = course.steps
        if horizon < math.inf:
            steps = _cut(steps, per_token[layout], horizon)
        seconds = [(per_token[one] * steps).tolist() for one in self.layouts]
        if prompts:
            for one, times in zip(self.layouts, seconds, strict=True):
                times[-1] += self._prefill_seconds(one, prompts)
        switch = self._switch_seconds(course, per_token)

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
            step={one: float(per_token[one][last]) for one in self.layouts},
        )

    def _prefill_seconds(self, layout: Layout, tokens: int) -> float:
        """Seconds to compute prompts of so many tokens, spread over the replicas."""
        share = max(1, min(tokens // layout.replicas, _PREFILL_CHUNK))
        chunk = self._step(layout.tp, 0, 0, 0, share, layout.replicas)
        return float(chunk) * tokens / (share * layout.replicas)

    def _switch_seconds(
        self, course: Course, per_token: Mapping[Layout, Floats]
    ) -> list[list[list[float]]]:
        """Seconds that switches take when a group begins, [source][target][group]."""
        none = [0.0] * len(course.live)
        seconds = []
        for source in self.layouts:
            # Replicas step freely: one that has finished its step waits for the others, half a
            # step in the mean.
            waits = 0.5 * (1 - 1 / source.replicas) * per_token[source]
            seconds.append(
                [
                    none
                    if target == source
                    else (
                        waits + self._switch(source, target, course.most, course.context)
                    ).tolist()
                    for target in self.layouts
                ]
            )
        return seconds


def _cut(steps: Floats, seconds: Floats, horizon: float) -> Floats:
    """Steps of each group that are made within `horizon` seconds, many live requests first."""
    before = np.append(np.cumsum((steps * seconds)[::-1])[::-1][1:], 0.0)
    left = np.maximum(0.0, horizon - before)
    return np.minimum(steps, left / seconds)
