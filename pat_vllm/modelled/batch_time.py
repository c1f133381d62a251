"""Seconds of a batch in some layouts, modelled in a tenth of a second. Pure.

vLLM's order: the first requests run, as many as have room, and the others wait; where KV grows
beyond its memory, the last are preempted and computed again when they come back.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.modelled.roofline import Machine
from pat_vllm.predictor.state import Floats
from pat_vllm.simulator.accepted_drafts import acceptance_of_each
from pat_vllm.simulator.shapes import GENERATORS
from pat_vllm.simulator.traces import LengthTrace

USUAL_SEQS = 256
"""Requests of a rank that are expected at most; a larger `max_num_seqs` is vLLM's default on large
GPUs, and says little of the load."""
_MAX_TOKENS, _PROMPT = 16384, 256
_CHUNK = 8192
"""Prompt tokens of a step, as vLLM has by default."""
_STEPS = 64
"""Between two looks at who runs, at most; where requests end soon, an eighth."""
_LOOKS = 500
"""There are about so many looks at most: in long batches they are farther apart."""
_LEAVE = 32
"""One in so many running requests ends until the next look, about."""
_THRASH = 1.8
"""Preempted requests are computed again more often than is seen between looks, by so much; fitted
to batches that the simulator played by vLLM's rules. A test holds the two within 15 %."""


@dataclass(frozen=True)
class Load:
    """A batch that is expected.

    Attributes:
        responses: of all ranks.
        lengths: tokens of responses, some or all of them.
        num_prompt_tokens: of each.
        acceptance: mean probability that a draft token is accepted if those before it were.
            Responses are unlike each other, as the simulator has them.
        at_most: whether there may be fewer responses.
    """

    responses: int
    lengths: Sequence[int]
    num_prompt_tokens: int = _PROMPT
    acceptance: float = 0.5
    at_most: bool = False

    @classmethod
    def usual(cls, max_num_seqs: int, ranks: int, max_model_len: int) -> Load:
        """Where nothing is known: as many requests as `max_num_seqs` says for each rank."""
        responses = ranks * min(max_num_seqs, USUAL_SEQS)
        most = max(1, min(_MAX_TOKENS, max_model_len - _PROMPT))
        return replace(cls.of(GENERATORS["deepscaler"](responses, most, 0)), at_most=True)

    @classmethod
    def of(cls, trace: LengthTrace) -> Load:
        """As a batch was. A trajectory is taken for a response of all that follows its prompt."""
        ends = trace.trajectories
        prompt = round(float(np.mean([trace.num_prompt_tokens[first] for first in ends])))
        lengths = [trace.followed[last] for last in ends.values()]
        return cls(len(lengths), lengths, prompt, trace.acceptance)

    def smaller(self) -> list[Load]:
        """Where this is the most that may come: a half, and so on down to a sixteenth of it."""
        halves = (self.responses >> power for power in range(1, 5)) if self.at_most else ()
        return [replace(self, responses=half) for half in halves if half]

    @property
    def most_tokens(self) -> int:
        """What all hold when they hold the most, if none waits and all are equally fast."""
        lengths = np.sort(np.resize(np.asarray(self.lengths, np.int64), self.responses))
        live = np.arange(self.responses, 0, -1)
        return int((live * (self.num_prompt_tokens + lengths)).max(initial=0))

    def tokens_per_step(self, draft_lengths: Sequence[int]) -> Floats:
        """Of each response, float64 [draft lengths, responses]."""
        each = np.full(self.responses, self.acceptance)
        if 0 < self.acceptance < 1:
            random = np.random.default_rng(0)
            each = acceptance_of_each(random, self.acceptance, self.responses)
        reached = each ** np.arange(max(draft_lengths) + 1)[:, None]  # all before are accepted
        return reached.cumsum(axis=0)[list(draft_lengths)]  # type: ignore[no-any-return]


