"""What is compared: static layouts and PAT on the same batches. Pure.

All sides have the same responses, the same tokens that a drafter guesses and the same router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain as concatenated
from itertools import product

from pat_vllm.layout import Layout
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.policy import Policy, SchedulePolicy
from pat_vllm.profiling.profile import Profile
from pat_vllm.simulator.modelled.hardware import measured_noise
from pat_vllm.simulator.replay import simulate_batches
from pat_vllm.simulator.replica import ReplicaCapacity
from pat_vllm.simulator.run import SimulatedReport
from pat_vllm.simulator.traces import LengthTrace
from pat_vllm.simulator.truth import ReplayedTruth
from pat_vllm.simulator.tuned import DRAFT_LENGTHS, tuned_schedule
from pat_vllm.speculation import Schedule

PLAIN = "k = 0"
TUNED = "k by batch size"
"""vLLM's `num_speculative_tokens_per_batch_size`, set by somebody who knows steps and drafts."""

PLANNED = "k planned"
"""PAT's own choice, by layout and number of requests."""

_NEAR = 1.05
"""Static sides within this of the best of their kind in the first batch are replayed in all."""


@dataclass(frozen=True)
class Side:
    """One way to serve the batches.

    Attributes:
        layout: a static one; None: PAT.
        drafts: "k = 4" or `TUNED`, of PAT `PLANNED`; `PLAIN` of both.
        own_limits: whether every replica runs as many requests as one of the base layout, as vLLM
            has it; else concurrency is equal, as in PAT: a wider replica runs more.
    """

    layout: Layout | None
    drafts: str = PLAIN
    own_limits: bool = False

    def __str__(self) -> str:
        return f"static {self.layout}, {self.drafts}" if self.layout else f"PAT, {self.drafts}"


@dataclass(frozen=True)
class Task:
    """A side over a chain of batches, one after another with the same policy.

    Attributes:
        screening: whether only the first of those that are reported is replayed.
    """

    side: Side
    chain: int
    screening: bool = False


@dataclass(frozen=True)
class Rollouts:
    """What is asked about.

    Attributes:
        profile: of PAT's engine; modelled, or measured.
        chains: iterations' responses, some in a row. PAT learns from the first of a row, which is
            not reported. Each has the acceptance of the drafts.
        alone: of static engines, where these have other layouts and memory; with PAT's layouts
            among its own.
    """

    profile: Profile
    chains: tuple[tuple[LengthTrace, ...], ...]
    alone: Profile | None = None

    @property
    def static(self) -> Profile:
        """Of static engines."""
        return self.alone or self.profile

    @cached_property
    def batches(self) -> tuple[LengthTrace, ...]:
        """Those that are reported, row by row."""
        return tuple(batch for chain in self.chains for batch in chain[1:])

    @cached_property
    def draft_lengths(self) -> tuple[int, ...]:
        """Among which sides choose; 0 alone where no drafts are accepted."""
        if not self.batches[0].acceptance:
            return (0,)
        return tuple(sorted({0} | {s.k for s in self.profile.steps if s.k in DRAFT_LENGTHS}))

    @cached_property
    def truth(self) -> ReplayedTruth:
        """What steps and switches take."""
        measured = self.profile.kind == "measured"
        steps = self.static.model_copy(update={"switches": self.profile.switches})
        return ReplayedTruth(steps, self.profile if measured else measured_noise())

    @cached_property
    def with_own_limits(self) -> Profile:
        """The profile of static engines whose replicas all run what one of the base layout does."""
        base, sizes = self.static.layouts[0], [one.tp for one in self.static.layouts]
        limits = {
            name: dict.fromkeys(sizes, getattr(self.static, name)[base.tp])
            for name in ("max_num_seqs", "max_batch_tokens")
        }
        return self.static.model_copy(update=limits)

    def replay(self, task: Task) -> tuple[SimulatedReport, ...]:
        """The reported batches of a task.

        Raises:
            ValueError: a response does not fit into a replica's memory.
        """
        side, (first, *reported) = task.side, self.chains[task.chain]
        reported = reported[:1] if task.screening else reported
        if side.layout is None:
            lengths = (0,) if side.drafts == PLAIN else self.draft_lengths
            policy: Policy = AdaptivePolicy(
                self.profile,
                bound=max(batch.max_tokens for batch in reported),
                draft_lengths=lengths,
                # The time that planning takes here is not the simulated engine's.
                timer=lambda: 0.0,
            )
            capacity = ReplicaCapacity.of(self.profile)
            return tuple(simulate_batches((first, *reported), policy, self.truth, capacity)[1:])
        capacity = ReplicaCapacity.of(self.with_own_limits if side.own_limits else self.static)
        schedule = self.schedule(side.layout, side.drafts)
        policy = SchedulePolicy(side.layout, (), {side.layout: schedule})
        return tuple(simulate_batches(reported, policy, self.truth, capacity))

    def schedule(self, layout: Layout, drafts: str) -> Schedule:
        most = self.static.max_num_seqs[layout.tp]
        if drafts == TUNED:
            return tuned_schedule(self.truth, layout, most, self.batches, self.draft_lengths)
        return ((1, most, int(drafts.removeprefix("k = "))),)


