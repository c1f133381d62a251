"""Which tokens of simulated responses a drafter guesses, and so how many steps they take. Pure.

What a drafter would propose at a token depends on the tokens before it, not on when or in how many
steps they were made. So the guesses belong to a trace, and every side of a comparison has the same.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from pat_vllm.predictor.acceptance import DraftYield
from pat_vllm.predictor.state import Floats, Ints
from pat_vllm.simulator.traces import LengthTrace

_ALIKE = 20.0
"""How alike the requests of a batch are: the sum of the parameters of a beta distribution, from
which the acceptance of each is drawn."""


@dataclass(frozen=True)
class _StepTable:
    """The steps with one draft length.

    Attributes:
        before: steps before each run of tokens, over all requests, int64 [runs].
        tokens: tokens before each step, likewise, and before none, int64 [steps + 1].
        first, last: steps before each request, and before the next one, int64 [requests].
    """

    before: Ints
    tokens: Ints
    first: Ints
    last: Ints


class AcceptedDraftTokens:
    """The output tokens of all requests, one after another: guessed right by a drafter, or not.

    Tokens up to one that is not guessed, and it, are a *run*. With draft length k a step makes
    k + 1 tokens of a run, or what is left of it. So steps of every k begin where a run does.
    """

    def __init__(self, lengths: Sequence[int], guessed: np.ndarray) -> None:
        """
        Args:
            lengths: tokens of each response.
            guessed: of each token of all responses, bool [sum of lengths]. That of the last token
                of a response does not matter: the response ends with it.
        """
        self._length = np.array(lengths, np.int64)
        self._ends = self._length.cumsum()
        self._begins = self._ends - self._length
        missed = ~guessed
        missed[self._ends - 1] = True
        runs = np.flatnonzero(missed)
        self._first_token = np.append(0, runs[:-1] + 1)
        self._tokens = runs + 1 - self._first_token
        self._run_of = np.append(0, missed[:-1].cumsum())
        self._step_tables: dict[int, _StepTable] = {}

    @classmethod
    def of(cls, trace: LengthTrace) -> AcceptedDraftTokens:
        """Those of a trace, drawn from its acceptance; the same for equal traces."""
        return _drawn(trace.lengths, trace.acceptance)

    def _step_table(self, k: int) -> _StepTable:
        table = self._step_tables.get(k)
        if table is None:
            steps = (self._tokens + k) // (k + 1)
            before = np.append(0, steps.cumsum())
            bounds = before[np.append(self._run_of[self._begins], len(steps))]
            of_run = np.repeat(self._first_token - before[:-1] * (k + 1), steps)
            tokens = np.append(of_run + np.arange(before[-1]) * (k + 1), self._ends[-1])
            table = self._step_tables[k] = _StepTable(before[:-1], tokens, bounds[:-1], bounds[1:])
        return table

    def steps_made(self, requests: Ints, outputs: Ints, k: int) -> Ints:
        """Steps in which requests make their first `outputs` tokens, fewer than all of them."""
        table, at = self._step_table(k), self._begins[requests] + outputs
        run = self._run_of[at]
        whole: Ints = table.before[run] + (at - self._first_token[run]) // (k + 1)
        return whole - table.first[requests]

    def steps_in_all(self, requests: Ints, k: int) -> Ints:
        """Steps of whole responses."""
        table = self._step_table(k)
        return table.last[requests] - table.first[requests]

    def outputs(self, requests: Ints, steps: Ints, k: int) -> Ints:
        """Tokens that requests have after so many of their steps."""
        table = self._step_table(k)
        # The tokens before the next request are those of the last step, too.
        at = np.minimum(table.first[requests] + steps, table.last[requests])
        return table.tokens[at] - self._begins[requests]

    def accepted(self, requests: Ints, outputs: Ints, k: int) -> Ints:
        """Drafts of the next step that are accepted, of each request."""
        at = self._begins[requests] + outputs
        run = self._run_of[at]
        return np.minimum(self._first_token[run] + self._tokens[run] - 1 - at, k)

    def draft_yield(self, requests: Ints, outputs: Ints, lengths: Sequence[int]) -> DraftYield:
        """What each draft length gives requests for the rest of their responses."""
        left = float((self._length[requests] - outputs).sum())
        steps = [
            self.steps_in_all(requests, k) - self.steps_made(requests, outputs, k) for k in lengths
        ]
        tokens: Floats = left / np.array([float(per_request.sum()) for per_request in steps])
        return DraftYield(np.array(lengths, np.int64), tokens, np.array(lengths, np.float64))


def acceptance_of_each(random: np.random.Generator, mean: float, count: int) -> Floats:
    """Of so many requests, around a mean between 0 and 1: float64 [count]."""
    return random.beta(_ALIKE * mean, _ALIKE * (1 - mean), count)


@lru_cache(maxsize=4)
def _drawn(lengths: tuple[int, ...], acceptance: float) -> AcceptedDraftTokens:
    random = np.random.default_rng(zlib.crc32(repr((lengths, acceptance)).encode()))
    total = sum(lengths)
    if not 0 < acceptance < 1:
        return AcceptedDraftTokens(lengths, np.full(total, acceptance == 1))
    each = acceptance_of_each(random, acceptance, len(lengths))
    return AcceptedDraftTokens(lengths, random.random(total) < np.repeat(each, lengths))
