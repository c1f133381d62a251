"""What simulated comparisons share: settings, replays of their batches, processes and the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, Generic, Self, TypeVar

from benchmarks.common import machine, table, write_results
from pat_vllm.layout import Layout
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.policy import Policy, StayPolicy
from pat_vllm.profiling.profile import Profile
from pat_vllm.simulator.modelled.hardware import modelled_profile
from pat_vllm.simulator.replay import simulate_batches
from pat_vllm.simulator.replica import ReplicaCapacity
from pat_vllm.simulator.run import SimulatedReport
from pat_vllm.simulator.shapes import generator
from pat_vllm.simulator.traces import LengthTrace
from pat_vllm.simulator.truth import Truth

S = TypeVar("S")
R = TypeVar("R")


@dataclass(frozen=True)
class Setting:
    """Batches of synthetic responses on modelled GPUs.

    Attributes:
        requests: of a batch.
        max_tokens: of the longest response.
        acceptance: share of the draft tokens that are accepted, in the mean over requests.
        drafting: seconds that the drafter adds to a step.
        workload: of `pat_vllm.simulator.shapes`.
        wrong: what the predictor is wrong about: "" nothing; "steps x 2" or "steps / 2", those of
            the widest layout in its profile; "acceptance x 2" or "acceptance / 2", that of the
            batch from which it has learnt.
        skew: Zipf exponent of the popularity of a mixture's experts.
    """

    gpu: str = "H100"
    model: str = "llama-3.1-8b"
    requests: int = 1024
    max_tokens: int = 16384
    acceptance: float = 0.0
    drafting: float = 0.0
    workload: str = "deepscaler"
    wrong: str = ""
    skew: float = 0.0
    ranks: int = 8

    def profile(self, **options: Any) -> Profile:
        """Modelled: of PAT's engine, or of static ones with `static=True`."""
        return modelled_profile(
            self.model, self.gpu, self.ranks, drafting=self.drafting, skew=self.skew, **options
        )

    def batches(self, count: int) -> Batches:
        """So many batches, and one before from which policies learn."""
        make = generator(self.workload)
        batches = [
            replace(make(self.requests, self.max_tokens, seed), acceptance=self.acceptance)
            for seed in range(count + 1)
        ]
        if self.wrong.startswith("acceptance"):
            learnt = min(1.0, self.acceptance * _factor(self.wrong))
            batches[-1] = replace(batches[-1], acceptance=learnt)
        return Batches(batches[-1], tuple(batches[:-1]))

    def believed(self, profile: Profile) -> Profile:
        """The profile that the predictor is given."""
        if not self.wrong.startswith("steps"):
            return profile
        return scaled_steps(profile, profile.layouts[-1], _factor(self.wrong))


def _factor(wrong: str) -> float:
    return 2.0 if wrong.endswith("x 2") else 0.5


def scaled_steps(profile: Profile, layout: Layout, factor: float) -> Profile:
    """A profile in which the steps of a layout take `factor` times as long."""
    steps = tuple(
        s.model_copy(
            update={name: factor * getattr(s, name) for name in ("seconds", "low", "high")}
        )
        if s.layout == layout
        else s
        for s in profile.steps
    )
    return profile.model_copy(update={"steps": steps})


@dataclass(frozen=True)
class Replayed:
    """A policy over the batches of a setting."""

    label: str
    runs: tuple[SimulatedReport, ...]

    @property
    def seconds(self) -> float:
        """Of all batches."""
        return sum(run.seconds for run in self.runs)

    @property
    def path(self) -> str:
        """Layouts of the last batch, each with the live requests at which it was entered."""
        last = self.runs[-1]
        entered = (f"{switch.target}@{switch.num_seqs}" for switch in last.switches_on_the_way)
        return " ".join([str(last.timeline[0].layout), *entered])


@dataclass(frozen=True)
class Batches:
    """The batches that are reported, and the one before them."""

    learnt: LengthTrace
    reported: tuple[LengthTrace, ...]

    def replay(self, label: str, policy: Policy, truth: Truth, profile: Profile) -> Replayed:
        """The batches under a policy, on an engine with the memory of `profile`."""
        capacity = ReplicaCapacity.of(profile)
        _, *runs = simulate_batches((self.learnt, *self.reported), policy, truth, capacity)
        return Replayed(label, tuple(runs))

    def replay_static(self, truth: Truth, profile: Profile) -> dict[Layout, Replayed]:
        """The batches in every layout of `profile`."""
        return {
            layout: self.replay(str(layout), StayPolicy(layout), truth, profile)
            for layout in profile.layouts
        }

    def adaptive(self, profile: Profile, draft_lengths: Sequence[int] = (0,)) -> AdaptivePolicy:
        """PAT's default policy, which believes `profile` and has seen no length yet."""
        # The time that planning takes here is not the simulated engine's.
        return AdaptivePolicy(
            profile,
            bound=self.learnt.max_tokens,
            draft_lengths=draft_lengths,
            timer=lambda: 0.0,
        )


def fastest(results: Sequence[Replayed]) -> Replayed:
    """The one with the least time over all batches."""
    return min(results, key=lambda result: result.seconds)


def least_of_each(results: Sequence[Replayed]) -> list[float]:
    """The least time of each batch, under whichever policy."""
    return [
        min(run.seconds for run in runs) for runs in zip(*(r.runs for r in results), strict=True)
    ]


class Processes:
    """Processes among which work is spread; with one, this process does it."""

    def __init__(self, count: int) -> None:
        self._stack = ExitStack()
        self._pool = self._stack.enter_context(ProcessPoolExecutor(count)) if count > 1 else None

    def map(self, work: Callable[[S], R], items: Sequence[S], chunk: int = 1) -> Iterator[R]:
        """What `work` makes of each item, in their order."""
        if self._pool is None:
            return map(work, items)
        return self._pool.map(work, items, chunksize=chunk)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


@dataclass(frozen=True)
class Comparison(Generic[S, R]):
    """A table with a row for each setting.

    Attributes:
        name: of the file.
        text: above the table.
        run: replays a setting.
        row: cells.
        closing: below the table.
    """

    name: str
    text: str
    headers: Sequence[str]
    run: Callable[[S], R]
    row: Callable[[S, R], Sequence[str]]
    closing: Callable[[Sequence[tuple[S, R]]], str] = lambda results: ""

    def make(self, settings: Sequence[S], processes: int = 1, write: bool = False) -> str:
        """Replay the settings, and print each row at once.

        Args:
            write: the table to `benchmarks/results`.

        Returns:
            Markdown.
        """
        facts, results = machine(), []
        with Processes(processes) as pool:
            for setting, result in zip(settings, pool.map(self.run, settings), strict=True):
                results.append((setting, result))
                print(" | ".join(self.row(setting, result)), flush=True)
        rows = [self.row(*result) for result in results]
        text = f"{self.text}\n\n{table(self.headers, rows)}\n{self.closing(results)}\n"
        if write:
            write_results(self.name, facts, {"results": results}, text)
        return text
