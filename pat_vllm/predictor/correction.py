"""Learns online by what factor real steps differ from the predicted ones. Pure Python.

The logarithm of real over predicted time is the sum of three parts: of the machine, of the
tensor-parallel size, and of the batch size there (piecewise linear over log2 of the batch). A
Kalman filter estimates them: each takes the share of a surprise that its uncertainty warrants. So a
slow machine also slows the layouts that were never observed, and a layout whose profile is wrong
does not spoil the others. Machine and sizes are estimated with their covariances: steps in another
layout may show that what was put down to the machine is that of one size. The batch parts, which
are small, are taken for independent.
"""

from __future__ import annotations

from math import exp, log, log2, sqrt
from typing import Any

LIMIT = log(8.0)
"""Corrections stay within a factor of 8 either way."""

VERSION_STEP = log(1.03)
"""Change of a correction from which on it counts as another."""

MEMORY = 50.0
"""Steps after which an observation has faded (to 1/e)."""

_BINS = 13
"""Batch sizes 1, 2, 4, ... 4096; larger ones count as the last."""

_MACHINE, _SIZE, _BIN = 0.6, 0.05, 0.015
"""Variances before the first observation: most of a surprise is the machine's."""

_LEAST = (0.75, 0.125, 0.125)
"""How the three parts share in what fades with each step."""

_SPREAD, _LEAST_SPREAD, _MOST_SPREAD = 0.1, 0.03, 0.4
"""Typical deviation of a step: at first, at least and at most; it is learned, too."""

_CLIP, _FAR = 1.5, 2.5
"""In spreads: how much of a surprise counts, and from where it is far."""

_STREAK = 4
"""So many far surprises in a row on one side are a change of the machine, not outliers."""

_HARDLY_SEEN = 12
"""Steps of a tensor-parallel size from which on it is known well enough to speak of the machine."""

_REOPEN = 4.0
"""Factor by which the uncertainty grows with each further one."""


class _SizeCorrection:
    """What is known of one tensor-parallel size: its batch parts and their variances."""

    def __init__(self) -> None:
        self.bins = [0.0] * _BINS
        self.variances = [_BIN] * _BINS
        self.counts = [0.0] * _BINS
        self.streak = 0
        """Far surprises in a row; negative when steps were faster than predicted."""


