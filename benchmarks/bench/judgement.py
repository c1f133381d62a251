"""Judgement of PAT's batches: by a clairvoyant, which switches lost time and which were missed.
Pure."""

from __future__ import annotations

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.bench.calibrated import CalibratedSimulator
from benchmarks.bench.runs import Run
from benchmarks.simulated.clairvoyant import clairvoyant
from pat_vllm.layout import Layout
from pat_vllm.predictor.policy import Policy
from pat_vllm.predictor.state import LiveState
from pat_vllm.reporting import DecisionReport, SwitchReport
from pat_vllm.simulator.traces import LengthTrace

MISSED_SHARE = 0.03
"""Of a batch's time; a switch that would have saved less is not called missed."""


@dataclass(frozen=True)
class Move:
    """A switch that was made: when, after how many ended responses, and where to."""

    at: float
    ended: int
    target: Layout


class ReplayMoves(Policy):
    """Makes given moves: after as many ended responses as then; but at the time where requests
    arrive over time, and as long after the move before where that was short, as after a probe."""

    def __init__(self, start: Layout, moves: Sequence[Move], by_time: bool) -> None:
        self.home = start
        self._moves = moves
        self._by_time = by_time
        self._ended = 0
        self._made: list[float] = []
        """When each move so far was made, on the simulator's clock."""

    def choose(self, state: LiveState) -> Layout:
        while len(self._made) < len(self._moves) and self._due(state.now):
            self._made.append(state.now)
        return self._moves[len(self._made) - 1].target if self._made else self.home

    def _due(self, now: float) -> bool:
        number = len(self._made)
        move = self._moves[number]
        if self._by_time:
            return now >= move.at
        if number:
            gap = move.at - self._moves[number - 1].at
            if gap < _SHORT_STAY:
                return now >= self._made[-1] + gap
        return self._ended >= move.ended

    def finished(self, now: float, num_output_tokens: int, complete: bool) -> None:
        self._ended += 1


_SHORT_STAY = 1.0
"""Seconds in which too few responses end to tell how long it was."""


def moves_of(run: Run) -> tuple[Move, ...]:
    """The moves of a run."""
    moves = []
    for switch in run.switches:
        at = switch.at - run.began
        ended = bisect.bisect_right(run.ends, at)
        moves.append(Move(at, ended, switch.target))
    return tuple(moves)


@dataclass(frozen=True)
class JudgedSwitch:
    """A fired decision: seconds it was to save, and seconds that it saved by the simulator with
    the true lengths; negative is lost. None for what was no attempt to save (a probe)."""

    why: str
    live: int
    source: str
    target: str
    predicted: float
    saved: float

    @property
    def false(self) -> bool:
        """Whether it was made to save time and lost some."""
        return self.why == "saving" and self.saved < 0


@dataclass(frozen=True)
class Judgement:
    """One PAT batch beside the clairvoyant's. Seconds are simulated but for `measured`.

    Attributes:
        measured: PAT's.
        replayed: PAT's switches, replayed.
        clairvoyant: of the best schedule that was found.
        schedule: that schedule.
        switches: fired decisions, oldest first.
        lost: by switches that were false positives.
        foregone: by switches that were not made, or late, where that is above 3% of the batch.
        probing: by probes, each with the way back that followed it.
    """

    repeat: int
    measured: float
    replayed: float
    clairvoyant: float
    schedule: str
    clairvoyant_switches: int
    switches: tuple[JudgedSwitch, ...]
    lost: float
    foregone: float
    probing: float = 0.0

    @property
    def false_positives(self) -> int:
        """Switches that were made to save time and lost some."""
        return sum(switch.false for switch in self.switches)

    @property
    def missed(self) -> bool:
        """Whether a switch that pays was not made, or late."""
        return self.foregone > 0

    @property
    def simulator_error(self) -> float:
        """Simulated over measured time of the PAT batch, less 1."""
        return self.replayed / self.measured - 1


def judge(trace: LengthTrace, run: Run, simulator: CalibratedSimulator) -> Judgement:
    """Compare a PAT run with the clairvoyant's schedule for its trace.

    A switch's saving is the time without it and those after it, less the time with all of them:
    what the policy predicted, which plans later switches along.
    """
    by_time = any(trace.arrivals)
    start = run.spans[0][0]
    moves = moves_of(run)

    def seconds(made: Sequence[Move]) -> float:
        return simulator.seconds(trace, ReplayMoves(start, made, by_time))

    replayed = seconds(moves)
    judged = []
    for index, switch in enumerate(run.switches):
        decision = _decision_of(switch, run.decisions)
        judged.append(
            JudgedSwitch(
                why=decision.why if decision else switch.reason,
                live=switch.num_seqs,
                source=str(switch.source),
                target=str(switch.target),
                predicted=decision.saving if decision else math.nan,
                saved=seconds(moves[:index]) - replayed,
            )
        )
    probing = 0.0
    for index, one in enumerate(judged):
        if one.why == "probe":
            back = index + 1 < len(judged) and judged[index + 1].target == one.source
            without = (*moves[:index], *moves[index + 1 + back :])
            probing += replayed - seconds(without)
    best = clairvoyant(trace, simulator.layouts, simulator.truth, simulator.profile)
    # What the clairvoyant did not find is no loss of PAT's.
    ideal = min(best.generation_seconds, replayed)
    lost = max([-one.saved for one in judged if one.false], default=0.0)
    foregone = replayed - ideal - lost - max(0.0, probing)
    ends = sorted(best.finished)
    wanted = [(0, best.timeline[0].layout)]
    wanted += [(bisect.bisect_right(ends, s.at), s.target) for s in best.switches_on_the_way]
    if foregone <= MISSED_SHARE * replayed or not _late(wanted, start, moves):
        foregone = 0.0
    return Judgement(
        repeat=run.repeat,
        measured=run.seconds,
        replayed=replayed,
        clairvoyant=ideal,
        schedule=" -> ".join(f"{one} after {ended}" for ended, one in wanted),
        clairvoyant_switches=len(wanted) - 1,
        switches=tuple(judged),
        lost=lost,
        foregone=foregone,
        probing=probing,
    )


def _late(wanted: Sequence[tuple[int, Layout]], start: Layout, moves: Sequence[Move]) -> bool:
    """Whether some layout of the clairvoyant's, each with the responses that had ended by then, was
    entered later by PAT, or never."""
    entered = [(0, start), *((move.ended, move.target) for move in moves)]
    position = 0
    for ended, layout in wanted:
        found = next((i for i in range(position, len(entered)) if entered[i][1] == layout), None)
        if found is None or entered[found][0] > ended:
            return True
        position = found
    return False


def _decision_of(
    switch: SwitchReport, decisions: Sequence[DecisionReport]
) -> DecisionReport | None:
    """The decision that led to a switch: the last fired one before it, with its target."""
    fired = [d for d in decisions if d.fired and d.at <= switch.at + 1e-3]
    if fired and fired[-1].target == switch.target:
        return fired[-1]
    return None
