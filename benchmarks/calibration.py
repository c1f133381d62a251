"""How well the length model knows how many responses will still be running.

    python -m benchmarks.calibration

Pure: synthetic lengths, no engine. For each kind of lengths several runs of several batches; errors
and coverage of the live-request curves that the model predicts, for first batches and later ones.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import RESULTS, machine, table, write_results
from pat_vllm.predictor.lengths import LengthModel
from pat_vllm.predictor.state import Floats, Ints, LiveRequests
from pat_vllm.simulator import shapes
from pat_vllm.simulator.traces import LengthTrace

MAX_TOKENS = 24_576
KINDS: dict[str, Callable[[int], LengthTrace]] = {
    "deepscaler": lambda seed: shapes.deepscaler(128, MAX_TOKENS, seed),
    "log-normal": lambda seed: shapes.lognormal(128, 2000, 1.0, MAX_TOKENS, seed),
    "two modes": lambda seed: shapes.two_mode(128, max_tokens=MAX_TOKENS, seed=seed),
    "uniform": lambda seed: shapes.uniform(128, 1000, 8000, MAX_TOKENS, seed),
}

_ALIVE = (0.75, 0.5, 0.25, 0.1)
"""Shares of a batch that are alive when its future is predicted."""

_FUTURES = 64
_POINTS = 60
"""Ticks of a predicted curve that are compared, evenly spaced."""

NOMINAL = (0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
"""Nominal shares of the central bands whose coverage is counted."""

_COLOURS = ("#3b75af", "#519e3e", "#ef8636", "#c03d3e")
_ACTUAL = "#222222"


@dataclass(frozen=True)
class Prediction:
    """Live requests as predicted at one moment of a batch, and as they were.

    Attributes:
        batch: index of the batch.
        alive: share of it that was alive.
        tick: tokens that each live request had generated.
        ticks: the later ticks below, float64 [points].
        mean, low, high: predicted mean, 10% and 90% quantile, float64 [points].
        actual: what came, float64 [points].
        ranks: where the actual remaining length of each live request lies among its futures, 0 to
            1 (probability integral transform, ties and gaps shared out evenly), float64 [live].
    """

    batch: int
    alive: float
    tick: int
    ticks: Floats
    mean: Floats
    low: Floats
    high: Floats
    actual: Floats
    ranks: Floats


@dataclass(frozen=True)
class Calibration:
    """How good predictions were.

    Attributes:
        live_error: mean absolute error of the predicted live count, as a share of the batch.
        live_coverage: share of live counts within their 10-90% bands, limits included.
        coverage: share of remaining lengths within their central bands, for each of `NOMINAL`.
    """

    live_error: float
    live_coverage: float
    coverage: tuple[float, ...]

    @property
    def coverage_80(self) -> float:
        """Coverage of the central 80% bands of remaining lengths."""
        return self.coverage[NOMINAL.index(0.8)]


@dataclass(frozen=True)
class CalibrationResult:
    """Of the first batch, predicted from the prior only, and of the later ones (or None)."""

    first: Calibration
    later: Calibration | None


def replay(batches: Sequence[LengthTrace], model: LengthModel | None = None) -> list[Prediction]:
    """Predictions at several moments of each batch. Each live request gains a token per tick."""
    model = model or LengthModel(max(batch.max_tokens for batch in batches))
    random = np.random.default_rng(0)
    predictions = []
    for number, batch in enumerate(batches):
        lengths = np.array(batch.lengths)
        order = np.argsort(lengths, kind="stable")
        told = 0
        for alive in _ALIVE:
            tick = int(np.sort(lengths)[round((1 - alive) * len(lengths)) - 1])
            if not (lengths > tick).any():
                break
            while lengths[order[told]] <= tick:
                tell(model, batch, int(order[told]))
                told += 1
            live = live_at(batch, tick)
            model.observe_running(live)
            remaining = model.sample(live, _FUTURES)
            actual = lengths[lengths > tick] - tick
            predictions.append(_prediction(number, alive, tick, remaining, actual, random))
        for index in order[told:]:
            tell(model, batch, int(index))
        model.end_of_batch()
    return predictions


def tell(model: LengthModel, batch: LengthTrace, index: int) -> None:
    """Tell the model that this response finished."""
    length = batch.lengths[index]
    model.finished(length, length < batch.max_tokens)


def live_at(batch: LengthTrace, tick: int) -> LiveRequests:
    """The requests with more than `tick` tokens, with `tick` generated."""
    longer = np.array(batch.lengths) > tick
    count = int(longer.sum())
    prompt = np.array(batch.num_prompt_tokens, np.int64)[longer]
    return LiveRequests(
        num_prompt_tokens=prompt,
        num_output_tokens=np.full(count, tick, np.int64),
        max_tokens=np.full(count, batch.max_tokens, np.int64),
        exact=np.zeros(count, np.bool_),
        group=np.array(batch.groups, np.int64)[longer],
        number=np.flatnonzero(longer),
        replica_steps=np.zeros(count, np.int64),
        turn=np.zeros(count, np.int64),
        held=np.zeros(count, np.int64),
        num_computed_tokens=prompt + tick,
    )


def calibration(
    batches: Sequence[LengthTrace], predictions: Sequence[Prediction]
) -> CalibrationResult:
    """The errors of predictions for `batches`."""
    first = [prediction for prediction in predictions if prediction.batch == 0]
    later = [prediction for prediction in predictions if prediction.batch > 0]
    return CalibrationResult(
        _calibration(batches, first), _calibration(batches, later) if later else None
    )


def _calibration(batches: Sequence[LengthTrace], of: Sequence[Prediction]) -> Calibration:
    errors = [np.abs(one.mean - one.actual).mean() / len(batches[one.batch]) for one in of]
    inside = [((one.low <= one.actual) & (one.actual <= one.high)).mean() for one in of]
    ranks = np.concatenate([one.ranks for one in of])
    coverage = tuple(float((np.abs(ranks - 0.5) <= share / 2).mean()) for share in NOMINAL)
    return Calibration(float(np.mean(errors)), float(np.mean(inside)), coverage)


def _prediction(
    batch: int, alive: float, tick: int, remaining: Ints, actual: Ints, random: np.random.Generator
) -> Prediction:
    futures = remaining.shape[1]
    end = max(int(actual.max()), int(np.quantile(remaining.max(axis=0), 0.9)))
    ahead = np.linspace(0, end, _POINTS + 1)[1:]
    counts = (remaining[:, :, None] > ahead).sum(axis=0)
    low, high = np.quantile(counts, (0.1, 0.9), axis=0)
    below = (remaining < actual[:, None]).sum(axis=1)
    equal = (remaining == actual[:, None]).sum(axis=1)
    ranks = (below + random.random(len(actual)) * (equal + 1)) / (futures + 1)
    return Prediction(
        batch=batch,
        alive=alive,
        tick=tick,
        ticks=tick + ahead,
        mean=counts.mean(axis=0),
        low=low,
        high=high,
        actual=(actual[:, None] > ahead).sum(axis=0).astype(np.float64),
        ranks=ranks,
    )


def draw(
    batches: Sequence[LengthTrace],
    predictions: Sequence[Prediction],
    result: CalibrationResult,
    path: Path,
) -> None:
    """Save a picture of the predictions for the first and the last batch, and of coverage."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    last = len(batches) - 1
    shown = [0] if last == 0 else [0, last]
    figure = Figure(figsize=(4.4 * (len(shown) + 1), 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    *panels, square = figure.subplots(1, len(shown) + 1)
    for axes, number in zip(panels, shown, strict=True):
        known = "from the prior only" if number == 0 else f"after {number} earlier batches"
        axes.set_title(f"batch {number + 1}, {known}", fontsize=10, loc="left")
        _draw_batch(axes, batches[number], [one for one in predictions if one.batch == number])
    panels[0].set_ylabel("live requests")

    square.set_title("coverage of remaining lengths", fontsize=10, loc="left")
    square.plot([0, 1], [0, 1], color="#999999", linewidth=1, linestyle="--")
    for label, of, colour in (
        ("first batch", result.first, "#999999"),
        ("later batches", result.later, _COLOURS[0]),
    ):
        if of is not None:
            label += f": live count ±{of.live_error:.1%} of the batch"
            square.plot(NOMINAL, of.coverage, "o-", color=colour, markersize=4, label=label)
    square.set_xlabel("nominal share of the central band")
    square.set_ylabel("actual remaining lengths within it")
    square.set_xlim(0, 1)
    square.set_ylim(0, 1)
    square.set_aspect("equal")
    square.legend(loc="lower right", fontsize=8, frameon=False)
    for axes in (*panels, square):
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def _draw_batch(axes: Any, batch: LengthTrace, predictions: Sequence[Prediction]) -> None:
    lengths = np.sort(batch.lengths)
    end = lengths[-1] * 1.15
    for one, colour in zip(predictions, _COLOURS, strict=False):
        alive = int((lengths > one.tick).sum())
        ticks = np.append(one.tick, one.ticks)
        low, high, mean = (np.append(alive, each) for each in (one.low, one.high, one.mean))
        axes.fill_between(ticks, low, high, color=colour, alpha=0.2, linewidth=0)
        axes.plot(ticks, mean, color=colour, linewidth=1.5)
        axes.plot(one.tick, alive, "o", color=colour, label=f"predicted with {alive} live, 10-90%")
    axes.step(
        np.concatenate(([0], lengths)),
        len(lengths) - np.arange(len(lengths) + 1),
        where="post",
        color=_ACTUAL,
        linewidth=1.5,
        label="actual",
    )
    axes.set_xlim(0, end)
    axes.set_ylim(0, len(lengths) * 1.04)
    axes.set_xlabel("tokens generated")
    axes.legend(loc="upper right", fontsize=8, frameon=False)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=8, help="of a run")
    parser.add_argument("--runs", type=int, default=5, help="of each kind of lengths")
    parser.add_argument("--draw", choices=KINDS, help="save a picture of its last run")
    args = parser.parse_args()

    facts = machine()
    rows = []
    body: dict[str, Any] = {}
    for kind, make in KINDS.items():
        results = []
        for run in range(args.runs):
            batches = [make(1000 * run + number) for number in range(args.batches)]
            predictions = replay(batches)
            results.append(calibration(batches, predictions))
            if kind == args.draw:
                name = f"{facts['date'][:10]}-calibration-{kind.replace(' ', '-')}.png"
                draw(batches, predictions, results[-1], RESULTS / name)
        body[kind] = results
        rows.append([kind, *_cells(results)])
    header = ["lengths"]
    for part in ("first batch", "later batches"):
        header += [f"{part}: error", "live in band", "length in band"]
    text = (
        f"{args.runs} runs of {args.batches} batches of 128 responses, looked at when 75%, 50%, "
        "25% and 10% of a batch are live. Error: mean absolute difference of the predicted and the "
        "actual number of live responses, as a share of the batch. In band: how often the actual "
        "number of live responses, and the actual rest of a response, are within their predicted "
        "80% bands. Mean over runs (low-high).\n\n"
    )
    write_results("calibration", facts, body, text + table(header, rows))


def _cells(results: list[CalibrationResult]) -> list[str]:
    def show(values: list[float]) -> str:
        return f"{statistics.fmean(values):.1%} ({min(values):.1%}-{max(values):.1%})"

    cells = []
    for parts in ([one.first for one in results], [one.later for one in results if one.later]):
        cells.append(show([one.live_error for one in parts]))
        cells.append(show([one.live_coverage for one in parts]))
        cells.append(show([one.coverage_80 for one in parts]))
    return cells


if __name__ == "__main__":
    main()
