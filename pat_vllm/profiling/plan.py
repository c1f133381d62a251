"""What to measure of an engine, and in which order. Pure.

A plan lists points, the most informative first. It can end at any of them: when its time is used
up, the points that matter least are left out. Points come in rounds. Each round visits every
layout, so that every layout has data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import permutations

from pat_vllm.layout import Layout
from pat_vllm.profiling.points import EngineLimits, Point, StepPoint, SwitchPoint
from pat_vllm.profiling.profile import StepSample

QUICK_SECONDS = 20.0
"""Default time for a quick profile at an engine's start."""
FULL_SECONDS = 900.0
"""Default time for a full profile."""

_ASSUMED_STEP = 0.25
"""Seconds of a step, as long as nothing is known of the engine."""


@dataclass(frozen=True)
class ProfilePlan:
    """Points to measure, in this order.

    Attributes:
        essential: so many of the first points are measured however long they take.
        budget: seconds after which no other point is begun.
        patience: seconds after which a point need not settle.
        repeats: steps after which a point may have settled.
        spread: it has when the middle half of its times lies within this share of the median.
    """

    points: tuple[Point, ...]
    essential: int
    budget: float
    patience: float
    repeats: int
    spread: float

    @classmethod
    def quick(cls, limits: EngineLimits, budget: float = QUICK_SECONDS) -> ProfilePlan:
        """Enough to choose layouts by, at an engine's start."""
        rounds: list[Round] = [
            _essential,
            _extremes,
            _switches(((0, 1), (8, 2))),
            *([_few_drafts] if limits.draft_lengths else []),
            _middle,
            _long,
            _small,
        ]
        rounds += [_lonely, _switches(((1, 2), (32, 2))), _short_prefill, _rest]
        points, essential = _in_rounds(limits, rounds)
        return cls(points, essential, budget, patience=0.3, repeats=5, spread=0.05)

    @classmethod
    def full(cls, limits: EngineLimits, budget: float = FULL_SECONDS) -> ProfilePlan:
        """A dense grid; what a quick plan measures comes first."""
        quick = cls.quick(limits)
        rounds: list[Round] = [_dense, _dense_contexts, _skewed, _prefills, _mixed]
        if limits.draft_lengths:
            rounds += [_drafts, _far_drafts]
        rounds.append(
            _switches(((0, 1), (2, 1), (4, 2), (8, 1), (16, 2), (32, 1), (64, 2), (128, 2)))
        )
        more, _ = _in_rounds(limits, rounds)
        points = tuple(dict.fromkeys((*quick.points, *more)))
        return cls(points, quick.essential, budget, patience=2.0, repeats=8, spread=0.03)

    def part(self, points: Iterable[Point], budget: float | None = None) -> ProfilePlan:
        """The same plan with these points only, all of them essential."""
        chosen = tuple(points)
        return replace(
            self,
            points=chosen,
            essential=len(chosen),
            budget=self.budget if budget is None else budget,
        )


# ---------------------------------------------------------------- rounds

Round = Callable[[EngineLimits, Layout], list[Point]]
"""Points of a round in one layout; those that the engine cannot do are dropped afterwards."""


def _in_rounds(limits: EngineLimits, rounds: Sequence[Round]) -> tuple[tuple[Point, ...], int]:
    """The points of all rounds, each once, and how many the first round has."""
    points: dict[Point, None] = {}
    essential = 0
    for number, make in enumerate(rounds):
        # There and back, so that two rounds meet in one layout.
        for layout in limits.layouts if number % 2 == 0 else reversed(limits.layouts):
            points.update(dict.fromkeys(p for p in make(limits, layout) if _possible(limits, p)))
        if number == 0:
            essential = len(points)
    return tuple(points), essential


