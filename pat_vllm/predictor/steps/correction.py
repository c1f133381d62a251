"""Learns online by what factor real steps differ from the predicted ones. Pure.

The logarithm of real over predicted time is the sum of four parts: of the machine, of the
layout, of the batch size there (piecewise linear over log2 of the batch), and of drafts, as far as
these make up a step. A Kalman filter estimates them: each takes the share of a surprise that its
uncertainty warrants. So a slow machine also slows the layouts that were never observed, a layout
whose profile is wrong does not spoil the others, and drafts that are dearer than in the profile do
not make steps without them seem slow. The parts are estimated with their covariances: steps in
another layout may show that what was put down to the machine is that of one layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log, log2, sqrt

import numpy as np
from numpy.typing import ArrayLike

from pat_vllm.layout import Layout
from pat_vllm.predictor.state import Floats

LIMIT = log(8.0)
"""Corrections stay within a factor of 8 either way."""
VERSION_STEP = log(1.03)
"""Change of a correction from which on it counts as another."""
MEMORY = 50.0
"""Steps after which an observation has faded (to 1/e)."""
_BINS = 13
"""Batch sizes 1, 2, 4, ... 4096; larger ones count as the last."""
_MACHINE, _LAYOUT, _BIN, _DRAFTS = 0.6, 0.07, 0.015, 0.03
"""Variances before the first observation: most of a surprise is the machine's. Also the most."""
_ALIKE = 4.0
"""Bins at which the correlation of two batch parts has fallen to 1/e: near batches err alike."""
_FADES = np.array([0.75, 0.125, 0.125, 0.125, 0.05])
"""How machine, layout, the two batch parts beside a step, and drafts, share in what fades."""
_SPREAD, _LEAST_SPREAD, _MOST_SPREAD = 0.1, 0.03, 0.4
"""Typical deviation of a step: at first, at least and at most; it is learned, too."""
_CLIP, _FAR = 1.5, 2.5
"""In spreads: how much of a surprise counts, and from where it is far."""
_STREAK = 8
"""So many far surprises in a row on one side are a change of the machine, not outliers."""
_REOPEN = 4.0
"""Factor by which the uncertainty grows with each further one."""


class OnlineCorrection:
    """The factors real / predicted, by layout and batch.

    Attributes:
        version: grows whenever a correction has changed by more than ~3 % since it last did.
    """

    def __init__(self, layouts: Iterable[Layout]) -> None:
        self.version = 0
        self._spread = _SPREAD
        # The machine's part comes first, then each layout's and those of its batch sizes, then
        # that of drafts.
        self._first = {layout: 1 + i * (1 + _BINS) for i, layout in enumerate(layouts)}
        variances = [_MACHINE, *([_LAYOUT, *[_BIN] * _BINS] * len(self._first)), _DRAFTS]
        self._drafts = len(variances) - 1
        self._most = np.array(variances)
        self._values = np.zeros(len(variances))
        self._covariance = np.diag(self._most)
        apart = np.abs(np.subtract.outer(np.arange(_BINS), np.arange(_BINS)))
        for first in self._first.values():
            bins = slice(first + 1, first + 1 + _BINS)
            self._covariance[bins, bins] = _BIN * np.exp(-apart / _ALIKE)
        self._announced = self._values.copy()
        self._seen: set[Layout] = set()
        # Far surprises in a row, by layout; negative when steps were faster than predicted.
        self._streak = dict.fromkeys(self._first, 0)

    def factor(self, layout: Layout, batch: ArrayLike, drafts: ArrayLike = 0.0) -> Floats:
        """Real over predicted time of steps, of which drafts add the share `drafts`: drafting, and
        verifying them."""
        first = self._first[layout]
        bins = self._values[first + 1 : first + 1 + _BINS]
        common = self._values[0] + self._values[first]
        total = common + np.interp(np.log2(np.maximum(batch, 1)), np.arange(_BINS), bins)
        total = total + np.asarray(drafts) * self._values[self._drafts]
        return np.asarray(np.exp(np.minimum(np.maximum(total, -LIMIT), LIMIT)))

    def _parts(self, layout: Layout, batch: float, drafts: float) -> tuple[list[int], Floats]:
        """Which parts a step shows, machine and layout first, and how much of each.

        That of drafts comes last, if it shows: what is known of it does not fade meanwhile.
        """
        position = min(log2(max(batch, 1)), _BINS - 1)
        i = min(int(position), _BINS - 2)
        above, first = position - i, self._first[layout]
        at, weights = [0, first, first + 1 + i, first + 2 + i], [1, 1, 1 - above, above]
        if drafts > 0:
            at, weights = [*at, self._drafts], [*weights, drafts]
        return at, np.array(weights)

    def _variance(self, at: list[int], weights: Floats) -> float:
        """Of a sum of parts."""
        return max(0.0, float(weights @ self._covariance[np.ix_(at, at)] @ weights))

    def observe(self, layout: Layout, batch: float, ratio: float, drafts: float = 0.0) -> float:
        """Learn from a decode step that took `ratio` times what was predicted uncorrected; `drafts`
        as for `factor`, which is returned as it was before."""
        at, weights = self._parts(layout, batch, drafts)
        values, covariance = self._values, self._covariance
        expected = float(weights @ values[at])
        surprise = min(max(log(ratio), -LIMIT), LIMIT) - expected
        distance = abs(surprise)

        spread, streak, trust = self._spread, self._streak, 1.0
        if distance > _FAR * spread:
            same = streak[layout] * surprise > 0
            streak[layout] = (streak[layout] if same else 0) + (1 if surprise > 0 else -1)
        else:
            streak[layout] = 0
        if abs(streak[layout]) >= _STREAK:
            # Part of what was learnt is forgotten, most of the machine: a model's errors do not
            # change. At most as uncertain as one step is noisy: the next then counts for half.
            known = self._variance(at, weights)
            more = min((_REOPEN - 1) * known, max(0.0, spread * spread - known))
            covariance[at, at] += _FADES[: len(at)] * more
        else:
            # More is believed of a layout that is hardly known, but not its very first step.
            doubt = self._variance(at[1:], weights[1:]) if layout in self._seen else 0.0
            believed = _CLIP * sqrt(spread * spread + doubt)
            trust = min(1.0, believed / distance) if distance > 0 else 1.0
            # Far surprises widen the spread only a little, for most of them are outliers.
            spread += (min(1.25 * distance, 2 * spread) - spread) / MEMORY
            self._spread = min(max(spread, _LEAST_SPREAD), _MOST_SPREAD)

        noise = self._spread * self._spread
        column = covariance[:, at] @ weights
        gain = column * (trust / (float(weights @ column[at]) + noise))
        values += gain * surprise
        covariance -= np.outer(gain, column)
        # What is known fades: a gain of 1 / MEMORY remains.
        covariance[at, at] += _FADES[: len(at)] * (noise / (MEMORY * MEMORY))
        for part in at:
            if covariance[part, part] > self._most[part]:
                less = sqrt(self._most[part] / covariance[part, part])
                covariance[part] *= less
                covariance[:, part] *= less
        self._seen.add(layout)

        changed = values[at] - self._announced[at]
        # What is common to all layouts, and the step that was seen.
        common = [changed[0], *(weights * changed)[4:], weights @ changed]
        if max(map(abs, common)) > VERSION_STEP:
            self.version += 1
            self._announced = values.copy()
        return exp(min(max(expected, -LIMIT), LIMIT))
