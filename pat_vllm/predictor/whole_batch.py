"""How long a batch takes from its first step to its last, before it has begun. Pure.

The planner takes all live requests to advance alike. Where a batch does not find room at once, in
the memory or in `max_num_seqs`, that is far from what happens: vLLM serves the first requests to
their ends, and the last ones begin late. So a batch has two parts. While requests wait, they are
served in order, in one layout. When all that are left run, the planner plans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.predictor.acceptance import PLAIN, DraftYield
from pat_vllm.predictor.draft_schedule import Schedule
from pat_vllm.predictor.forecast import forecast
from pat_vllm.predictor.planner import LayoutCosts, Planner, StepSeconds
from pat_vllm.predictor.state import Floats, Ints, LiveRequests

_ALIKE = 20.0
"""Sum of the parameters of the beta distribution from which the acceptance of each request is
drawn, as in the simulator: how alike the requests of a batch are."""
_LOOKS = 64
"""Looks at a batch while requests wait, at least."""
_LEAVE = 16
"""One in so many running requests ends until the next look, at most."""
_PREFILL_CHUNK = 8192
"""Prompt tokens of a step where many prompts wait: vLLM's default `max_num_batched_tokens`."""


@dataclass(frozen=True)
class Batch:
    """Requests that arrive together.

    Attributes:
        num_prompt_tokens, lengths: of each request, and of its response, int64 [n].
        acceptance: probability that a draft token of the request is accepted if those before it
            were, float64 [n]; None: there are no drafts.
    """

    num_prompt_tokens: Ints
    lengths: Ints
    acceptance: Floats | None = None

    def tokens_per_step(self, draft_lengths: Ints) -> Floats:
        """Tokens that each request makes per step, float64 [draft lengths, n]."""
        acceptance = np.zeros(len(self.lengths)) if self.acceptance is None else self.acceptance
        reached = acceptance ** np.arange(draft_lengths.max() + 1)[:, None]
        return reached.cumsum(axis=0)[draft_lengths]  # type: ignore[no-any-return]

    def draft_yield(self, draft_lengths: Ints) -> DraftYield:
        """What each draft length gives in the mean."""
        steps = (self.lengths / self.tokens_per_step(draft_lengths)).sum(axis=1)
        return DraftYield(draft_lengths, self.lengths.sum() / steps, draft_lengths.astype(float))

    def split(self, parts: int) -> list[Batch]:
        """The requests of each of some replicas, which take turns."""
        acceptance = self.acceptance
        return [
            Batch(
                self.num_prompt_tokens[first::parts],
                self.lengths[first::parts],
                None if acceptance is None else acceptance[first::parts],
            )
            for first in range(min(parts, len(self.lengths)))
        ]


def acceptance_of_each(mean: float, count: int, seed: int) -> Floats:
    """Acceptance of so many requests that are unlike each other, float64 [count]."""
    if not 0 < mean < 1:
        return np.full(count, mean)
    return np.random.default_rng(seed).beta(_ALIKE * mean, _ALIKE * (1 - mean), count)


class Waiting(NamedTuple):
    """A batch while requests wait, from look to look.

    Attributes:
        running: requests that run, [looks].
        context: tokens of their contexts together, [looks].
        longest: tokens of the longest of these, [looks].
        tokens: that each of them makes until the next look, [looks].
        computed: tokens of prompts, and of contexts that had lost their room.
        left: indices of the requests that run when none waits any more, [left].
        num_output_tokens: that these have made by then, [left].
    """

    running: Floats
    context: Floats
    longest: Floats
    tokens: Floats
    computed: float
    left: Ints
    num_output_tokens: Ints


def serve_in_order(batch: Batch, room: int, most: int) -> Waiting:
    """A batch until no request waits, and none will have to.

    As in vLLM, the first requests run, as many as have room. Where their contexts outgrow the
    memory, the last of them give theirs up, and are computed again when they go on.

    Args:
        room: tokens whose KV all replicas hold together.
        most: requests that they run at once.
    """
    prompts, lengths = batch.num_prompt_tokens, batch.lengths
    index = np.arange(len(lengths))
    held, left = prompts.astype(np.float64), lengths.astype(np.float64)
    looks: list[tuple[float, float, float, float]] = []
    computed = float(prompts.sum())
    apart = float(left.sum()) / min(most, len(left)) / _LOOKS
    while len(left) > most or _largest(held, left) > room:
        ends = held.cumsum()
        fit = max(1, min(most, int(ends.searchsorted(room, "right"))))
        soon = fit // _LEAVE
        tokens = max(1.0, min(apart, float(np.partition(left[:fit], soon)[soon])))
        # They have to find room until the middle of this time.
        grown = ends[:fit] + 0.5 * tokens * np.arange(1, fit + 1)
        fit = max(1, int(grown.searchsorted(room, "right")))
        context = float(ends[fit - 1]) + 0.5 * tokens * fit
        looks.append((fit, context, float(held[:fit].max()) + 0.5 * tokens, tokens))
        waits_for = float(held[fit]) if fit < min(most, len(left)) else 0.0
        held[:fit] += np.minimum(tokens, left[:fit])
        left[:fit] -= tokens
        stays = left > 0
        if waits_for:
            # The memory is full: a new token takes the place of another, which is computed again
            # when its request goes on. But where a request ends, others take its place until the
            # next of them does not fit: half of its context stays free in the mean.
            computed += max(0.0, tokens * fit - 0.5 * waits_for * float((~stays).sum()))
        index, held, left = index[stays], held[stays], left[stays]
    made = np.rint(held).astype(np.int64) - prompts[index]
    running, contexts, longest, steps = np.array(looks, np.float64).reshape(-1, 4).T
    left_made = np.minimum(made, lengths[index] - 1)
    return Waiting(running, contexts, longest, steps, computed, index, left_made)


