"""Static layouts and PAT on the same batches. Pure.

All have the same responses, the same tokens that a drafter guesses and the same router.
"""

from __future__ import annotations

import math
import multiprocessing
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import numpy as np

from pat_vllm.advice.rollouts import Rollouts
from pat_vllm.layout import Layout
from pat_vllm.predictor.adaptive import AdaptivePolicy
from pat_vllm.predictor.draft_schedule import Schedule
from pat_vllm.predictor.policy import SchedulePolicy
from pat_vllm.profile import StepShape
from pat_vllm.simulator.accepted_drafts import AcceptedDraftTokens
from pat_vllm.simulator.simulate import simulate_batches
from pat_vllm.simulator.simulated_report import SimulatedReport
from pat_vllm.start.safe_path import starting_with_safe_path

PLAIN = "k = 0"
TUNED = "k by batch size"
"""vLLM's `num_speculative_tokens_per_batch_size`, set by somebody who knows steps and drafts."""

PLANNED = "k planned"
"""PAT's own choice, by layout and number of requests."""

OWN_WORK = 0.005
"""Part of a step that PAT's own work takes, which the simulator leaves out: 47 microseconds of one
of 10 ms on a CPU (docs/results.md)."""

_NEAR = 1.1
"""Static configurations within this of the best of their kind in the first batch are replayed in
all."""
_CONFIDENCE = 0.95
_MANY = 512
"""Steps whose mean time a tuned schedule knows."""


class Config(NamedTuple):
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
        name = f"static {self.layout}" if self.layout else "PAT"
        return f"{name}, {self.drafts}" + (", vLLM's own limits" if self.own_limits else "")


Results = Mapping[Config, Sequence[SimulatedReport]]
"""Of each configuration a report of each batch that counts, chain by chain."""


class Task(NamedTuple):
    """A chain of batches to replay; of a `screening` only the first that counts."""

    config: Config
    chain: int
    screening: bool = False


def replay(rollouts: Rollouts, processes: int = 1) -> Results:
    """Replay PAT and the static configurations that matter, all reported batches of each.

    Static configurations are compared in the first batch; those that come near the best of their
    kind (vLLM's own limits; without drafts; all) are replayed in every batch.

    Args:
        processes: processes among which the work is spread.

    Raises:
        ValueError: a response does not fit into a replica's memory.
    """
    layouts, chains = rollouts.static.layouts, range(len(rollouts.chains))
    ours = [Config(None)]
    own = [Config(layout, own_limits=True) for layout in layouts]
    plain = [Config(layout) for layout in layouts]
    static = list(plain)
    if len(rollouts.draft_lengths) > 1:
        ours.insert(0, Config(None, PLANNED))
        drafts = [*(f"k = {k}" for k in rollouts.draft_lengths[1:]), TUNED]
        static += [Config(*each) for each in product(layouts, drafts)]
    results: defaultdict[Config, list[SimulatedReport]] = defaultdict(list)
    first: dict[Config, float] = {}
    with _runner(rollouts, processes) as run:
        tasks = [Task(*each) for each in product(ours, chains)]
        screening = [Task(config, 0, screening=True) for config in (*static, *own)]
        for task, reports in run([*tasks, *screening]):
            if task.screening:
                first[task.config] = reports[0].generation_seconds
            else:
                results[task.config] += reports
        kinds = [own, plain, static]
        if rollouts.all_layouts:
            kinds += [
                [config for config in static if config.layout == layout] for layout in layouts
            ]
            kinds += [[config] for config in plain]
        near = dict.fromkeys(config for kind in kinds for config in _near(kind, first))
        for task, reports in run([Task(*each) for each in product(near, chains)]):
            results[task.config] += reports
    return dict(results)


def _near(configs: Sequence[Config], seconds: dict[Config, float]) -> list[Config]:
    most = _NEAR * min(seconds[config] for config in configs)
    return [config for config in configs if seconds[config] <= most]


def replay_chain(rollouts: Rollouts, task: Task) -> list[SimulatedReport]:
    """Replay a task: a report of each batch that counts."""
    config, (first, *batches) = task.config, rollouts.chains[task.chain]
    batches = batches[:1] if task.screening else batches
    if config.layout is None:
        pat = AdaptivePolicy(
            rollouts.profile,
            bound=max(batch.max_tokens for batch in batches),
            draft_lengths=(0,) if config.drafts == PLAIN else rollouts.draft_lengths,
            # The time that planning takes here is not the simulated engine's.
            timer=lambda: 0.0,
        )
        return simulate_batches((first, *batches), pat, rollouts.truth, rollouts.profile)[1:]
    engine = rollouts.with_own_limits if config.own_limits else rollouts.static
    policy = SchedulePolicy(config.layout, (), {config.layout: draft_schedule(rollouts, config)})
    return simulate_batches(batches, policy, rollouts.truth, engine)


