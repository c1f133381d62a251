"""What really happens in a simulated engine, whatever its policy believes. Pure."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Protocol

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.predictor.cost import CostModel, Number
from pat_vllm.predictor.state import Floats
from pat_vllm.profile import Profile, StepSample, StepShape

_GRAIN = math.log(2) / 16
"""Distance of the contexts, as logarithms, between which step times are linear."""

_STREAM = 4096
"""Draws that are made once; a chunk takes some that follow each other."""


class GroundTruth(Protocol):
    """Durations. They depend on the arguments only, so that a replay repeats them."""

    def step_seconds(self, layout: Layout, shape: StepShape, now: float, steps: int = 1) -> float:
        """Mean seconds of `steps` steps of one replica, of this shape in the mean, from `now` on.

        Noise is that of each of the steps, so the mean of many has little.
        """
        ...

    def switch_seconds(
        self, source: Layout, target: Layout, live: Number, tokens: Number
    ) -> Number:
        """Seconds of a switch that carries `live` requests with the KV of `tokens` tokens, or of
        several that carry some each."""
        ...


class ReplayedGroundTruth:
    """An engine whose steps are those that a profile measured, with their noise.

    No model that a policy fits is part of a step. The logarithm of the samples' seconds is
    interpolated over the logarithms of batch and mean context. Beyond the profiled contexts it is
    held; beyond the largest batch a step takes longer in proportion. How many replicas are busy
    multiplies that by what the samples of as many show. Each draft length has two such surfaces,
    with drafts for all requests and for none; between them times are linear in the drafts. A step
    with prompts adds their prefill to its decoding, less the reading of the weights, which both
    share.

    Each step then has a factor of its own, drawn from what repeats took relative to their median.
    Switches follow `CostModel`, which is a line through the profile's few switches; their noise is
    how far these are from it. KV is always migrated: recomputing some requests is not simulated.
    """

    def __init__(self, profile: Profile, noise: Profile | None = None, seed: int = 0) -> None:
        """Replay `profile`, with the noise of a measured one (None: without noise)."""
        self._decode: dict[Layout, _DecodeTimes] = {}
        self._drafts: dict[tuple[Layout, int], tuple[_DecodeTimes, _DecodeTimes]] = {}
        self._prefill: dict[Layout, _PrefillTimes] = {}
        for layout in profile.layouts:
            samples = [s for s in profile.steps if s.layout == layout]
            decodes = [s for s in samples if not s.prefill]
            self._decode[layout] = _DecodeTimes([s for s in decodes if not s.k and not s.drafts])
            for k in {s.k for s in decodes} - {0}:
                of_k = [s for s in decodes if s.k == k]
                self._drafts[layout, k] = (
                    _DecodeTimes([s for s in of_k if not s.drafts]),
                    _DecodeTimes([s for s in of_k if s.drafts]),
                )
            self._prefill[layout] = _PrefillTimes([s for s in samples if not s.batch])
        self._switches = CostModel("migrate").fit(profile)
        self._noise = _Noise(noise, seed) if noise is not None else None

    def step_seconds(self, layout: Layout, shape: StepShape, now: float, steps: int = 1) -> float:
        seconds = self.decode_seconds(layout, shape) if shape.batch else 0.0
        if tokens := shape.prefill:
            prefill = self._prefill[layout].seconds(tokens, shape.busy)
            seconds += prefill - min(seconds, prefill, self._decode[layout].shortest)
        if self._noise is not None:
            seconds *= self._noise.of_steps(layout, shape, steps)
        return seconds

    def decode_seconds(self, layout: Layout, shape: StepShape) -> float:
        """Of a step's decoding, without noise."""
        work = shape.batch, shape.context, shape.busy
        if not shape.k:
            return self._decode[layout].seconds(*work)
        try:
            none, full = self._drafts[layout, shape.k]
        except KeyError:
            raise ValueError(
                f"the profile has no steps of {layout} with draft length {shape.k}; profile them, "
                f"or replay one of {sorted(k for other, k in self._drafts if other == layout)}"
            ) from None
        least = none.seconds(*work)
        return least + (full.seconds(*work) - least) * shape.drafts / (shape.batch * shape.k)

    def switch_seconds(
        self, source: Layout, target: Layout, live: Number, tokens: Number
    ) -> Number:
        seconds = self._switches.seconds(source, target, live, tokens)
        if self._noise is None:
            return seconds
        return seconds * self._noise.of_switches(source, target, live, tokens)


