"""The cheapest path of layouts and draft lengths from now to the end of the batch. Pure.

While no request arrives, the number of live ones only falls, and it is always known. So a plan is a
layout and a draft length k for each number of live requests, and its expected time adds up over
them:

    sum over m of  E[tokens that each live request makes while exactly m are live]
                   * step time(layout(m), m, k(m)) / tokens per step(k(m))  +  switches

The expectations come from sampled futures of the live requests. A change of k costs nothing, so in
each layout k is the one with the least time per token. The best layouts follow by dynamic
programming from the last response backwards, over as many switches as pay, in any direction.

A forecast has the numbers of live requests in groups, few first: the last group is the present one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.predictor.acceptance import PLAIN, DraftYield
from pat_vllm.predictor.draft_schedule import Schedule
from pat_vllm.predictor.forecast import BatchForecast
from pat_vllm.predictor.state import Bools, Floats, Ints

_PREFILL_CHUNK = 512
"""Prompt tokens that a step is taken to compute where many wait."""
StepSeconds = Callable[..., Floats]
"""Seconds of steps, by layout and the fields of `StepShape` (batch, context, longest, ...)."""
SwitchSeconds = Callable[[Layout, Layout, Floats, Floats], Floats]
"""Seconds of switches, by source, target, live requests and their tokens."""


@dataclass(frozen=True)
class Plan:
    """Expected seconds until the last response ends.

    Attributes:
        layout: where the engine is.
        no_switch: without any switch.
        switch_later: without a switch now, but with those that pay later.
        switch_now: by other layout: with a switch to it now, later ones included.
        cost: by other layout: of that switch, part of `switch_now`.
        layout_costs: what it is a plan of.
    """

    layout: Layout
    no_switch: float
    switch_later: float
    switch_now: Mapping[Layout, float]
    cost: Mapping[Layout, float]
    layout_costs: LayoutCosts

    @property
    def best(self) -> Layout:
        """Where to be now."""
        target = min(self.switch_now, key=self.switch_now.__getitem__, default=self.layout)
        return target if self.switch_now.get(target, math.inf) < self.switch_later else self.layout


@dataclass(frozen=True)
class LayoutCosts:
    """What a forecast batch takes in each layout, whichever the engine is in.

    Attributes:
        layouts: the engine's.
        seconds: that each group takes, [layout][group].
        switch: seconds of a switch when a group begins, [group][source][target].
        step: seconds of a decode step at the present number of live requests, by layout.
        drafts: by layout: draft length by the number of requests in a replica's step, for all
            numbers from 1 on that it may have.
    """

    layouts: Sequence[Layout]
    seconds: Sequence[Sequence[float]]
    switch: Sequence[Sequence[Sequence[float]]]
    step: Mapping[Layout, float]
    drafts: Mapping[Layout, Schedule]

    def optimistic(self, layout: Layout, factor: float) -> LayoutCosts:
        """The same, were a layout `factor` times as fast; switches take what they take."""
        at = self.layouts.index(layout)
        seconds = list(self.seconds)
        seconds[at] = [value / factor for value in seconds[at]]
        step = self.step[layout] / factor
        return replace(self, seconds=seconds, step={**self.step, layout: step})

    def plan(self, layout: Layout) -> Plan:
        """The best plan from `layout` on."""
        # Plain lists: there are few layouts, and numpy's calls would take longer than the sums.
        last = len(self.switch) - 1
        value = [0.0] * len(self.layouts)  # by layout: seconds from here to the end
        for switch, now in zip(self.switch, zip(*self.seconds, strict=True), strict=True):
            after = list(map(add, now, value))
            value = [min(map(add, row, after)) for row in switch]
        here = self.layouts.index(layout)
        cost = self.switch[last][here]
        others = [i for i in range(len(self.layouts)) if i != here]
        return Plan(
            layout=layout,
            no_switch=sum(self.seconds[here]),
            switch_later=after[here],
            switch_now={self.layouts[i]: cost[i] + after[i] for i in others},
            cost={self.layouts[i]: cost[i] for i in others},
            layout_costs=self,
        )

    def path(self, layout: Layout) -> list[Layout]:
        """Where the plan without a switch now is in each group, the present one first."""
        value, choices = [0.0] * len(self.layouts), []
        for switch, now in zip(self.switch, zip(*self.seconds, strict=True), strict=True):
            after = list(map(add, now, value))
            totals = [list(map(add, row, after)) for row in switch]
            choices.append([total.index(min(total)) for total in totals])
            value = list(map(min, totals))
        here, path = self.layouts.index(layout), [layout]
        for choice in reversed(choices[:-1]):
            here = choice[here]
            path.append(self.layouts[here])
        return path


@dataclass(frozen=True)
class _Pace:
    """How fast a layout is with the best draft lengths, in each group of a forecast.

    Attributes:
        token: seconds in which every live request gets a token, [groups].
        step: seconds of a step, [groups].
        tokens: that a request gets per step, [groups].
        running: requests in a replica's step, [groups].
        lengths: draft lengths to use, [groups].
    """

    token: Floats
    step: Floats
    tokens: Floats
    running: Floats
    lengths: Ints


@dataclass(frozen=True)
class _Load:
    """What a replica of a layout has to do in each group of a forecast.

    What it cannot hold at once waits, so that a token of each request takes longer than a step.

    Attributes:
        layout: the layout.
        running: requests that run at once, [groups].
        mean_context: tokens of a running request's context, [groups].
        busy: replicas that have requests, [groups].
        waves: requests that the replica has, by those that run at once, [groups].
        preempts: whether requests wait for KV, so that vLLM preempts others, [groups].
    """

    layout: Layout
    running: Floats
    mean_context: Floats
    busy: Floats
    waves: Floats
    preempts: Bools


class Planner:
    """Finds the cheapest path of layouts and draft lengths.

    Args:
        max_num_seqs: requests that a replica runs at once, by tp.
        kv_tokens: tokens whose KV a replica's memory holds, by tp.
    """

    def __init__(
        self,
        layouts: Sequence[Layout],
        step: StepSeconds,
        switch: SwitchSeconds,
        *,
        max_num_seqs: Mapping[int, int],
        kv_tokens: Mapping[int, int],
    ) -> None:
        self.layouts = tuple(layouts)
        self._step = step
        self._switch = switch
        self._max_num_seqs = max_num_seqs
        self._kv_tokens = kv_tokens

    def token_seconds(
        self, layout: Layout, forecast: BatchForecast, draft_yield: DraftYield = PLAIN
    ) -> Floats:
        """Seconds in which every live request gets a token, in each group of a forecast."""
        return self._pace(layout, forecast, draft_yield).token

    def _pace(
        self,
        layout: Layout,
        forecast: BatchForecast,
        draft_yield: DraftYield,
        table: Ints | None = None,
    ) -> _Pace:
        """How fast a layout is in each group, with the draft length that is fastest there.

        `table` has the draft lengths, as indices, by the requests that a replica runs, from 1; it
        takes the place of the fastest.
        """
        load = self._load(layout, forecast)
        steps = self._step_seconds(load, forecast, draft_yield)
        tokens = steps / draft_yield.tokens[:, None]
        if forecast.steps_per_token is not None and draft_yield is not PLAIN:
            quarter = replace(load, running=0.25 * load.running)
            quarter_steps = self._step_seconds(quarter, forecast, draft_yield)
            tokens = _seconds_of_unlike(steps, quarter_steps, forecast.steps_per_token)
        best, groups = tokens.argmin(axis=0), np.arange(len(forecast.live))
        if table is not None:
            best = table[np.rint(load.running).astype(np.int64) - 1]
        token, step = tokens[best, groups], steps[best, groups]
        if load.preempts.any():
            # Each token takes another's place, which is computed again when its request goes on.
            again = load.preempts * forecast.live * self._prefill_pace(layout)
            token, step = token + again, step + again * draft_yield.tokens[best]
        return _Pace(
            token=token,
            step=step,
            tokens=draft_yield.tokens[best],
            running=load.running,
            lengths=draft_yield.lengths[best],
        )

    def _load(self, layout: Layout, forecast: BatchForecast) -> _Load:
        """What a replica has to do. Requests are taken to be spread evenly now."""
        batch = _batch(forecast.live, layout.replicas)
        mean_context = forecast.context / forecast.live
        room = self._kv_tokens[layout.tp]
        admitted = np.minimum(batch, self._max_num_seqs[layout.tp])
        running = np.minimum(admitted, np.maximum(room / np.maximum(1.0, mean_context), 1.0))
        waves = batch / running
        preempts = running < admitted
        if preempts.any():
            # Requests do not advance alike then: some run to their ends, the others wait. Over all
            # groups that are short of KV, steps read as much KV as if requests advanced alike. So
            # each step runs as many requests as have room with the mean context over these groups.
            weights = np.where(preempts, forecast.steps + 1e-9, 0.0)
            typical = float(weights @ forecast.context) / float(weights @ forecast.live)
            queued = np.minimum(admitted, max(room / max(1.0, typical), 1.0))
            running = np.where(preempts, queued, running)
            mean_context = np.where(preempts, typical, mean_context)
        busy = np.minimum(layout.replicas, np.ceil(forecast.live))
        return _Load(layout, running, mean_context, busy, waves, preempts)

    def _step_seconds(
        self, load: _Load, forecast: BatchForecast, draft_yield: DraftYield
    ) -> Floats:
        """Seconds of as many steps as let each request of a replica make one, by draft length,
        [lengths, groups]."""
        seconds = self._step(
            load.layout,
            load.running,
            load.running * load.mean_context,
            forecast.longest,
            0,
            load.busy,
            draft_yield.drafts[:, None] * load.running,
            draft_yield.lengths[:, None],
        )
        shape = len(draft_yield.lengths), len(load.waves)
        return np.broadcast_to(seconds * load.waves, shape)

    def layout_costs(
        self,
        forecast: BatchForecast,
        *,
        prompts: int = 0,
        draft_yield: DraftYield = PLAIN,
        table: Ints | None = None,
    ) -> LayoutCosts:
        """What is ahead, wherever the engine is.

        Args:
            prompts: prompt tokens that have yet to be computed, before anything else.
            draft_yield: the draft lengths, and what they are expected to give.
            table: index of the draft length by the requests in a replica's step less one, int64
                [max_num_seqs]; None: the fastest is taken.
        """
        paces = [self._pace(layout, forecast, draft_yield, table) for layout in self.layouts]
        seconds = np.array([pace.token for pace in paces]) * forecast.steps
        if prompts:
            seconds[:, -1] += [self.prefill_seconds(layout, prompts) for layout in self.layouts]
        return LayoutCosts(
            layouts=self.layouts,
            seconds=seconds.tolist(),
            switch=self._switch_seconds(forecast, paces),
            step={layout: float(p.step[-1]) for layout, p in zip(self.layouts, paces, strict=True)},
            drafts={
                layout: _schedule(pace, self._max_num_seqs[layout.tp])
                for layout, pace in zip(self.layouts, paces, strict=True)
            },
        )

    def room(self, layout: Layout) -> tuple[int, int]:
        """Tokens whose KV all replicas of a layout hold together, and requests that they run."""
        replicas = layout.replicas
        return replicas * self._kv_tokens[layout.tp], replicas * self._max_num_seqs[layout.tp]

    def waiting_seconds(
        self,
        layout: Layout,
        running: Floats,
        context: Floats,
        longest: Floats,
        steps: Floats,
        draft_yield: DraftYield,
        table: Ints | None = None,
    ) -> float:
        """Seconds in which requests that run, while others wait, make a number of tokens each.

        Args:
            running: requests that run, [looks].
            context: tokens of their contexts together, [looks].
            longest: tokens of the longest of them, [looks].
            steps: tokens that each of them makes, [looks].
        """
        if not len(running):
            return 0.0
        of = np.maximum(1.0, running / layout.replicas)
        busy = np.minimum(layout.replicas, running)
        drafts, k = draft_yield.drafts[:, None] * of, draft_yield.lengths[:, None]
        each = self._step(layout, of, of * context / running, longest, 0, busy, drafts, k)
        each = np.broadcast_to(each / draft_yield.tokens[:, None], (len(k), len(running)))
        best = each.argmin(axis=0) if table is None else table[np.rint(of).astype(np.int64) - 1]
        return float(each[best, np.arange(len(best))] @ steps)

    def prefill_seconds(self, layout: Layout, tokens: float, chunk: int = _PREFILL_CHUNK) -> float:
        """Seconds to compute prompts of so many tokens, spread over the replicas.

        Args:
            chunk: tokens of a replica's step, at most.
        """
        share = max(1, min(int(tokens) // layout.replicas, chunk))
        seconds = self._step(layout, 0, 0, 0, share, layout.replicas)
        return float(seconds) * tokens / (share * layout.replicas)

    def _prefill_pace(self, layout: Layout) -> float:
        """Seconds per token, of many that are computed again."""
        many = layout.replicas * _PREFILL_CHUNK
        return self.prefill_seconds(layout, many) / many

    def _switch_seconds(
        self, forecast: BatchForecast, paces: Sequence[_Pace]
    ) -> list[list[list[float]]]:
        """Seconds that switches take when a group begins, [group][source][target]."""
        count = len(self.layouts)
        seconds = np.zeros((count, count, len(forecast.live)))
        # The first step in the target has no drafts to verify: it gives one token.
        first = [pace.step * (1 - 1 / pace.tokens) for pace in paces]
        room = [layout.replicas * self._kv_tokens[layout.tp] for layout in self.layouts]
        held = forecast.context
        for i, (source, pace) in enumerate(zip(self.layouts, paces, strict=True)):
            # Replicas step freely: one that has finished its step waits for the others, half a
            # step in the mean.
            waits = 0.5 * (1 - 1 / source.replicas) * pace.step
            for j, target in enumerate(self.layouts):
                if i != j:
                    switch = self._switch(source, target, forecast.most, held)
                    seconds[i, j] = switch + waits + first[j]
                    # What the target cannot hold is computed again.
                    lost = np.minimum(held, room[i]) - room[j]
                    if lost.max() > 0:
                        seconds[i, j] += np.maximum(0, lost) * self._prefill_pace(target)
        return seconds.transpose(2, 0, 1).tolist()  # type: ignore[no-any-return]


def _seconds_of_unlike(steps: Floats, quarter_steps: Floats, steps_per_token: Floats) -> Floats:
    """Seconds in which every live request gets a token, where drafts help some more than others.

    The fixed part of a step is paid for each step of the request that ends last, the rest by each
    request for its own steps. As requests end, steps of all sizes occur. The line through a quarter
    of the requests and all of them stands for these; its value for none is the fixed part.

    Args:
        steps, quarter_steps: seconds of a step with all requests, and with a quarter of them,
            [lengths, groups].
        steps_per_token: as in `BatchForecast`.

    Returns:
        By draft length, [lengths, groups].
    """
    last, each = steps_per_token
    fixed = np.clip((4 * quarter_steps - steps) / 3, 0.0, steps)
    seconds: Floats = fixed * last + (steps - fixed) * each
    return seconds


def _batch(live: Floats, replicas: int) -> Floats:
    """Mean number of requests in a live request's replica, itself included, [groups].

    The most live requests are spread evenly. They then end at random, not in each replica in turn.
    So of a request's neighbours the same share is left as of all other requests.
    """
    most = live.max()
    beside = max(0.0, most / replicas - 1)
    return 1 + beside * (live - 1) / max(1.0, most - 1)


def _schedule(pace: _Pace, most: int) -> Schedule:
    """Draft lengths by the requests in a replica's step, 1 to `most`.

    Each number takes the length of the group that runs the nearest number. Of groups that run the
    same number, it is the last in the arrays: the first in time.
    """
    if (pace.lengths == pace.lengths[0]).all():
        return ((1, most, int(pace.lengths[0])),)
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