def _largest(held: Floats, left: Floats) -> float:
    """Tokens of all contexts when they are the most, if all advance alike from now on."""
    order = np.argsort(-left)
    contexts = held[order].cumsum() + np.arange(1, len(left) + 1) * left[order]
    return float(contexts.max(initial=0.0))


@dataclass(frozen=True)
class BatchPlan:
    """A batch that begins in a layout.

    Attributes:
        layout: where it begins.
        waiting: seconds while requests wait, and to compute prompts.
        costs: of what is left then.
        most: live requests with which each group of `costs` begins, few ones first.
    """

    layout: Layout
    waiting: float
    costs: LayoutCosts
    most: Sequence[float]

    @property
    def static(self) -> float:
        """Seconds without any switch."""
        return self.waiting + self.costs.plan(self.layout).no_switch

    @property
    def planned(self) -> float:
        """Seconds with the switches that pay, once as many requests have ended as a plan tells
        apart: an engine does not leave at once the layout in which it waited for its requests."""
        return self.waiting + self.costs.plan(self.layout).switch_later

    @property
    def path(self) -> tuple[tuple[Layout, int], ...]:
        """The layouts of the plan, each with the live requests at which the engine goes there."""
        path = [(self.layout, round(self.most[-1]))]
        for layout, live in zip(self.costs.path(self.layout), self.most[::-1], strict=True):
            if layout != path[-1][0]:
                path.append((layout, round(live)))
        return tuple(path)


def plan_batch(
    planner: Planner,
    layout: Layout,
    batch: Batch,
    draft_lengths: Sequence[int] = (0,),
    table: Ints | None = None,
) -> BatchPlan:
    """A batch that begins in `layout`.

    Args:
        draft_lengths: among which the planner chooses, ascending.
        table: as for `Planner.layout_costs`.
    """
    waits = serve_in_order(batch, *planner.room(layout))
    draft_yield, tokens, drafts = PLAIN, None, np.array(draft_lengths)
    if drafts.any():
        draft_yield = batch.draft_yield(drafts)
        tokens = batch.tokens_per_step(drafts)[:, waits.left, None]
    seconds = planner.waiting_seconds(layout, *waits[:4], draft_yield, table)
    seconds += planner.prefill_seconds(layout, waits.computed, _PREFILL_CHUNK)
    fresh = LiveRequests.fresh(batch.num_prompt_tokens[waits.left], int(batch.lengths.max()))
    live = replace(fresh, num_output_tokens=waits.num_output_tokens)
    remaining = (batch.lengths[waits.left] - waits.num_output_tokens)[:, None]
    ahead = forecast(live, remaining, tokens, len(drafts) // 2)
    costs = planner.layout_costs(ahead, draft_yield=draft_yield, table=table)
    return BatchPlan(layout, seconds, costs, ahead.most.tolist())


def best_plan(planner: Planner, batch: Batch, draft_lengths: Sequence[int] = (0,)) -> BatchPlan:
    """The plan of an engine that may begin in any of its layouts."""
    plans = (plan_batch(planner, layout, batch, draft_lengths) for layout in planner.layouts)
    return min(plans, key=lambda plan: plan.planned)


@dataclass(frozen=True)
class StaticEngines:
    """Engines of one layout, one for each of its replicas, each with its share of the requests.

    Attributes:
        step: seconds of steps.
        max_num_seqs, kv_tokens: requests and tokens for which one has room.
    """

    layout: Layout
    step: StepSeconds
    max_num_seqs: int
    kv_tokens: int

    def seconds(self, batch: Batch, schedule: Schedule = ((1, 1, 0),)) -> float:
        """Seconds until the last of the engines has ended.

        Args:
            schedule: draft lengths by the requests in a step.
        """
        one = replace(self.layout, replicas=1)
        lengths = sorted({k for *_, k in schedule})
        last = np.array([last for _, last, _ in schedule])
        at = np.minimum(last.searchsorted(np.arange(1, self.max_num_seqs + 1)), len(last) - 1)
        table = np.array([lengths.index(k) for *_, k in schedule])[at]
        planner = Planner(
            [one],
            self._step_of_one,
            lambda *_: np.zeros(0),
            max_num_seqs={one.tp: self.max_num_seqs},
            kv_tokens={one.tp: self.kv_tokens},
        )
        parts = batch.split(self.layout.replicas)
        return max(plan_batch(planner, one, part, lengths, table).static for part in parts)

    def tuned_schedule(self, batch: Batch, draft_lengths: Sequence[int]) -> Schedule:
        """Draft lengths by the requests in a step that take the least time per token, with the mean
        context of a token: vLLM's table, made by who knows steps and drafts."""
        lengths, prompts = batch.lengths, batch.num_prompt_tokens
        context = float(lengths @ (prompts + lengths / 2) / lengths.sum())
        drafts = np.array(draft_lengths)
        # vLLM's tables name few batch sizes, too: powers of two.
        first = 2 ** np.arange(int(math.log2(self.max_num_seqs)) + 1)
        of = drafts[:, None] * first
        seconds = self._step_of_one(
            self.layout, first, first * context, context, 0, 1, of, drafts[:, None]
        )
        best = (seconds / batch.draft_yield(drafts).tokens[:, None]).argmin(axis=0)
        last = [*(first[1:] - 1).tolist(), self.max_num_seqs]
        return tuple(zip(first.tolist(), last, drafts[best].tolist(), strict=True))

    def _step_of_one(self, _: Layout, *shape: Any) -> Floats:
        """Steps of one engine while the others are busy, too."""
        batch, context, longest, prefill, _, *drafts = shape
        return self.step(
            self.layout, batch, context, longest, prefill, self.layout.replicas, *drafts
        )