def draft_schedule(rollouts: Rollouts, config: Config) -> Schedule:
    """Draft lengths of a static configuration, by batch size.

    A tuned one has those with least time per token, by somebody who knows how many drafts will be
    accepted, and the mean context of a token.
    """
    layout, batches, draft_lengths = config.layout, rollouts.batches, rollouts.draft_lengths
    assert layout is not None
    most = rollouts.static.max_num_seqs[layout.tp]
    if config.drafts != TUNED:
        return ((1, most, int(config.drafts.removeprefix("k = "))),)
    lengths = np.array([length for batch in batches for length in batch.lengths])
    prompts = np.array([tokens for batch in batches for tokens in batch.num_prompt_tokens])
    context = int((lengths * (prompts + lengths / 2)).sum() / lengths.sum())
    each = [
        AcceptedDraftTokens.of(batch).draft_yield(
            np.arange(len(batch)), np.zeros(len(batch), np.int64), draft_lengths
        )
        for batch in batches
    ]
    tokens = dict(
        zip(
            draft_lengths,
            np.mean([draft_yield.tokens for draft_yield in each], axis=0),
            strict=True,
        )
    )

    def best(batch: int) -> int:
        def per_token(k: int) -> float:
            shape = StepShape(
                batch, batch * context, context, busy=layout.replicas, drafts=batch * k, k=k
            )
            return rollouts.truth.step_seconds(layout, shape, 0.0, _MANY) / float(tokens[k])

        return min(draft_lengths, key=per_token)

    # vLLM's tables name few batch sizes, too: powers of two.
    bounds = [2**i for i in range(int(math.log2(most)) + 1)]
    ends = [*(bound * 2 - 1 for bound in bounds[:-1]), most]
    return tuple((first, last, best(first)) for first, last in zip(bounds, ends, strict=True))


# -------------------------------------------------------------------- processes

Run = Callable[[Sequence[Task]], Iterable[tuple[Task, list[SimulatedReport]]]]

_rollouts: Rollouts
"""Of a process of the pool."""


def _begin(rollouts: Rollouts) -> None:
    global _rollouts
    _rollouts = rollouts


def _replay_here(task: Task) -> list[SimulatedReport]:
    return replay_chain(_rollouts, task)


@contextmanager
def _runner(rollouts: Rollouts, processes: int) -> Iterator[Run]:
    """Replays tasks, the longest first; yields each with its reports, in the same order."""
    if processes == 1:
        yield lambda tasks: ((task, replay_chain(rollouts, task)) for task in tasks)
        return
    # Threads of this process (a progress bar's) must not be forked.
    context = multiprocessing.get_context("spawn")
    with (
        starting_with_safe_path(),
        ProcessPoolExecutor(processes, context, _begin, (rollouts,)) as pool,
    ):
        yield lambda tasks: zip(tasks, pool.map(_replay_here, tasks), strict=True)


# -------------------------------------------------------------------- over results


def seconds_of(reports: Iterable[SimulatedReport]) -> tuple[float, ...]:
    """Seconds of each batch."""
    return tuple(report.generation_seconds for report in reports)


def best(results: Results, configs: Iterable[Config]) -> Config:
    """The configuration that is fastest over all batches."""
    return min(configs, key=lambda config: sum(seconds_of(results[config])))


@dataclass(frozen=True)
class Gain:
    """Time that one configuration saves over another, as a fraction of the other's.

    Attributes:
        mean: by the geometric mean of the batches' ratios.
        low, high: its 95% interval (Student's t over the logarithms of the ratios); the mean where
            there is one batch.
        least, most: of single batches.
    """

    mean: float
    low: float
    high: float
    least: float
    most: float

    @property
    def reaches(self) -> float | None:
        """0 or `OWN_WORK` where the interval reaches it, so that nothing may be left of the gain;
        else None. Rounded as it is shown, to a tenth of a percent."""
        low = round(self.low, 3)
        return next((bar for bar in (0.0, OWN_WORK) if low <= bar), None)


def gain(ours: Sequence[float], theirs: Sequence[float]) -> Gain:
    """What `ours` save over `theirs`: seconds of the same batches."""
    from scipy.special import stdtrit  # `scipy.stats` takes half a second to import

    logs = np.log(np.array(ours) / np.array(theirs))
    mean, count, half = float(logs.mean()), len(logs), 0.0
    if count > 1:
        t = float(stdtrit(count - 1, (1 + _CONFIDENCE) / 2))
        half = t * float(logs.std(ddof=1)) / math.sqrt(count)
    shown = (mean, mean + half, mean - half, float(logs.max()), float(logs.min()))
    return Gain(*(-math.expm1(log) + 0.0 for log in shown))
