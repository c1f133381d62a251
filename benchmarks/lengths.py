"""How far predicted response lengths are off, request by request, by what they are predicted from.

    python -m benchmarks.lengths

Pure: synthetic lengths, or a file of one's own (`--lengths`), no engine. Sources: nothing (PAT's
model in its first batch), earlier iterations (the same model after some batches), and siblings (the
other samples of a request's prompt). PAT does not use siblings; they are predicted from here by the
strongest model there is for how these lengths are made, so that what they could give is known.

An error is the logarithm of the actual over the predicted length. A wide lane beside narrow ones,
for requests predicted to be long, pays by simulation where the errors' standard deviation is below
about 0.3.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.bench.workloads import WORKLOADS
from benchmarks.calibration_plot import live_at, tell
from benchmarks.common import machine, table, write_results
from pat_vllm.predictor.lengths import LengthModel
from pat_vllm.predictor.state import Floats
from pat_vllm.simulator import traces
from pat_vllm.simulator.traces import LengthTrace

PAYS_BELOW = 0.3
"""Log-sd from which on mixed layouts gain nothing, by simulation."""

MOMENTS = {"before it starts": 1.0, "a quarter is live": 0.25}
"""Shares of a batch that are live when the rest is predicted."""

_FUTURES = 64
_SAMPLES = 8
"""Responses of a prompt."""
_MAX_TOKENS = 24_576
_NODES = 81
"""Of a prompt's part, in the integral over it."""
_POINTS = 400
_LEAST_WITHIN = 1e-3

Make = Callable[[int], LengthTrace]


def workloads() -> dict[str, Make]:
    """By name: makes a batch from a number. Those of `make bench`, and of the simulator."""
    made: dict[str, Make] = {
        f"bench: {name}": partial(_bench, name)
        for name, workload in WORKLOADS.items()
        if not workload.waits
    }
    made["DeepScaleR's shape"] = lambda number: traces.deepscaler(128, _MAX_TOKENS, number)
    for within in (0.6, 0.3, 0.15):
        made[f"8 samples of a prompt, {within} within"] = partial(_grpo, within)
    return made


def _bench(name: str, number: int) -> LengthTrace:
    return WORKLOADS[name].trace(number)


