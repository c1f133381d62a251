"""How well the length model knows how many responses will still be running.

Pure: synthetic lengths, no engine. Each live request gains a token per tick.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.simulator.traces import LengthTrace
from pat_vllm.predictor.length_model import LengthModel
from pat_vllm.predictor.state import Ints, LiveRequests
from tests.unit.predictor.examples import live_requests

_ALIVE = (0.75, 0.5, 0.25, 0.1)
"""Shares of a batch that are alive when its future is predicted."""
_FUTURES = 64
_POINTS = 60
"""Ticks of a predicted curve that are compared, evenly spaced."""


@dataclass(frozen=True)
class Calibration:
    """How good the predictions of a batch were, in the mean.

    Attributes:
        live_error: mean absolute error of the predicted live count, as a share of the batch.
        live_coverage: share of live counts within their 10-90% bands, limits included.
        coverage_80: share of remaining lengths within their central 80% bands.
    """

    live_error: float
    live_coverage: float
    coverage_80: float

    @classmethod
    def mean(cls, of: Sequence[Calibration]) -> Calibration:
        """Over batches, each with as many responses."""
        return cls(*np.mean([[*vars(calibration).values()] for calibration in of], axis=0))


def replay(batches: Sequence[LengthTrace]) -> list[Calibration]:
    """Of each batch, predicted at several moments by a model that has seen those before it."""
    model = LengthModel(max(batch.max_tokens for batch in batches))
    random = np.random.default_rng(0)
    calibrations = []
    for batch in batches:
        lengths = np.array(batch.lengths)
        order = np.argsort(lengths, kind="stable")
        finished, errors, inside, ranks = 0, [], [], []
        for alive in _ALIVE:
            tick = int(np.sort(lengths)[round((1 - alive) * len(lengths)) - 1])
            if not (lengths > tick).any():
                break
            while lengths[order[finished]] <= tick:
                tell(model, batch, int(order[finished]))
                finished += 1
            live = live_at(batch, tick)
            model.observe_running(live)
            remaining, actual = model.sample(live, _FUTURES), lengths[lengths > tick] - tick
            error, within = _live_counts(remaining, actual)
            errors.append(error / len(batch))
            inside.append(within)
            # Where the actual length lies among its futures, 0 to 1; ties are shared out evenly.
            below, equal = ((f(remaining, actual[:, None])).sum(1) for f in (np.less, np.equal))
            ranks.append((below + random.random(len(actual)) * (equal + 1)) / (_FUTURES + 1))
        for index in order[finished:]:
            tell(model, batch, int(index))
        model.end_of_batch()
        central = float((np.abs(np.concatenate(ranks) - 0.5) <= 0.4).mean())
        calibrations.append(Calibration(float(np.mean(errors)), float(np.mean(inside)), central))
    return calibrations


def _live_counts(remaining: Ints, actual: Ints) -> tuple[float, float]:
    """Mean error of the predicted number of live requests, and how often it is in its band."""
    end = max(int(actual.max()), int(np.quantile(remaining.max(axis=0), 0.9)))
    ahead = np.linspace(0, end, _POINTS + 1)[1:]
    counts = (remaining[:, :, None] > ahead).sum(axis=0)
    low, high = np.quantile(counts, (0.1, 0.9), axis=0)
    came = (actual[:, None] > ahead).sum(axis=0)
    within = (low <= came) & (came <= high)
    return float(np.abs(counts.mean(axis=0) - came).mean()), float(within.mean())


def tell(model: LengthModel, batch: LengthTrace, index: int) -> None:
    """Tell the model that this response finished."""
    length = batch.lengths[index]
    model.finished(length, length < batch.max_tokens)


def live_at(batch: LengthTrace, tick: int) -> LiveRequests:
    """The requests with more than `tick` tokens, with `tick` generated."""
    pairs = zip(batch.num_prompt_tokens, batch.lengths, strict=True)
    prompts = [prompt for prompt, length in pairs if length > tick]
    return live_requests(prompts, tick, batch.max_tokens)