def _possible(limits: EngineLimits, point: Point) -> bool:
    if isinstance(point, StepPoint):
        return limits.allows(point)
    for layout in (point.source, point.target):
        tp, each = layout.tp, -(-point.num_seqs // layout.replicas)
        # The request with the most blocks decides; a replica may get one more than its share.
        if point.num_seqs and (
            each > limits.most_requests(tp) or point.context > limits.longest_context(tp, each)
        ):
            return False
    return True


def _share(limits: EngineLimits, layout: Layout) -> int:
    """Requests of each replica when as many as every layout can run are spread over all."""
    total = min(limits.max_num_seqs[one.tp] * one.replicas for one in limits.layouts)
    return max(1, min(total // layout.replicas, limits.most_requests(layout.tp)))


def _decode(limits: EngineLimits, layout: Layout, batches: Iterable[int]) -> list[Point]:
    """Short-context points with all replicas busy."""
    return [StepPoint(layout, b, limits.short, layout.replicas) for b in batches if b]


def _far(limits: EngineLimits, layout: Layout, batch: int, share: float = 1.0) -> list[Point]:
    """A long-context point, as far as memory reaches; `share` of that."""
    context = int(share * limits.longest_context(layout.tp, batch))
    if context < 2 * limits.short:
        return []
    return [StepPoint(layout, batch, context, layout.replicas)]


def _essential(limits: EngineLimits, layout: Layout) -> list[Point]:
    batches = (1, min(8, _share(limits, layout)))
    points = _decode(limits, layout, batches)
    if limits.draft_lengths:
        # A layout without any would seem to verify drafts at the price of a prompt, or of nothing.
        points += _drafted(limits, layout, limits.draft_lengths[-1], batches[-1:])
    return points


def _extremes(limits: EngineLimits, layout: Layout) -> list[Point]:
    points = _decode(limits, layout, (_share(limits, layout),))
    if layout.replicas > 1:
        points.append(StepPoint(layout, 1, limits.short, 1))
    return points


def _middle(limits: EngineLimits, layout: Layout) -> list[Point]:
    points = _decode(limits, layout, (32 // layout.replicas, 32))
    prefill = min(512, limits.max_batch_tokens[layout.tp])
    return [*points, StepPoint(layout, 0, 0, layout.replicas, prefill=prefill)]


def _long(limits: EngineLimits, layout: Layout) -> list[Point]:
    return [
        point
        for batch in (1, min(8, _share(limits, layout)), _share(limits, layout))
        for point in _far(limits, layout, batch)
    ]


def _small(limits: EngineLimits, layout: Layout) -> list[Point]:
    return _decode(limits, layout, (2, 4))


def _lonely(limits: EngineLimits, layout: Layout) -> list[Point]:
    """Some of the replicas busy, with few requests."""
    some = layout.replicas // 2
    return [
        StepPoint(layout, batch, limits.short, busy)
        for batch, busy in ((2, 1), (4, 1), (1, some), (4, some))
        if 0 < busy < layout.replicas
    ]


def _short_prefill(limits: EngineLimits, layout: Layout) -> list[Point]:
    tokens = min(limits.max_batch_tokens[layout.tp], 64)
    return [StepPoint(layout, 0, 0, layout.replicas, prefill=tokens)]


def _rest(limits: EngineLimits, layout: Layout) -> list[Point]:
    most = limits.most_requests(layout.tp)
    grid = [b for b in _powers(most) if b not in (1, 2, 4, 8, 32)]
    return _decode(limits, layout, (*grid, most))


def _dense(limits: EngineLimits, layout: Layout) -> list[Point]:
    most = limits.most_requests(layout.tp)
    between = [b + b // 2 for b in _powers(most) if b > 1]
    points = _decode(limits, layout, sorted({*_powers(most), *between, most}))
    busy = _powers(layout.replicas)
    points += [StepPoint(layout, b, limits.short, n) for n in busy for b in (1, 2, 4, 8, 16, 32)]
    return points


def _dense_contexts(limits: EngineLimits, layout: Layout) -> list[Point]:
    return [
        point
        for batch in _powers(limits.most_requests(layout.tp))
        for share in (1.0, 0.5, 0.25)
        for point in _far(limits, layout, batch, share)
    ]


def _skewed(limits: EngineLimits, layout: Layout) -> list[Point]:
    """One long context among short ones: its attention may be what the others wait for."""
    far = limits.longest_context(layout.tp, 1)
    return [
        StepPoint(layout, b, limits.short, layout.replicas, longest=max(limits.short, far // k))
        for b in (4, 16)
        for k in (1, 3)
    ]


def _prefills(limits: EngineLimits, layout: Layout) -> list[Point]:
    most = limits.max_batch_tokens[layout.tp]
    sizes = sorted({16, 64, 256, 1024, 2048, 4096, most})
    return [
        StepPoint(layout, 0, 0, layout.replicas, prefill=min(n, most)) for n in sizes if n <= 8192
    ]


def _mixed(limits: EngineLimits, layout: Layout) -> list[Point]:
    return [
        StepPoint(layout, batch, limits.short, layout.replicas, prefill=prefill)
        for batch in (2, 16)
        for prefill in (32, 256)
    ]


def _drafted(
    limits: EngineLimits,
    layout: Layout,
    k: int,
    batches: Iterable[int],
    share: float = 0.0,
    busy: int | None = None,
) -> list[Point]:
    """Decode steps that verify k drafts of each request; with the longest k, also such that verify
    none, where that can be. `share` as of `_far`, 0 for short contexts."""
    points: list[Point] = []
    for batch in sorted({min(one, limits.most_requests(layout.tp, k)) for one in batches}):
        far = int(share * limits.longest_context(layout.tp, batch, k))
        context = limits.short if not share else far
        if share and far < 2 * limits.short:
            continue
        point = StepPoint(layout, batch, context, busy or layout.replicas, k=k, hits=True)
        points.append(point)
        if limits.misses and k == limits.draft_lengths[-1]:
            points.append(replace(point, hits=False))
    return points


def _telling(limits: EngineLimits) -> list[int]:
    """The longest draft length and one in the middle: what others lie between."""
    lengths = limits.draft_lengths
    return list(dict.fromkeys((lengths[-1], lengths[(len(lengths) - 1) // 2])))


def _few_drafts(limits: EngineLimits, layout: Layout) -> list[Point]:
    batches = (1, _share(limits, layout))
    return [p for k in _telling(limits) for p in _drafted(limits, layout, k, batches)]


def _drafts(limits: EngineLimits, layout: Layout) -> list[Point]:
    most = limits.most_requests(layout.tp)
    grid = (*_powers(most), most)
    points = [p for k in limits.draft_lengths for p in _drafted(limits, layout, k, grid)]
    return points + _drafted(limits, layout, limits.draft_lengths[-1], (1, 8), busy=1)


def _far_drafts(limits: EngineLimits, layout: Layout) -> list[Point]:
    """The drafter searches all of a context."""
    batches = (1, 8, _share(limits, layout))
    return [p for k in _telling(limits) for p in _drafted(limits, layout, k, batches, share=1.0)]


def _switches(sizes: Sequence[tuple[int, int]]) -> Round:
    """Switches from a layout to every other, with (requests, 1 for short, 2 for medium)."""

    def points(limits: EngineLimits, layout: Layout) -> list[Point]:
        pairs = [pair for pair in permutations(limits.layouts, 2) if pair[0] == layout]
        made: list[Point] = []
        for num_seqs, kind in sizes:
            for source, target in pairs:
                context = limits.short
                if kind == 2 and num_seqs:
                    context = max(
                        limits.short,
                        min(
                            limits.longest_context(end.tp, -(-num_seqs // end.replicas)) // 2
                            for end in (source, target)
                        ),
                    )
                made.append(SwitchPoint(source, target, num_seqs, context if num_seqs else 0))
        return made

    return points


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << k for k in range(most.bit_length())]


# ---------------------------------------------------------------- estimates


def estimate(point: Point, known: Iterable[StepSample]) -> float:
    """Seconds that one step of a point, or its switch, may take: rather more than it will.

    Decode steps grow at most like the batch and the summed context, and do not get faster with
    more work, so each known step of the layout bounds the unknown one from above.
    """
    if isinstance(point, SwitchPoint):
        return _ASSUMED_STEP
    known = tuple(known)
    prefills = [s for s in known if s.layout == point.layout and not s.batch]
    if not point.batch and prefills:
        return min(s.seconds * max(1.0, point.prefill / s.prefill) for s in prefills)
    decodes = [s for s in known if s.batch and not s.prefill and (point.k or not s.k)]
    same = [s for s in decodes if s.layout == point.layout]
    if not same:
        return max((s.seconds for s in decodes), default=_ASSUMED_STEP)
    # A prompt token costs less than a decoded one: it needs no sampling.
    work = point.batch * (1 + point.drafts) + point.prefill / 4
    context = sum(point.contexts) + point.prefill
    return min(
        s.seconds * max(1.0, work / (s.batch + s.drafts), 0.25 * context / s.context) for s in same
    )