class OnlineCorrection:
    """The factors real / predicted, by tensor-parallel size and batch.

    Attributes:
        version: grows whenever a correction has changed by more than ~3 % since it last did.
        observed: steps observed.
    """

    def __init__(self) -> None:
        self.version = 0
        self.observed = 0
        self._spread = _SPREAD
        self._sizes: dict[int, _SizeCorrection] = {}
        # The machine's part comes first, then those of the sizes.
        self._index: dict[int, int] = {}
        self._values = [0.0]
        self._covariance = [[_MACHINE]]
        self._announced: tuple[float, dict[int, tuple[float, list[float]]]] = (0.0, {})

    def factor(self, tp: int, batch: float | None = None) -> float:
        """Real over predicted time; without a batch, as far as all batches of `tp` have it."""
        size = self._sizes.get(tp)
        total = self._common(tp)
        if size is not None and batch is not None:
            i, f = _position(batch)
            total += (1 - f) * size.bins[i] + f * size.bins[i + 1]
        return exp(min(max(total, -LIMIT), LIMIT))

    def _common(self, tp: int) -> float:
        """The machine's part and that of a size."""
        index = self._index.get(tp)
        return self._values[0] + (self._values[index] if index is not None else 0.0)

    def evidence(self, tp: int, batch: float) -> float:
        """Recent observations near this batch size, at most `MEMORY`; 0 where none was made."""
        size = self._sizes.get(tp)
        if size is None:
            return 0.0
        i, f = _position(batch)
        return (1 - f) * size.counts[i] + f * size.counts[i + 1]

    def observe(self, tp: int, batch: float, ratio: float) -> None:
        """Learn from a decode step that took `ratio` times what was predicted uncorrected."""
        size = self._sizes.get(tp)
        if size is None:
            size = self._add(tp)
        i, f = _position(batch)
        g = 1 - f
        bins, variances = size.bins, size.variances
        expected = self._common(tp) + g * bins[i] + f * bins[i + 1]
        surprise = min(max(log(ratio), -LIMIT), LIMIT) - expected
        distance = abs(surprise)

        spread = self._spread
        if distance > _FAR * spread:
            same = size.streak * surprise > 0
            size.streak = (size.streak if same else 0) + (1 if surprise > 0 else -1)
        else:
            size.streak = 0
        if abs(size.streak) >= _STREAK:
            self._reopen(tp, size, i, f)
            trust = 1.0
        else:
            trust = min(1.0, _CLIP * spread / distance) if distance > 0 else 1.0
            # Far surprises widen the spread only a little, for most of them are outliers.
            spread += (min(1.25 * distance, 2 * spread) - spread) / MEMORY
            self._spread = min(max(spread, _LEAST_SPREAD), _MOST_SPREAD)

        noise = self._spread * self._spread
        values, covariance, own = self._values, self._covariance, self._index[tp]
        column = [row[0] + row[own] for row in covariance]
        low, high = g * variances[i], f * variances[i + 1]
        total = column[0] + column[own] + low + high + noise
        step = trust * surprise / total
        keep = trust / total
        for j, (row, one) in enumerate(zip(covariance, column, strict=True)):
            values[j] += one * step
            for k, other in enumerate(column):
                row[k] -= keep * one * other
        bins[i] += low * step
        bins[i + 1] += high * step
        # What is known fades: a gain of 1 / MEMORY remains.
        share_machine, share_size, share_bin = _LEAST
        fades = noise / (MEMORY * MEMORY)
        covariance[0][0] += share_machine * fades
        covariance[own][own] += share_size * fades
        self._cap(0, _MACHINE)
        self._cap(own, _SIZE)
        floor = share_bin * noise / MEMORY
        variances[i] = max(variances[i] * (1 - g * low * keep), floor)
        variances[i + 1] = max(variances[i + 1] * (1 - f * high * keep), floor)

        counts = size.counts
        counts[i] += g * (1 - counts[i] / MEMORY)
        counts[i + 1] += f * (1 - counts[i + 1] / MEMORY)
        self.observed += 1
        self._announce(tp, size, i)

    def _add(self, tp: int) -> _SizeCorrection:
        size = self._sizes[tp] = _SizeCorrection()
        self._index[tp] = len(self._values)
        self._values.append(0.0)
        for row in self._covariance:
            row.append(0.0)
        self._covariance.append([0.0] * (len(self._values) - 1) + [_SIZE])
        return size

    def _reopen(self, tp: int, size: _SizeCorrection, i: int, f: float) -> None:
        """Forget part of what was learnt.

        Of a layout with few steps, the model is doubted. Otherwise the machine is doubted most,
        because a machine changes and a model's error does not.
        """
        variances, covariance, own = size.variances, self._covariance, self._index[tp]
        common = covariance[0][0] + 2 * covariance[0][own] + covariance[own][own]
        known = common + (1 - f) * variances[i] + f * variances[i + 1]
        # As uncertain as one step is noisy: the next step then counts for half.
        grow = min(_REOPEN, max(1.0, self._spread * self._spread / known))
        less = sqrt(grow)
        if sum(size.counts) < _HARDLY_SEEN:
            self._widen(own, less)
        else:
            self._widen(0, less)
            self._widen(own, sqrt(less))
        variances[i] = min(variances[i] * less, _BIN)
        variances[i + 1] = min(variances[i + 1] * less, _BIN)

    def _widen(self, index: int, factor: float) -> None:
        """Multiply the standard deviation of a part."""
        for k in range(len(self._covariance)):
            self._covariance[index][k] *= factor
            self._covariance[k][index] *= factor

    def _cap(self, index: int, most: float) -> None:
        variance = self._covariance[index][index]
        if variance > most:
            self._widen(index, sqrt(most / variance))

    def _announce(self, tp: int, size: _SizeCorrection, i: int) -> None:
        machine, sizes = self._announced
        value, bins = sizes.get(tp) or (0.0, [0.0] * _BINS)
        common = self._common(tp) - machine - value
        if (
            abs(self._values[0] - machine) > VERSION_STEP
            or abs(common + size.bins[i] - bins[i]) > VERSION_STEP
            or abs(common + size.bins[i + 1] - bins[i + 1]) > VERSION_STEP
        ):
            self.version += 1
            self._announced = (
                self._values[0],
                {
                    tp: (self._values[self._index[tp]], list(one.bins))
                    for tp, one in self._sizes.items()
                },
            )

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "spread": self._spread,
            "values": list(self._values),
            "covariance": [list(row) for row in self._covariance],
            "sizes": {str(tp): vars(size) for tp, size in self._sizes.items()},
        }

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> OnlineCorrection:
        """From what `to_json` gave; versions count from 0 again."""
        correction = cls()
        for tp, state in content["sizes"].items():
            size = correction._add(int(tp))
            for name, value in state.items():
                setattr(size, name, list(value) if isinstance(value, list) else value)
        correction._spread = content["spread"]
        correction._values = list(content["values"])
        correction._covariance = [list(row) for row in content["covariance"]]
        return correction


def _position(batch: float) -> tuple[int, float]:
    """The bin at or below a batch size, and the weight of the one above."""
    if batch <= 1:
        return 0, 0.0
    at = log2(batch)
    if at >= _BINS - 1:
        return _BINS - 2, 1.0
    i = int(at)
    return i, at - i
