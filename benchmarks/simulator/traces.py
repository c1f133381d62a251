"""Batches of response lengths. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

_PROMPT_TOKENS = (64, 512)
"""Fewest and most tokens of a drawn prompt."""
_USUAL_PROMPT_TOKENS = 256
"""Prompt tokens of a trace that does not tell."""


@dataclass(frozen=True)
class LengthTrace:
    """Requests and the lengths of their responses, in tokens.

    Attributes:
        name: what the trace is called.
        lengths: tokens of each response, 1 to `max_tokens`.
        arrivals: when each request arrives, in seconds since the trace began; empty: all at once.
        groups: equal for requests with equal prompts; empty: no two are equal.
        num_prompt_tokens: of each request; empty: 256 each.
        max_tokens: tokens after which a response is cut short; 0: the longest.
        acceptance: probability that a draft token is accepted if those before it were, in the mean
            over requests.

    Raises:
        ValueError: the tuples differ in size, or a response is longer than `max_tokens`.
    """

    name: str
    lengths: tuple[int, ...]
    arrivals: tuple[float, ...] = ()
    groups: tuple[int, ...] = ()
    num_prompt_tokens: tuple[int, ...] = ()
    max_tokens: int = 0
    acceptance: float = 0.0

    def __post_init__(self) -> None:
        count, longest = len(self.lengths), max(self.lengths)
        defaults: dict[str, Any] = {
            "arrivals": (0.0,) * count,
            "groups": tuple(range(count)),
            "num_prompt_tokens": (_USUAL_PROMPT_TOKENS,) * count,
            "max_tokens": longest,
        }
        for name, value in defaults.items():
            if not getattr(self, name):
                object.__setattr__(self, name, value)  # of a frozen value that is being made
        for name in ("arrivals", "groups", "num_prompt_tokens"):
            if len(getattr(self, name)) != count:
                raise ValueError(f"{count} lengths but {len(getattr(self, name))} {name}")
        if longest > self.max_tokens:
            raise ValueError(f"a length is {longest:,}; max_tokens={self.max_tokens}")

    def __len__(self) -> int:
        return len(self.lengths)

    @classmethod
    def batch(
        cls,
        name: str,
        lengths: Iterable[float],
        max_tokens: int,
        seed: int,
        groups: Sequence[int] | None = None,
    ) -> LengthTrace:
        """A batch: `lengths` are rounded and bounded, prompts drawn, one for each group."""
        cut = tuple(min(max_tokens, max(1, round(length))) for length in lengths)
        groups = range(len(cut)) if groups is None else groups
        # A stream of its own, so that prompts do not change with how lengths are drawn.
        random = np.random.default_rng((seed, 1))
        drawn = random.integers(*_PROMPT_TOKENS, size=max(groups) + 1, endpoint=True).tolist()
        prompts = tuple(drawn[group] for group in groups)
        return cls(name, cut, (), tuple(groups), prompts, max_tokens)
