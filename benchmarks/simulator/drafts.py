"""Which tokens of simulated responses a drafter guesses. Pure.

What a drafter would propose at a token depends on the tokens before it, not on when or in how many
steps they were made. So the guesses belong to a trace, and every side of a comparison has the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence

import numpy as np

from benchmarks.simulator.traces import LengthTrace
from pat_vllm.predictor.acceptance import DraftYield
from pat_vllm.predictor.state import Floats, Ints

_ALIKE = 20.0
"""How alike the requests of a batch are: the sum of the parameters of a beta distribution, from
which the acceptance of each is drawn."""


class AcceptedDrafts:
    """The output tokens of all requests, one after another: guessed right by a drafter, or not."""

    def __init__(self, trace: LengthTrace) -> None:
        """Drawn from the trace's acceptance; the same for equal traces."""
        self._lengths = np.array(trace.lengths, np.int64)
        self._begins = self._lengths.cumsum() - self._lengths
        mean = trace.acceptance
        random = np.random.default_rng(zlib.crc32(repr((trace.lengths, mean)).encode()))
        self._acceptance: Floats = np.full(len(trace), mean)
        if 0 < mean < 1:
            self._acceptance = random.beta(_ALIKE * mean, _ALIKE * (1 - mean), len(trace))
        each = np.repeat(self._acceptance, self._lengths)
        self._guessed = random.random(len(each)) < each

    def accepted(self, requests: Ints, outputs: Ints, k: int) -> Ints:
        """Drafts of the next step that are accepted, of each request with so many output tokens;
        the step makes a token besides, which may be the response's last."""
        at = self._begins[requests] + outputs
        last = (self._begins + self._lengths - 1)[requests]
        ahead = at[:, None] + np.arange(k)
        right = self._guessed[np.minimum(ahead, last[:, None])] & (ahead < last[:, None])
        accepted: Ints = right.cumprod(axis=1).sum(axis=1)
        return accepted

    def draft_yield(self, requests: Ints, outputs: Ints, lengths: Sequence[int]) -> DraftYield:
        """What each draft length is expected to give requests for the rest of their responses."""
        left, each = self._lengths[requests] - outputs, self._acceptance[requests, None]
        per_step = [(each ** np.arange(k + 1)).sum(axis=1) for k in lengths]
        tokens = [left.sum() / (left / of_each).sum() for of_each in per_step]
        return DraftYield(np.array(lengths), np.array(tokens), np.array(lengths, np.float64))
