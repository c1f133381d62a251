"""Rollouts that are kept: every response with its weights' version, its time and its reward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np


@dataclass(frozen=True)
class Response:
    """A response to a prompt.

    Attributes:
        prompt: index of the prompt.
        version: how often the policy's weights had been updated by a whole rollout: the epoch.
        tokens: int32 `[tokens]`, with the one that ended it, if one did.
        seconds: from the beginning of the rollout to its end.
        reward: 1 if its answer is right, else 0.
        max_p: mean over its tokens of the greatest probability at that place, at temperature 1.
        entropy: likewise, nats.
    """

    prompt: int
    version: int
    tokens: np.ndarray
    seconds: float
    reward: float
    max_p: float
    entropy: float


_FIELDS = {
    "prompt": np.int32,
    "version": np.int32,
    "seconds": np.float32,
    "reward": np.float32,
    "max_p": np.float32,
    "entropy": np.float32,
}


@dataclass(frozen=True)
class Rollouts:
    """Prompts, and the responses to them of all epochs, oldest first."""

    prompts: list[np.ndarray]
    responses: list[Response]

    @property
    def epochs(self) -> list[list[Response]]:
        """Responses by version."""
        last = max(response.version for response in self.responses)
        return [[one for one in self.responses if one.version == e] for e in range(last + 1)]

    def save(self, path: Path) -> None:
        """Write them, compressed."""
        columns: dict[str, Any] = {
            name: np.array([getattr(one, name) for one in self.responses], kind)
            for name, kind in _FIELDS.items()
        }
        columns |= _flat("prompts", self.prompts)
        columns |= _flat("tokens", [one.tokens for one in self.responses])
        np.savez_compressed(path, **columns)

    @classmethod
    def load(cls, path: Path) -> Self:
        """What `save` wrote."""
        with np.load(path) as file:
            columns = [file[name].tolist() for name in _FIELDS]
            prompts, tokens = _rows("prompts", file), _rows("tokens", file)
        responses = [
            Response(tokens=row, **dict(zip(_FIELDS, values, strict=True)))
            for row, *values in zip(tokens, *columns, strict=True)
        ]
        return cls(prompts, responses)


def _flat(name: str, rows: Sequence[np.ndarray]) -> dict[str, np.ndarray]:
    ends = np.cumsum([len(row) for row in rows])
    return {name: np.concatenate(rows).astype(np.uint16), f"{name}_ends": ends}


def _rows(name: str, file: Any) -> list[np.ndarray]:
    return np.split(file[name].astype(np.int32), file[f"{name}_ends"][:-1])
