"""What to measure of an engine, and in which order. Pure.

A plan lists points, the most informative first. It can end at any of them: when its time is used
up, the points that matter least are left out. Each priority visits every layout, so that every
layout has data.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import NamedTuple

from pat_vllm.layout import Layout
from pat_vllm.models.kinds import Kinds, block_size, longest_context, num_blocks
from pat_vllm.profile import StepSample, SwitchSample

SHORT_CONTEXT = 64
"""Tokens of a context whose attention hardly costs anything."""
LONGEST_PROMPT = 512
"""A longer prefill is made up of several prompts, as in a batch that arrives."""
_MOST_STEPS = 16
"""Decode steps at a point; contexts grow by as much."""
_LEAST_STEPS = 3
_STEPS_IF_ALL_ACCEPTED = 5
"""Steps for which contexts have room at a point where every draft is accepted."""
_ASSUMED_STEP = 0.25
"""Seconds of a step, as long as nothing is known of the engine."""


@dataclass(frozen=True)
class EngineLimits:
    """What an engine can be asked to do.

    Attributes:
        layouts: base first.
        max_num_seqs: requests that a replica runs at once, by tp.
        max_batch_tokens: tokens that a step of a replica may compute, by tp.
        max_model_len: tokens of the longest context.
        kinds: of its groups of KV caches.
        blocks: KV blocks that requests of a replica can have, by tp.
        draft_lengths: those above 0 that steps may be measured with, ascending.
        misses: whether a step may have a draft length and verify no drafts, as when nothing was
            found. Where it may not, drafts are filled up and always verified.
        drafter_has_weights: whether drafts are made by a model, which reads KV of its own.
        draft_slots: of each request in a step's tokens, beside its own: a draft model has one more.
    """

    layouts: tuple[Layout, ...]
    max_num_seqs: Mapping[int, int]
    max_batch_tokens: Mapping[int, int]
    max_model_len: int
    kinds: Kinds
    blocks: Mapping[int, int]
    draft_lengths: tuple[int, ...] = ()
    misses: bool = False
    drafter_has_weights: bool = False
    draft_slots: int = 0

    @property
    def kv_tokens(self) -> dict[int, int]:
        """Tokens whose KV a replica's memory holds, by tp: those of the longest contexts."""
        size, most = block_size(self.kinds), self.max_model_len
        tokens, of_each = -(-most // size) * size, num_blocks(self.kinds, most, room=1)
        return {tp: blocks * tokens // of_each for tp, blocks in self.blocks.items()}

    def room_for(self, drafts: int) -> int:
        """Tokens by which a context may grow at a point that verifies so many drafts of each."""
        steps = max(_LEAST_STEPS, min(_MOST_STEPS, self.max_model_len // 4))
        return steps + _STEPS_IF_ALL_ACCEPTED * drafts

    def longest_context(self, tp: int, batch: int, drafts: int = 0) -> int:
        """Most tokens that each of `batch` contexts may begin with; below 1 if they do not fit."""
        room = self.room_for(drafts)
        blocks = self.blocks[tp] // batch
        return longest_context(self.kinds, blocks, self.max_model_len, room + 2) - room - 1

    def most_requests(self, tp: int, drafts: int = 0) -> int:
        """Requests with short contexts, and so many drafts each, that a replica can run at once."""
        each = self._blocks(self.short, drafts)
        in_step = self.max_batch_tokens[tp] // (1 + drafts + self.draft_slots)
        return max(1, min(self.max_num_seqs[tp], in_step, self.blocks[tp] // each))

    def _blocks(self, context: int, drafts: int) -> int:
        """Blocks of a context at a point that verifies so many drafts of each."""
        room = self.room_for(drafts)
        return num_blocks(self.kinds, context + room + 1, room + 2)

    @property
    def short(self) -> int:
        """The short context, tokens."""
        # A quarter of a small model's, so that there is a longer one to compare with.
        return max(1, min(SHORT_CONTEXT, (self.max_model_len - self.room_for(0) - 1) // 4))

    def prompts(self, tokens: int) -> list[int]:
        """Lengths of the prompts that make up a prefill of `tokens` tokens."""
        longest = max(1, min(LONGEST_PROMPT, self.max_model_len - 2))
        full, rest = divmod(tokens, longest)
        return [longest] * full + [rest] * bool(rest)

    def allows(self, point: StepPoint) -> bool:
        """Whether a replica can make such a step."""
        tp, prompts = point.layout.tp, self.prompts(point.prefill)
        contexts = [c + self.room_for(point.drafts) + 1 for c in point.contexts]
        blocks = sum(self._blocks(context, point.drafts) for context in point.contexts)
        blocks += sum(num_blocks(self.kinds, n + 1, room=n + 1) for n in prompts)
        requests = point.batch + len(prompts)
        tokens = point.batch * (1 + point.drafts) + point.prefill
        return (
            0 < requests <= self.max_num_seqs[tp]
            and tokens + requests * self.draft_slots <= self.max_batch_tokens[tp]
            and max(contexts, default=0) <= self.max_model_len
            and blocks <= self.blocks[tp]
        )

    def share(self, layout: Layout) -> int:
        """Requests of each replica when as many as every layout can run are spread over all."""
        total = min(
            self.max_num_seqs[each_layout.tp] * each_layout.replicas for each_layout in self.layouts
        )
        return max(1, min(total // layout.replicas, self.most_requests(layout.tp)))


@dataclass(frozen=True)
class StepPoint:
    """A step to be measured, in each of `busy` replicas at the same time.

    Attributes:
        batch: requests that decode, each with `context` tokens to begin with.
        prefill: prompt tokens computed beside them.
        k: draft length: draft tokens that the drafter is asked for, for each request.
        hits: whether each request has k drafts, as if the drafter had found them in the step
            before, and the step verifies them. Otherwise it verifies none.
    """

    layout: Layout
    batch: int
    context: int
    busy: int
    prefill: int = 0
    k: int = 0
    hits: bool = False

    @property
    def drafts(self) -> int:
        """Draft tokens of each request that a step verifies."""
        return self.k if self.hits else 0

    @property
    def contexts(self) -> list[int]:
        """Tokens of each context at the first step."""
        return [self.context] * self.batch


@dataclass(frozen=True)
class SwitchPoint:
    """A switch to be measured, with `num_seqs` requests of `context` tokens."""

    source: Layout
    target: Layout
    num_seqs: int
    context: int


Point = StepPoint | SwitchPoint


# ---------------------------------------------------------------- the plan

START_SECONDS = 20.0
"""Budget of the profile that an engine takes at its start."""
START_OVERTIME_SECONDS = 40.0
"""Further time until enough of it is measured for it to be kept: the next start needs none."""
_START_PATIENCE_SECONDS = 0.3
"""Time after which a point is left at a start although its times still differ."""
_PRIORITIES = 6
"""Priorities that `_rows` and `_SWITCHES` name."""


@dataclass(frozen=True)
class Plan:
    """Points to measure, in this order.

    Attributes:
        essential: so many of the first points are measured however long they take.
        budget: seconds after which no other point is begun, `overtime` aside.
        overtime: further seconds for a profile that lacks points to be complete and still can be
            (`quality.becomes_complete`).
        patience: seconds after which a point need not settle.
    """

    limits: EngineLimits
    points: tuple[Point, ...]
    essential: int
    budget: float
    overtime: float
    patience: float

    @classmethod
    def of(cls, limits: EngineLimits, budget: float | None = None) -> Plan:
        """What is enough to choose layouts by.

        Args:
            budget: seconds, with more patience for each point the more they are; None: those of an
                engine's start.
        """
        points: dict[Point, None] = {}
        essential = 0
        for priority in range(_PRIORITIES):
            # There and back, so that two priorities meet in one layout.
            for layout in limits.layouts[:: -1 if priority % 2 else 1]:
                points.update(dict.fromkeys(_points(limits, layout, priority)))
            essential = essential or len(points)
        seconds = START_SECONDS if budget is None else budget
        overtime = START_OVERTIME_SECONDS if budget is None else 0.0
        patience = _START_PATIENCE_SECONDS * max(1.0, seconds / START_SECONDS)
        return cls(limits, (*points,), essential, seconds, overtime, patience)


class _Row(NamedTuple):
    """Steps to measure in a layout: every combination of what is listed.

    Attributes:
        batches: requests that decode; as many as can run at once, where that is fewer.
        context: of each, as a share of the longest that memory has room for; 0: the short context.
        busy: replicas; None: all.
    """

    priority: int
    batches: Sequence[int]
    context: Sequence[float] = (0,)
    busy: Sequence[int] | None = None
    prefill: Sequence[int] = (0,)
    k: Sequence[int] = (0,)


def _rows(limits: EngineLimits, layout: Layout) -> list[_Row]:
    every, share, most = layout.replicas, limits.share(layout), limits.most_requests(layout.tp)
    few, grid = min(8, share), (*_powers(most), most)
    tokens = limits.max_batch_tokens[layout.tp] - limits.draft_slots
    lengths = limits.draft_lengths
    # What other draft lengths lie between.
    telling = dict.fromkeys((*lengths[-1:], *lengths[(len(lengths) - 1) // 2 :][:1]))
    return [
        _Row(0, (1, few)),
        # A layout without any drafts would seem to verify them at the price of a prompt, or of
        # nothing.
        _Row(0, (few,), k=lengths[-1:]),
        _Row(1, (share,)),
        _Row(1, (1,), busy=(1,)),
        _Row(2, (1, share), k=(*telling,)),
        _Row(2, (few,), context=(1,) * limits.drafter_has_weights, k=lengths[-1:]),
        _Row(3, (32 // every, 32)),
        _Row(3, (0,), prefill=(min(512, tokens),)),
        _Row(3, (1, few, share), context=(1,)),
        _Row(4, (2, 4)),
        _Row(4, (1, 2, 4), busy=(1, every // 2)),
        _Row(5, (0,), prefill=(min(64, tokens),)),
        _Row(5, grid),
    ]


_SWITCHES = {
    1: ((0, False), (8, True)),
    4: ((1, True), (32, True)),
}
"""By priority: requests that are carried, and whether their contexts are long."""


def _points(limits: EngineLimits, layout: Layout, priority: int) -> Iterator[Point]:
    """Those of a layout that the engine can do."""
    for row in _rows(limits, layout):
        if row.priority == priority:
            yield from filter(limits.allows, _steps(limits, layout, row))
    for num_seqs, is_long in _SWITCHES.get(priority, ()):
        for target in limits.layouts:
            if target != layout:
                yield from _switch(limits, layout, target, num_seqs, is_long)


def _steps(limits: EngineLimits, layout: Layout, row: _Row) -> Iterator[StepPoint]:
    busy = (layout.replicas,) if row.busy is None else [n for n in row.busy if n]
    every = product(row.k, row.batches, row.context, busy, row.prefill)
    for k, batch, share, replicas, prefill in every:
        batch = min(batch, limits.most_requests(layout.tp, k))
        context = limits.short if batch else 0
        if share:
            context = int(share * limits.longest_context(layout.tp, batch, k))
            if context < 2 * limits.short:
                continue
        point = StepPoint(layout, batch, context, replicas, prefill, k, hits=k > 0)
        yield point
        if limits.misses and k and k == limits.draft_lengths[-1]:
            yield replace(point, hits=False)


def _switch(
    limits: EngineLimits, source: Layout, target: Layout, num_seqs: int, is_long: bool
) -> Iterator[SwitchPoint]:
    if not num_seqs:
        yield SwitchPoint(source, target, 0, 0)
        return
    # The request with the most blocks decides; a replica may get one more than its share.
    each = {end.tp: -(-num_seqs // end.replicas) for end in (source, target)}
    most = min(limits.longest_context(tp, count) for tp, count in each.items())
    context = max(limits.short, most // 2) if is_long else limits.short
    if context <= most and all(n <= limits.most_requests(tp) for tp, n in each.items()):
        yield SwitchPoint(source, target, num_seqs, context)


def _powers(most: int) -> list[int]:
    """1, 2, 4, ... up to `most`."""
    return [1 << k for k in range(most.bit_length())]


def estimate(
    point: Point, known: Sequence[StepSample], switches: Iterable[SwitchSample] = ()
) -> float:
    """Seconds that one step of a point, or its switch, may take: rather more than it will.

    Decode steps grow at most like the batch and the summed context, and do not get faster with
    more work, so each known step of the layout bounds the unknown one from above.
    """
    if isinstance(point, SwitchPoint):
        # Some steps make the requests known; the switch itself is a small part of it.
        return max((s.seconds for s in switches), default=_ASSUMED_STEP)
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
