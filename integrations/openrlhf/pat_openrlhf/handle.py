"""The trainer's end of a rollout engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import ray


@dataclass(frozen=True)
class TokenizerAtHand:
    """A tokenizer in Ray's object store. Ray itself unpacks arguments, but nothing inside them."""

    reference: Any


class EngineHandle:
    """A rollout actor's handle that sends a tokenizer once, not with every prompt.

    OpenRLHF makes a call for each prompt, and gives it the tokenizer. Packing and unpacking one
    with a large vocabulary takes longer than a decode step. So the requests of a rollout would
    arrive one prompt after the other, and what waits last decides how long the rollout takes.

    The tokenizer that is given must not be changed afterwards.
    """

    def __init__(self, actor: Any) -> None:
        self._actor = actor
        self._sent: tuple[Any, TokenizerAtHand] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._actor, name)

    def __reduce__(self) -> tuple[Any, ...]:
        return EngineHandle, (self._actor,)

    @property
    def actor(self) -> Any:
        """Ray's own handle, for `ray.kill` and what else takes no other."""
        return self._actor

    @property
    def generate_responses(self) -> _GenerateResponses:
        """The actor's method."""
        return _GenerateResponses(self)

    def at_hand(self, tokenizer: Any) -> TokenizerAtHand:
        """What stands for a tokenizer."""
        if self._sent is None or self._sent[0] is not tokenizer:
            self._sent = tokenizer, TokenizerAtHand(ray.put(tokenizer))
        return self._sent[1]


class _GenerateResponses:
    def __init__(self, engine: EngineHandle) -> None:
        self._engine = engine

    def remote(self, *, hf_tokenizer: Any, **arguments: Any) -> Any:
        return self._engine._actor.generate_responses.remote(
            hf_tokenizer=self._engine.at_hand(hf_tokenizer), **arguments
        )
