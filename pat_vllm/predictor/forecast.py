"""How a batch is expected to thin out: what lies ahead of the planner. Pure."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pat_vllm.predictor.state import Floats, Ints, LiveRequests

_EXACT_LIVE = 8
"""Up to this many live requests each number is planned for by itself, above in groups."""
_GROUP_RATIO = 0.85
"""Least of the live requests in a group relative to its most."""
_GROWTH = 0.25
"""Most growth of the contexts in a group, relative to them; but for `_MOST_PARTS`."""
_MOST_PARTS = 4


@dataclass(frozen=True)
class BatchForecast:
    """How a batch is expected to thin out: groups of numbers of live requests, few ones first.

    Attributes:
        live: mean live requests in the group, [groups].
        most: most live requests in it, with which the group begins, [groups].
        steps: expected decode steps in it, of a token for each request, or, with
            `steps_per_token`, for the one that ends last, [groups].
        context: mean tokens of all live contexts together, [groups].
        longest: mean of the longest context, [groups].
        steps_per_token: by draft length: steps in which the request that ends last makes a token,
            and in which the live requests, in the mean, make what they make meanwhile,
            [2, lengths, groups]. None where drafts help all requests alike.
    """

    live: Floats
    most: Floats
    steps: Floats
    context: Floats
    longest: Floats
    steps_per_token: Floats | None = None


def forecast(
    live: LiveRequests, remaining: Ints, tokens: Floats | None = None, used: int = 0
) -> BatchForecast:
    """What sampled futures say about the number of live requests.

    Args:
        live: n requests, at least one.
        remaining: tokens that each still generates in each future, int64 [n, futures].
        tokens: that each makes per step, by draft length, float64 [lengths, n, futures]. None
            where drafts help all requests alike.
        used: index of the draft length that says in what order they end.
    """
    count = len(live)
    alive = np.arange(1, count + 1)
    remaining = np.ascontiguousarray(remaining.T)  # [futures, n]
    if tokens is None:
        per_token = None
        order = np.argsort(-remaining, axis=1)
        ends = np.take_along_axis(remaining, order, axis=1)  # [m - 1]: the m-th last end
        generated = np.broadcast_to(alive, ends.shape)  # tokens that the last m make meanwhile
    else:
        per_token = 1 / tokens.transpose(0, 2, 1)  # steps of each, [lengths, futures, n]
        order = np.argsort(-remaining * per_token[used], axis=1)
        per_token = np.take_along_axis(per_token, order[None], axis=2)
        # Ends are counted in tokens of the request that ends last.
        relative = per_token[used] / per_token[used, :, :1]
        ends = np.take_along_axis(remaining, order, axis=1) * relative
        generated = (1 / relative).cumsum(axis=1)
        per_token /= relative
    # With m live the m-th last has not ended and the next one before it has.
    before = np.zeros_like(ends)
    before[:, :-1] = ends[:, 1:]
    steps = ends - before
    middle = 0.5 * (ends + before)
    contexts = live.context[order]
    total = np.cumsum(contexts, axis=1) + generated * middle
    longest = np.maximum.accumulate(contexts, axis=1) + middle

    starts = _groups(count)
    most = np.append(starts[1:], count)
    # Where no step is expected a group still needs a sensible state: hence the small weights.
    weights = steps + 1e-9
    of_group = np.add.reduceat(weights.sum(axis=0), starts)

    def mean(values: Floats | Ints) -> Floats:
        return np.add.reduceat((values * weights).sum(axis=0), starts) / of_group

    steps_per_token = None
    if per_token is not None:
        of_each = per_token.mean(axis=1)
        each = of_each.cumsum(axis=1) / alive
        last = np.broadcast_to(of_each[:, :1], each.shape)
        steps_per_token = np.stack((last, each))[:, :, most - 1]
    return _cut(
        BatchForecast(
            live=mean(alive),
            most=most.astype(float),
            steps=np.add.reduceat(steps.sum(axis=0), starts) / len(steps),
            context=mean(total),
            longest=mean(longest),
            steps_per_token=steps_per_token,
        )
    )


def _cut(forecast: BatchForecast) -> BatchForecast:
    """The same, where groups in which contexts grow much are several, the last steps first.

    Responses that all end together are one group, and their KV may fit at first and not later.
    """
    parts = np.ceil(forecast.steps * forecast.live / (_GROWTH * forecast.context))
    parts = np.clip(parts, 1, _MOST_PARTS).astype(int)
    group = np.repeat(np.arange(len(parts)), parts)
    part = np.arange(len(group)) - np.repeat(np.cumsum(parts) - parts, parts)
    steps = forecast.steps[group]
    per_token = forecast.steps_per_token
    later = steps * (0.5 - (part + 0.5) / parts[group])  # than the group's middle
    return BatchForecast(
        live=forecast.live[group],
        most=forecast.most[group],
        steps=steps / parts[group],
        context=forecast.context[group] + later * forecast.live[group],
        longest=forecast.longest[group] + later,
        steps_per_token=None if per_token is None else per_token[:, :, group],
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
