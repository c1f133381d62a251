"""Predicts how many tokens the running responses still have to generate. Pure."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from pat_vllm.files.reading import first_problem
from pat_vllm.predictor.hazard import BINS, EDGES, Collector, Pool, Prior, cumulative_hazard
from pat_vllm.predictor.state import Floats, Ints, LiveRequests

_DISCOUNT = 0.8
"""Weight of a batch after each later one: about 5 batches count."""

_PRIOR_WEIGHT = 4.0
"""Pseudo-responses of the prior."""

_PRIOR_MEDIAN = 1 / 8
"""Median of the prior, as a share of the bound."""

_SEED = 0
"""Of the sampled futures."""

_FORMAT = 1

MOST = 1e15
"""Of what is counted: more than any engine sees."""

Count = Annotated[float, Field(ge=0, le=MOST)]


class _Learnt(BaseModel):
    """What `LengthModel.to_json` says."""

    model_config = ConfigDict(extra="forbid", strict=True)

    format: Literal[1]
    bound: int = Field(ge=1, le=2**31)
    batches: int = Field(ge=0, le=MOST)
    responses: int = Field(ge=0, le=MOST)
    ends: list[Count] = Field(max_length=BINS)
    tokens: list[Count] = Field(max_length=BINS)


class LengthModel:
    """Learns the distribution of response lengths and samples futures of running responses.

    Pools this batch (finished and running responses), earlier batches (discounted) and a weak
    prior; see `hazard`. Responses of one prompt count as any others do.

    Args:
        bound: the longest response, in tokens, that is possible.

    Attributes:
        batches: batches learnt from, the current one not included.
        responses: finished responses learnt from.
    """

    def __init__(self, bound: int) -> None:
        if bound < 1:
            raise ValueError(f"the longest response must have at least 1 token, got bound={bound}")
        self.bound = bound
        self.batches = 0
        self.responses = 0
        self._history = Pool.empty()
        self._prior = Prior(max(1.0, bound * _PRIOR_MEDIAN), _PRIOR_WEIGHT)
        self._start_batch()

    # What happens

    def finished(self, length: int, complete: bool) -> None:
        """A response stopped with `length` tokens; not `complete` when it was cut short.

        A response whose length was prescribed (`exact`) says nothing about the others and should
        not be told.
        """
        if length < 1:
            return
        self._batch.add(length, complete)
        self._count += 1
        self.responses += 1
        self._fresh = False

    def observe_running(self, live: LiveRequests) -> None:
        """The responses that run now; replaces what the previous call said."""
        self._running = live.num_output_tokens[~live.exact & (live.num_output_tokens > 0)]
        self._fresh = False

    def end_of_batch(self) -> None:
        """No response runs: this batch becomes history."""
        if self._count:
            self._history = self._history * _DISCOUNT + self._batch.pool()
            self.batches += 1
        self._start_batch()

    # What is predicted

    def sample(self, live: LiveRequests, futures: int) -> Ints:
        """Remaining tokens of each request in each of `futures` futures, int64 [n, futures].

        Each is at least 1 and within the request's bound; exactly that for `exact` requests. The
        draws of a request are stratified, in an order of its own, so futures are exchangeable and
        requests independent.
        The same draws are used throughout a batch, so predictions differ only by what was learnt.
        """
        if not len(live):
            return np.zeros((0, futures), np.int64)
        self._refresh()
        hazard, generated = self._hazard, live.num_output_tokens
        start = np.interp(generated, EDGES, hazard)
        draws = self._draws(len(live), futures)
        remaining = (
            np.ceil(np.interp(start[:, None] + draws, hazard, EDGES)).astype(np.int64)
            - generated[:, None]
        )
        room = np.maximum(live.max_tokens - generated, 1)[:, None]
        np.clip(remaining, np.where(live.exact[:, None], room, 1), room, out=remaining)
        return remaining

    # Inner workings

    def _start_batch(self) -> None:
        self._batch = Collector()
        self._running = np.zeros(0, np.int64)
        self._count = 0
        self._noise = np.zeros((0, 0))
        self._fresh = False

    def _refresh(self) -> None:
        """Estimate the hazard anew if anything has happened."""
        if self._fresh:
            return
        none = np.zeros(len(self._running), np.bool_)
        pool = self._batch.pool() + Pool.of(self._running, none) + self._history
        pool = pool + self._prior.given(pool)
        self._hazard = cumulative_hazard(pool)
        self._fresh = True

    def _draws(self, requests: int, futures: int) -> Floats:
        """Stratified standard exponential draws, float64 [requests, futures]."""
        if requests > len(self._noise) or futures != self._noise.shape[1]:
            random = np.random.default_rng((_SEED, self.batches, futures))
            strata = np.tile(np.arange(futures, dtype=np.float64), (requests, 1))
            random.permuted(strata, axis=1, out=strata)
            self._noise = -np.log1p(-(strata + random.random(strata.shape)) / futures)
        return self._noise[:requests]

    # Persistence

    def to_json(self) -> dict[str, Any]:
        """What was learnt from earlier batches, as JSON values."""
        return {
            "format": _FORMAT,
            "bound": self.bound,
            "batches": self.batches,
            "responses": self.responses,
            "ends": self._history.ends.tolist(),
            "tokens": self._history.tokens.tolist(),
        }

    @classmethod
    def from_json(cls, data: Any, bound: int | None = None) -> LengthModel:
        """The model that `to_json` described, for responses up to `bound` (default: the same).

        Raises:
            ValueError: it is not such a description.
        """
        try:
            learnt = _Learnt.model_validate(data)
        except ValidationError as error:
            raise ValueError(first_problem(error)) from error
        ends, tokens = np.array(learnt.ends, np.float64), np.array(learnt.tokens, np.float64)
        if len(ends) != len(tokens) or (ends > tokens).any():
            raise ValueError("ends: more responses ended than there are tokens")
        model = cls(learnt.bound if bound is None else bound)
        model.batches, model.responses = learnt.batches, learnt.responses
        # A shorter grid is continued by this one.
        model._history = Pool(*(np.pad(one, (0, BINS - len(one))) for one in (ends, tokens)))
        return model
