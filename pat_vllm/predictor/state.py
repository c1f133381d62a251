"""What the models and the planner see of an engine: plain values. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from pat_vllm.layout import Layout

Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class LiveRequests:
    """The unfinished requests of an engine, as arrays over requests.

    Attributes:
        num_prompt_tokens: tokens of the prompt, int64 [n].
        num_output_tokens: tokens generated so far, int64 [n].
        max_tokens: most tokens that the response can have: the request's own `max_tokens`, or
            fewer where the model's context leaves fewer, int64 [n].
        exact: whether the response will have exactly `max_tokens` tokens (`ignore_eos` without
            stop conditions), bool [n].
        group: equal for requests with equal prompts (samples of one prompt), int64 [n].
        number: tells the request from all others, int64 [n].
        replica_steps: decode steps that its replica has made since the last switch, int64 [n].
        num_computed_tokens: tokens whose KV is in memory; 0 for a request that waits, int64 [n].
    """

    num_prompt_tokens: Ints
    num_output_tokens: Ints
    max_tokens: Ints
    exact: Bools
    group: Ints
    number: Ints
    replica_steps: Ints
    num_computed_tokens: Ints

    @classmethod
    def fresh(cls, num_prompt_tokens: Ints, max_tokens: int) -> LiveRequests:
        """Requests that have just arrived, none of which has to do with another."""
        each = np.arange(len(num_prompt_tokens))
        none = np.zeros_like(each)
        most = np.full_like(each, max_tokens)
        exact = np.zeros(len(each), np.bool_)
        return cls(num_prompt_tokens, none, most, exact, each, each, none, none)

    def __len__(self) -> int:
        return len(self.num_prompt_tokens)

    @property
    def uncomputed(self) -> int:
        """Prompt tokens that have yet to be computed."""
        return int(np.maximum(self.num_prompt_tokens - self.num_computed_tokens, 0).sum())

    @property
    def context(self) -> Ints:
        """Tokens of each request's context, int64 [n]."""
        return self.num_prompt_tokens + self.num_output_tokens


@dataclass(frozen=True, slots=True)
class LiveState:
    """What a policy may look at before a step.

    Attributes:
        now: seconds on the engine's monotonic clock.
        layout: the active layout.
        num_seqs: unfinished requests, running and waiting.
        quiet: seconds since a request arrived last.
        requests: gives details; costs a few microseconds per request, so asked for only when a
            decision is due.
    """

    now: float
    layout: Layout
    num_seqs: int
    quiet: float
    requests: Callable[[], LiveRequests]