def batch_seconds(
    machine: Machine,
    layouts: Sequence[Layout],
    kv_tokens: Mapping[int, int],
    max_num_seqs: Mapping[int, int],
    load: Load,
    draft_lengths: Sequence[int] = (0,),
) -> float:
    """Seconds of a batch, in the layout that is fastest at each time, the first of `layouts` being
    the base layout.

    Replicas have equal shares of what runs.

    Args:
        kv_tokens, max_num_seqs: of a replica, by tp.
        draft_lengths: among which the fastest is taken.
    """
    rates = load.tokens_per_step(draft_lengths)
    left = np.resize(np.asarray(load.lengths, np.float64), load.responses)
    held = np.full(len(left), float(load.num_prompt_tokens))
    computed = np.zeros(len(left), bool)
    again = np.zeros(len(left), bool)
    here, seconds, apart = None, 0.0, float(_STEPS)
    while len(left):
        ends = np.cumsum(held + _STEPS // 2)  # as if in the middle of the next steps
        turns = {}
        for layout in layouts:
            room, most = kv_tokens[layout.tp], max_num_seqs[layout.tp]
            several = _turns(machine, layout, room, most, ends, left, rates, draft_lengths)
            turns[layout] = min(several, key=lambda turn: turn.token)
        best = min(layouts, key=lambda layout: turns[layout].token)
        if here is not None and best != here:
            saved = (turns[here].token - turns[best].token) * float(left.mean())
            live, tokens = int(computed.sum()), int(held[computed].sum())
            move = machine.switch(here, best, live, tokens, layouts[0]).seconds
            best, spent = (best, move) if saved > move else (here, 0.0)
            seconds += spent
        here, turn = best, turns[best]
        runs = np.arange(len(left)) < turn.running
        fresh = runs & ~computed
        prompts = float(held[fresh & ~again].sum() + _THRASH * held[fresh & again].sum())
        seconds += prompts / here.replicas / _CHUNK * machine.step(here, 0, 0, _CHUNK)
        needed = left / rates[turn.drafts]
        apart = max(apart, needed.sum() / turn.running / _LOOKS)
        steps = _steps(needed[: turn.running], apart)
        seconds += steps * turn.step
        computed, again = runs, again | runs
        new_tokens = np.where(runs, np.minimum(left, steps * rates[turn.drafts]), 0.0)
        left, held = left - new_tokens, held + new_tokens
        stays = left >= 0.5
        left, held, computed, again = left[stays], held[stays], computed[stays], again[stays]
        rates = rates[:, stays]
    return seconds


@dataclass(frozen=True)
class _Turn:
    """The next steps in a layout with a draft length.

    Attributes:
        drafts: index of the draft length.
        running: requests that run.
        step: seconds of a step.
        token: seconds until every request, also of those that wait, would have a token.
    """

    drafts: int
    running: int
    step: float
    token: float


def _turns(
    machine: Machine,
    layout: Layout,
    room: int,
    most: int,
    ends: Floats,
    left: Floats,
    rates: Floats,
    draft_lengths: Sequence[int],
) -> Iterator[_Turn]:
    """With each draft length.

    Args:
        room, most: tokens of KV and requests of a replica.
        ends: tokens of the KV of the first n requests, in all, are in `ends[n - 1]`.
        left: tokens that each request still generates.
        rates: tokens of each per step, [draft lengths, requests].
    """
    count = len(left)
    fit = int(np.searchsorted(ends, room * layout.replicas, side="right"))
    running = max(1, min(fit, most * layout.replicas, count))
    batch = -(-running // layout.replicas)
    context = ends[running - 1] / running
    for i, k in enumerate(draft_lengths):
        rate = rates[i, :running]
        step = machine.step(layout, batch, int(batch * context), 0, drafts=k * batch, k=k)
        if running < count:  # another takes the place of one that ends
            token = step / rate.mean() * count / running
        else:
            # How often a step's fixed part is paid is up to the request that ends last.
            fixed = min(step, machine.step(layout, 1, int(context), 0, drafts=k, k=k))
            last = rate[(left / rate).argmax()]
            token = fixed / last + (step - fixed) * float((1 / rate).mean())
        yield _Turn(i, running, step, token)


def _steps(needed: Floats, most: float) -> int:
    """Steps until the next look: few of those that run end before, and they not much."""
    soon = len(needed) // _LEAVE
    return max(1, int(np.clip(np.partition(needed, soon)[soon], most // 8, most)))
