"""What steps and switches of a simulated engine take, whatever its policy believes. Pure."""

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


class GroundTruth(Protocol):
    """Durations. They depend on the arguments only, so that a replay repeats them."""

    def step_seconds(self, layout: Layout, shape: StepShape, now: float) -> float:
        """Seconds of a step of one replica, which begins `now`."""
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
    Switches follow `CostModel`, which is a line through the profile's few switches.
    """

    def __init__(self, profile: Profile, noise: Profile | None = None, seed: int = 0) -> None:
        """Replay `profile`, with the noise of a measured one (None: without noise)."""
        self._decode: dict[tuple[Layout, int, bool], _DecodeTimes] = {}
        self._prefill: dict[Layout, _PrefillTimes] = {}
        for layout in profile.layouts:
            samples = [s for s in profile.steps if s.layout == layout]
            decodes = [s for s in samples if not s.prefill]
            for k, drafts in {(s.k, s.drafts > 0) for s in decodes}:
                of_k = [s for s in decodes if (s.k, s.drafts > 0) == (k, drafts)]
                self._decode[layout, k, drafts] = _DecodeTimes(of_k)
            self._prefill[layout] = _PrefillTimes([s for s in samples if not s.batch])
        self._switches = CostModel("migrate").fit(profile)
        self._seed = seed
        self._factors = [
            time / s.seconds
            for s in (noise.steps if noise else ())
            if s.batch and not s.prefill
            for time in s.times or (s.seconds,)
        ]

    def step_seconds(self, layout: Layout, shape: StepShape, now: float) -> float:
        seconds = self._decode_seconds(layout, shape) if shape.batch else 0.0
        if shape.prefill:
            prefill = self._prefill[layout].seconds(shape.prefill, shape.busy)
            seconds += prefill - min(seconds, prefill, self._decode[layout, 0, False].shortest)
        if self._factors:
            # Of all layouts and batches: one slow repeat of three would else make all steps of a
            # batch size slower in the mean than those of the next size.
            digest = zlib.crc32(f"{self._seed} {layout.tp} {shape}".encode())
            seconds *= self._factors[digest % len(self._factors)]
        return seconds

    def _decode_seconds(self, layout: Layout, shape: StepShape) -> float:
        work = shape.batch, shape.context, shape.busy
        least = self._decode[layout, shape.k, False].seconds(*work)
        if not shape.k:
            return least
        full = self._decode[layout, shape.k, True].seconds(*work)
        return least + (full - least) * shape.drafts / (shape.batch * shape.k)

    def switch_seconds(
        self, source: Layout, target: Layout, live: Number, tokens: Number
    ) -> Number:
        return self._switches.seconds(source, target, live, tokens)


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
        self._first, last = float(points[:, 1].min()), float(points[:, 1].max())
        self._contexts = np.minimum(np.arange(self._first, last + _GRAIN, _GRAIN), last)
        plane = np.column_stack((np.ones(len(points)), points))
        degree = 1 if np.linalg.matrix_rank(plane) == 3 else 0
        self._surface = RBFInterpolator(points, values, kernel="linear", degree=degree)
        self._busy = sorted(by_busy)
        self._curves = [self._relative(by_busy[busy]) for busy in self._busy]
        self._rows: dict[tuple[int, int], list[float]] = {}
        self.shortest = math.exp(values.min())

    def seconds(self, batch: int, context: int, busy: int) -> float:
        row = self._rows.get((batch, busy))
        if row is None:
            row = self._rows[batch, busy] = self._row(batch, busy)
        at = (math.log(max(context / batch, 1.0)) - self._first) / _GRAIN
        below = min(max(0, int(at)), len(row) - 1)
        if at <= 0 or below == len(row) - 1:
            return row[below]
        return row[below] + (at - below) * (row[below + 1] - row[below])

    def _row(self, batch: int, busy: int) -> list[float]:
        """Seconds at this batch and each of the contexts."""
        at = min(math.log(batch), self._most)
        logs = self._surface(np.column_stack((np.full(len(self._contexts), at), self._contexts)))
        excess = np.interp(busy, self._busy, [np.interp(math.log(batch), *c) for c in self._curves])
        return (np.exp(logs + excess) * (batch / math.exp(at))).tolist()  # type: ignore[no-any-return]

    def _relative(self, times: Mapping[tuple[float, float], float]) -> tuple[Floats, Floats]:
        """Log-batches, and by how much the logarithms there exceed the surface's in the mean."""
        points = np.array(list(times))
        excess = np.array(list(times.values())) - self._surface(points)
        batches, member = np.unique(points[:, 0], return_inverse=True)
        return batches, np.bincount(member, excess) / np.bincount(member)


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
