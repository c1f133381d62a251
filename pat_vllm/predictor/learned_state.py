"""The file in which engines keep what they learnt from batches. Pure."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Field, ValidationError, model_validator

from pat_vllm.files.reading import FileError, first_problem, name_of, read_json, set_aside, shown
from pat_vllm.files.writing import write_whole
from pat_vllm.policy_config import StrictModel
from pat_vllm.predictor.acceptance import Acceptance
from pat_vllm.predictor.length_model import BINS, LengthModel

logger = logging.getLogger(__name__)

_OPTION = "pat.policy.lengths_file"
_MOST_BYTES = 4 << 20
_MOST = 1e15
"""Of what is counted: more than any engine sees."""
_MOST_LENGTHS = 1 << 12
_DIGEST = "digest"
"""By which damage is seen. It is no signature: who may write may make one."""

_Count = Annotated[float, Field(ge=0, le=_MOST)]


class _Drafts(StrictModel, strict=True):
    """What an `Acceptance` had learnt."""

    format: Literal[1]
    tried: list[_Count] = Field(max_length=_MOST_LENGTHS)
    succeeded: list[_Count] = Field(max_length=_MOST_LENGTHS)

    @model_validator(mode="after")
    def _possible(self) -> _Drafts:
        if _exceed(self.succeeded, self.tried):
            raise ValueError("succeeded: more drafts were accepted than tried")
        return self


class _Learnt(StrictModel, strict=True):
    """What a file says beside its digest: what a `LengthModel` had learnt, and of drafts."""

    format: Literal[2]
    bound: int = Field(ge=1, le=2**31)
    batches: int = Field(ge=0, le=_MOST)
    responses: int = Field(ge=0, le=_MOST)
    ends: list[_Count] = Field(max_length=BINS)
    tokens: list[_Count] = Field(max_length=BINS)
    acceptance: _Drafts | None = None  # not where there were no drafts

    @model_validator(mode="after")
    def _possible(self) -> _Learnt:
        if _exceed(self.ends, self.tokens):
            raise ValueError("ends: more responses ended than there are tokens")
        return self


def _exceed(counts: Sequence[float], of: Sequence[float]) -> bool:
    return len(counts) != len(of) or any(a > b for a, b in zip(counts, of, strict=True))


class LearnedStateFile:
    """The file of an engine, if it has one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._failed: str | None = None

    def load(self, bound: int, draft_lengths: Sequence[int]) -> tuple[LengthModel, Acceptance]:
        """What the file holds, or models that have learnt nothing; otherwise like `load`. What
        cannot be read is set aside, and the log says so."""
        if self._path is not None and os.path.exists(self._path):
            try:
                return load(self._path, bound, draft_lengths)
            except FileError as error:
                set_aside(self._path, _OPTION, error)
        return LengthModel(bound), Acceptance(draft_lengths)

    def save(self, lengths: LengthModel, acceptance: Acceptance | None) -> None:
        """Keep what has been learnt. The engine goes on where the file cannot be written."""
        if self._path is None:
            return
        try:
            save(self._path, lengths, acceptance)
        except (OSError, ValueError) as error:
            # Once for each kind: the next batch will most likely meet the same.
            reason = getattr(error, "strerror", None) or str(error)
            if self._failed != reason:
                self._failed = reason
                logger.warning(
                    "%s=%s cannot be written (%s): what is learnt about lengths and drafts will be "
                    "lost when this engine ends",
                    _OPTION,
                    name_of(self._path),
                    reason,
                )


def save(path: Path, lengths: LengthModel, acceptance: Acceptance | None = None) -> None:
    """Write a JSON file that only the user may read, all of it or nothing.

    Raises:
        OSError: it cannot be written.
    """
    ends, tokens = lengths.history.tolist()
    content: dict[str, Any] = {
        "format": 2,
        "bound": lengths.bound,
        "batches": lengths.batches,
        "responses": lengths.responses,
        "ends": ends,
        "tokens": tokens,
    }
    if acceptance is not None:
        tried, succeeded = acceptance.counts.tolist()
        content["acceptance"] = {"format": 1, "tried": tried, "succeeded": succeeded}
    write_whole(path, json.dumps({_DIGEST: _digest(content), **content}), private=True)


def load(
    path: Path, bound: int | None = None, draft_lengths: Sequence[int] = (0,)
) -> tuple[LengthModel, Acceptance]:
    """What `save` wrote.

    Args:
        bound: the longest possible response, tokens (default: the same).
        draft_lengths: as in `Acceptance`; they may be others than before. What was accepted counts
            as with other weights: those of another engine are.

    Raises:
        FileError: the file cannot be read, or was not written by `save`.
    """
    named = f"the lengths file {name_of(path)}"
    content = read_json(path, "the lengths file", most=_MOST_BYTES)
    if not isinstance(content, dict):
        raise FileError(f"{named} is no JSON object, but {shown(content)}")
    if content.pop(_DIGEST, None) != _digest(content):
        raise FileError(
            f"{named} was changed after it was written, or is damaged: its digest does not match"
        )
    try:
        learnt = _Learnt.model_validate(content)
    except ValidationError as error:
        raise FileError(f"{named} holds no length history ({first_problem(error)})") from error
    lengths, acceptance = LengthModel(bound or learnt.bound), Acceptance(draft_lengths)
    lengths.batches, lengths.responses = learnt.batches, learnt.responses
    # A shorter grid is continued by this one.
    lengths.history[:, : len(learnt.ends)] = learnt.ends, learnt.tokens
    if (drafts := learnt.acceptance) is not None:
        acceptance.take(np.array([drafts.tried, drafts.succeeded]))
        acceptance.weights_changed()
    return lengths, acceptance


def _digest(content: Mapping[str, Any]) -> str:
    """Of plain values, whatever their order: SHA-256, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