class _DecodeTimes:
    """Seconds of decode steps of one layout.

    Those of the number of busy replicas with most samples are a surface over batch and context,
    those of the others a curve over batches, relative to it.
    """

    def __init__(self, samples: Sequence[StepSample]) -> None:
        from scipy.interpolate import RBFInterpolator

        by_busy: dict[int, dict[tuple[float, float], float]] = {}
        for s in samples:
            at = (math.log(s.batch), math.log(max(s.context / s.batch, 1.0)))
            by_busy.setdefault(s.busy, {})[at] = math.log(s.seconds)
        most = max(by_busy, key=lambda busy: (len(by_busy[busy]), busy))
        points, values = np.array(list(by_busy[most])), np.array(list(by_busy[most].values()))
        self._most = float(points[:, 0].max())
        self._first = float(points[:, 1].min())
        last = float(points[:, 1].max())
        self._contexts = np.minimum(np.arange(self._first, last + _GRAIN, _GRAIN), last)
        plane = np.column_stack((np.ones(len(points)), points))
        degree = 1 if np.linalg.matrix_rank(plane) == 3 else 0
        self._surface = RBFInterpolator(points, values, kernel="linear", degree=degree)
        self._busy = sorted(by_busy)
        self._curves = [self._relative(by_busy[busy]) for busy in self._busy]
        self._rows: dict[int, list[float]] = {}
        self._factors: dict[tuple[int, int], float] = {}
        self.shortest = math.exp(values.min())

    def seconds(self, batch: int, context: int, busy: int) -> float:
        row = self._rows.get(batch)
        if row is None:
            row = self._rows[batch] = self._row(batch)
        factor = self._factors.get((batch, busy))
        if factor is None:
            factor = self._factors[batch, busy] = self._factor(batch, busy)
        at = (math.log(max(context / batch, 1.0)) - self._first) / _GRAIN
        if at <= 0:
            return factor * row[0]
        below = int(at)
        if below >= len(row) - 1:
            return factor * row[-1]
        return factor * (row[below] + (at - below) * (row[below + 1] - row[below]))

    def _row(self, batch: int) -> list[float]:
        """Seconds at this batch and each of the contexts."""
        at = min(math.log(batch), self._most)
        logs = self._surface(np.column_stack((np.full(len(self._contexts), at), self._contexts)))
        return (np.exp(logs) * (batch / math.exp(at))).tolist()  # type: ignore[no-any-return]

    def _relative(self, times: Mapping[tuple[float, float], float]) -> tuple[Floats, Floats]:
        """Log-batches, and by how much the logarithms there exceed the surface's in the mean."""
        points = np.array(list(times))
        excess = np.array(list(times.values())) - self._surface(points)
        batches, member = np.unique(points[:, 0], return_inverse=True)
        return batches, np.bincount(member, excess) / np.bincount(member)

    def _factor(self, batch: int, busy: int) -> float:
        logs = [np.interp(math.log(batch), *curve) for curve in self._curves]
        return math.exp(np.interp(busy, self._busy, logs))


class _PrefillTimes:
    """Seconds of steps of one layout that compute prompts."""

    def __init__(self, samples: Sequence[StepSample]) -> None:
        self._by_busy: dict[int, list[tuple[int, float]]] = {}
        for s in sorted(samples, key=lambda s: s.prefill):
            self._by_busy.setdefault(s.busy, []).append((s.prefill, s.seconds))

    def seconds(self, tokens: int, busy: int) -> float:
        """Beyond the profiled sizes in proportion; 0 where none was profiled."""
        if not self._by_busy:
            return 0.0
        curve = self._by_busy[min(self._by_busy, key=lambda profiled: abs(profiled - busy))]
        sizes, seconds = zip(*curve, strict=True)
        return float(np.interp(tokens, sizes, seconds)) * max(1.0, tokens / sizes[-1])


class _Noise:
    """Factors of steps and switches, bootstrapped from a profile.

    Those of steps are drawn from the repeats of all layouts and batches: one slow repeat of three
    would else make all steps of a batch size slower in the mean than those of the next size, and
    one layout slower than another.
    """

    def __init__(self, profile: Profile, seed: int) -> None:
        self._seed = seed
        ratios = [
            time / s.seconds
            for s in profile.steps
            if s.batch and not s.prefill
            for time in s.times or (s.seconds,)
        ]
        draws = np.random.default_rng(seed).choice(ratios, _STREAM)
        self._sums: list[float] = [0.0, *draws.cumsum().tolist()]
        costs = CostModel("migrate").fit(profile)
        self._of_switches = [1.0]
        for switch in profile.switches:
            expected = float(
                costs.seconds(switch.source, switch.target, switch.num_seqs, switch.tokens)
            )
            if expected > 0:
                self._of_switches.append(switch.seconds / expected)

    def of_steps(self, layout: Layout, shape: StepShape, steps: int) -> float:
        """Mean of `steps` draws; the same for the same step."""
        sums = self._sums
        numbers = shape.batch, shape.context, shape.longest, shape.prefill
        text = " ".join(map(str, (self._seed, layout.tp, *numbers)))
        first = zlib.crc32(text.encode()) % (_STREAM - steps)
        return (sums[first + steps] - sums[first]) / steps

    def of_switches(self, source: Layout, target: Layout, live: Number, tokens: Number) -> Number:
        """A draw for each; the same for the same switch."""
        pair = zlib.crc32(f"{self._seed} {source} {target} ".encode())

        def draw(live: float, tokens: float) -> float:
            digest = zlib.crc32(f"{live} {tokens}".encode(), pair)
            return self._of_switches[digest % len(self._of_switches)]

        if isinstance(live, np.ndarray):
            return np.array(list(map(draw, live.tolist(), tokens.tolist())))
        return draw(live, tokens)