def with_room(profile: Profile, tokens: int) -> Profile:
    """A profile without the layouts whose replicas cannot hold the KV of so many tokens; of the
    widest one at least."""
    *_, widest = profile.layouts
    room = {tp for tp, most in profile.kv_tokens.items() if most > tokens} | {widest.tp}
    left = [layout for layout in profile.layouts if layout.tp in room]
    return profile.model_copy(
        update={
            "layouts": tuple(left),
            "steps": tuple(s for s in profile.steps if s.layout in left),
            "switches": tuple(s for s in profile.switches if s.source in left and s.target in left),
        }
    )


Run = Callable[[Sequence[Task]], Iterable[tuple[SimulatedReport, ...]]]
"""Replays tasks, the longest first; yields their runs in the same order."""


@dataclass(frozen=True)
class Sides:
    """The sides that matter; a label of each names its layout and drafts.

    Attributes:
        own: the best static layout without drafts, with vLLM's own limits.
        plain: the best static layout without drafts, at equal concurrency.
        static: the best static layout with its best draft length, at equal concurrency.
        pat_plain: PAT without drafts.
        pat: PAT; the same as `pat_plain` where no drafts are accepted.
    """

    own: Replayed
    plain: Replayed
    static: Replayed
    pat_plain: Replayed
    pat: Replayed


@dataclass(frozen=True)
class Replayed:
    """A side, and what became of it in each reported batch."""

    side: Side
    runs: tuple[SimulatedReport, ...]

    @property
    def seconds(self) -> tuple[float, ...]:
        """Of each reported batch."""
        return tuple(run.seconds for run in self.runs)


def replay(rollouts: Rollouts, run: Run | None = None) -> Sides:
    """Replay the sides of rollouts.

    Static sides are compared in the first batch; those that come near the best of them are replayed
    in all.

    Args:
        run: in place of one task after another.

    Raises:
        ValueError: a response does not fit into a replica's memory.
    """
    run = run or (lambda tasks: map(rollouts.replay, tasks))
    layouts, chains = rollouts.static.layouts, range(len(rollouts.chains))
    pat, pat_plain = Side(None, PLANNED), Side(None)
    plain = [Side(layout) for layout in layouts]
    own = [Side(layout, own_limits=True) for layout in layouts]
    drafted = [
        Side(layout, drafts)
        for layout, drafts in product(
            layouts, (*(f"k = {k}" for k in rollouts.draft_lengths[1:]), TUNED)
        )
    ]
    if len(rollouts.draft_lengths) == 1:
        pat, drafted = pat_plain, []
    static = [*plain, *drafted]
    tasks = [Task(side, chain) for side in dict.fromkeys((pat, pat_plain)) for chain in chains]
    tasks += [Task(side, 0, screening=True) for side in (*static, *own)]
    runs = dict(zip(tasks, run(tasks), strict=True))

    def near(sides: Sequence[Side]) -> list[Side]:
        first = {side: runs[Task(side, 0, screening=True)][0].seconds for side in sides}
        return [side for side in sides if first[side] <= _NEAR * min(first.values())]

    left = [near(sides) for sides in (own, plain, static)]
    tasks = [Task(*each) for each in product(dict.fromkeys(concatenated(*left)), chains)]
    runs |= zip(tasks, run(tasks), strict=True)

    def whole(side: Side) -> Replayed:
        in_row = (one for chain in chains for one in runs[Task(side, chain)])
        return Replayed(side, tuple(in_row))

    def best(sides: Iterable[Side]) -> Replayed:
        return min(map(whole, sides), key=lambda one: sum(one.seconds))

    ours = whole(pat)
    ours_plain = ours if pat == pat_plain else whole(pat_plain)
    best_own, best_plain, best_static = map(best, left)
    return Sides(best_own, best_plain, best_static, ours_plain, ours)