def _grpo(within: float, number: int) -> LengthTrace:
    """Prompts differ by a log-sd of 1, samples of one by `within`."""
    return traces.grpo(128 // _SAMPLES, _SAMPLES, within, 1.0, 1500, _MAX_TOKENS, number)


# -------------------------------------------------------------------- from PAT's model


def tick_of(batch: LengthTrace, share: float) -> int:
    """Tokens that each live request has generated when this share of the batch is live."""
    ended = round((1 - share) * len(batch))
    return sorted(batch.lengths)[ended - 1] if ended else 0


def model_errors(model: LengthModel, batch: LengthTrace) -> list[Floats]:
    """Errors at each of `MOMENTS`; the model has learnt the batch afterwards."""
    order = sorted(range(len(batch)), key=batch.lengths.__getitem__)
    lengths = np.array(batch.lengths)
    told, errors = 0, []
    for share in MOMENTS.values():
        tick = tick_of(batch, share)
        while told < len(order) and lengths[order[told]] <= tick:
            tell(model, batch, order[told])
            told += 1
        live = live_at(batch, tick)
        model.observe_running(live)
        predicted = tick + np.median(model.sample(live, _FUTURES), axis=1)
        errors.append(np.log(lengths[lengths > tick] / predicted))
    for index in order[told:]:
        tell(model, batch, index)
    model.end_of_batch()
    return errors


# -------------------------------------------------------------------- from siblings


@dataclass(frozen=True)
class PromptModel:
    """Log-normal lengths: a part that samples of one prompt share, and one of each sample.

    Attributes:
        mean: of the log-lengths.
        between, within: standard deviations of the two parts.
    """

    mean: float
    between: float
    within: float

    @classmethod
    def of(cls, batches: Sequence[LengthTrace]) -> PromptModel:
        """From batches with equally many samples of each prompt (analysis of variance)."""
        prompts = np.log([lengths for batch in batches for lengths in _by_prompt(batch).values()])
        samples = prompts.shape[1]
        within = float(prompts.var(axis=1, ddof=1).mean())
        between = float(prompts.mean(axis=1).var(ddof=1)) - within / samples
        return cls(
            float(prompts.mean()),
            math.sqrt(max(0.0, between)),
            max(_LEAST_WITHIN, math.sqrt(within)),
        )

    def median(self, ended: Sequence[int], running: int, tick: int, max_tokens: int) -> float:
        """Median length of a running sample.

        Args:
            ended: lengths of its siblings that have ended.
            running: samples of its prompt that still run, with `tick` tokens each, itself included.
        """
        nodes, survived, grid, above = _survival(self, tick, max_tokens)
        centre = self.mean + self.between * nodes
        distance = (np.log(np.array(ended, float))[:, None] - centre) / self.within
        log = -0.5 * nodes**2 - 0.5 * (distance**2).sum(axis=0)
        # Its own survival cancels out: P(longer than x, and than tick) over P(longer than tick).
        log = log + (running - 1) * survived
        weight = np.exp(log - log.max())
        below = 1 - above @ weight / (np.exp(survived) @ weight)
        return math.exp(float(np.interp(0.5, below, grid)))


@lru_cache(maxsize=8)
def _survival(
    model: PromptModel, tick: int, max_tokens: int
) -> tuple[Floats, Floats, Floats, Floats]:
    """What does not depend on the prompt.

    Returns:
        nodes: of a prompt's part, in standard deviations, float64 [nodes].
        survived: log-probability of a sample longer than `tick` at each node, float64 [nodes].
        grid: log-lengths from `tick` on, float64 [points].
        above: probability of a longer sample at each node, float64 [points, nodes].
    """
    from scipy.special import log_ndtr, ndtr

    nodes = np.linspace(-4.0, 4.0, _NODES)
    centre = model.mean + model.between * nodes
    survived = np.zeros(_NODES)
    if tick:
        survived = log_ndtr((centre - math.log(tick)) / model.within)
    grid = np.linspace(math.log(tick or 1), math.log(max_tokens), _POINTS)
    return nodes, survived, grid, ndtr((centre - grid[:, None]) / model.within)


def _by_prompt(batch: LengthTrace) -> dict[int, list[int]]:
    prompts: defaultdict[int, list[int]] = defaultdict(list)
    for group, length in zip(batch.groups, batch.lengths, strict=True):
        prompts[group].append(length)
    return prompts


def sibling_errors(model: PromptModel, batch: LengthTrace) -> list[Floats]:
    """Errors at each of `MOMENTS`.

    Before it starts a request's siblings are all known: it is the last one, or they are those of an
    earlier iteration with much the same weights. Later only those that have ended are.
    """
    errors = []
    for share in MOMENTS.values():
        tick = tick_of(batch, share)
        found = []
        for lengths in _by_prompt(batch).values():
            for at, length in enumerate(lengths):
                if length <= tick:
                    continue
                others = lengths[:at] + lengths[at + 1 :]
                ended = [other for other in others if other <= tick or not tick]
                running = 1 + len(others) - len(ended)
                predicted = model.median(ended, running, tick, batch.max_tokens)
                found.append(math.log(length / predicted))
        errors.append(np.array(found))
    return errors


# -------------------------------------------------------------------- the command


@dataclass(frozen=True)
class LengthError:
    """Of predicted lengths.

    Attributes:
        log_sd: standard deviation of the logarithm of actual over predicted length.
        factor: that by which lengths are longer than predicted (geometric mean).
    """

    log_sd: float
    factor: float

    @classmethod
    def of(cls, errors: Floats) -> LengthError:
        """Of at least two requests."""
        return cls(float(np.std(errors, ddof=1)), math.exp(float(np.mean(errors))))

    def show(self) -> str:
        """Like `0.62 (1.10x)`."""
        return f"{self.log_sd:.2f} ({self.factor:.2f}x)"


Errors = dict[str, dict[str, LengthError]]
"""By source and moment."""


def errors_of(make: Make, batches: int, runs: int, first: int = 0) -> Errors:
    """Errors in the last of `batches` iterations, and in a first one, pooled over runs."""
    pooled: defaultdict[str, list[list[Floats]]] = defaultdict(list)
    for run in range(runs):
        made = [make(first + run * batches + number) for number in range(batches)]
        *earlier, last = made
        model = LengthModel(max(batch.max_tokens for batch in made))
        pooled["none"].append(model_errors(model, earlier[0]))
        for batch in earlier[1:]:
            model_errors(model, batch)
        pooled["earlier iterations"].append(model_errors(model, last))
        if len(set(last.groups)) < len(last):
            pooled["siblings"].append(sibling_errors(PromptModel.of(earlier), last))
    return {
        source: {
            moment: LengthError.of(np.concatenate([one[at] for one in errors]))
            for at, moment in enumerate(MOMENTS)
        }
        for source, errors in pooled.items()
    }


def file_errors(trace: LengthTrace) -> Errors:
    """Errors for one's own rollouts: halves of their prompts take turns as earlier iteration."""
    prompts = sorted(set(trace.groups))
    halves = [
        _part(trace, {prompt for at, prompt in enumerate(prompts) if at % 2 == half})
        for half in (0, 1)
    ]
    return errors_of(lambda number: halves[(number + number // 2) % 2], batches=2, runs=2)


def _part(trace: LengthTrace, prompts: set[int]) -> LengthTrace:
    kept = [at for at, group in enumerate(trace.groups) if group in prompts]

    def of(values: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(values[at] for at in kept)

    return replace(
        trace,
        lengths=of(trace.lengths),
        arrivals=of(trace.arrivals),
        groups=of(trace.groups),
        num_prompt_tokens=of(trace.num_prompt_tokens),
    )


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=6, help="of a run")
    parser.add_argument("--runs", type=int, default=5, help="of each kind of lengths")
    parser.add_argument(
        "--lengths", type=Path, help="of your own: a trace file, as `pat-vllm advise --trace` takes"
    )
    args = parser.parse_args()
    if args.lengths is not None:
        trace = traces.load_trace(args.lengths)
        print(_table({trace.name: file_errors(trace)}))
        return
    if args.batches < 2:
        parser.error(f"--batches must be at least 2, got {args.batches}")

    found = {name: errors_of(make, args.batches, args.runs) for name, make in workloads().items()}
    text = (
        f"Simulated: synthetic lengths, {args.runs} runs of {args.batches} batches. Standard "
        "deviation, over requests, of the logarithm of actual over predicted length; in "
        "parentheses by what factor lengths were longer than predicted (geometric mean). `none` is "
        "a first batch, the other sources the last one. A response that was cut short counts as "
        "long as it was. `siblings`: before a request starts all others of its prompt are known; "
        "later those that have ended.\n\n"
    )
    write_results("lengths", machine(), {"log_sd": found}, text + _table(found) + _verdict(found))


def _table(found: dict[str, Errors]) -> str:
    sources = list(dict.fromkeys(source for errors in found.values() for source in errors))
    header = ["lengths", *(f"{moment}: {source}" for moment in MOMENTS for source in sources)]
    rows = [
        [
            name,
            *(
                errors[source][moment].show() if source in errors else "-"
                for moment in MOMENTS
                for source in sources
            ),
        ]
        for name, errors in found.items()
    ]
    return table(header, rows)


def _verdict(found: dict[str, Errors]) -> str:
    start = next(iter(MOMENTS))
    of_pat = {name: errors["earlier iterations"][start].log_sd for name, errors in found.items()}
    below = [name for name, log_sd in of_pat.items() if log_sd < PAYS_BELOW]
    return (
        f"\nBy simulation mixed layouts pay below about {PAYS_BELOW}. Predicted from earlier "
        f"iterations, {len(below)} of {len(of_pat)} kinds of lengths are below "
        f"({', '.join(below) or 'none'}); the median is {statistics.median(of_pat.values()):.2f}.\n"
    )


if __name__ == "__main__":
    main()
