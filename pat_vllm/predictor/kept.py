"""The file in which engines keep what they learnt from batches. Pure."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pat_vllm.files.reading import FileError, name_of, read_json, set_aside, shown
from pat_vllm.files.writing import write_whole
from pat_vllm.predictor.acceptance import Acceptance
from pat_vllm.predictor.lengths import LengthModel

logger = logging.getLogger(__name__)

_OPTION = "pat.policy.lengths_file"
_MOST_BYTES = 4 << 20
_ACCEPTANCE = "acceptance"
_DIGEST = "digest"
"""By which damage is seen. It is no signature: who may write may make one."""


class Keeper:
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
    content = lengths.to_json()
    if acceptance is not None:
        content[_ACCEPTANCE] = acceptance.to_json()
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
    content = _without_digest(read_json(path, "the lengths file", most=_MOST_BYTES), named)
    try:
        learnt = content.pop(_ACCEPTANCE, None)  # not where there were no drafts
        lengths = LengthModel.from_json(content, bound)
        acceptance = Acceptance(draft_lengths)
        if learnt is not None:
            acceptance = Acceptance.from_json(learnt, draft_lengths)
            acceptance.weights_changed()
    except ValueError as error:
        raise FileError(f"{named} holds no length history ({error})") from error
    return lengths, acceptance


def _without_digest(content: Any, named: str) -> dict[str, Any]:
    """What an object in a file of JSON says beside its digest, which is checked.

    Args:
        named: the file, for messages.

    Raises:
        FileError: it is no object, or its digest is not that of the content.
    """
    if not isinstance(content, dict):
        raise FileError(f"{named} is no JSON object, but {shown(content)}")
    rest = {name: value for name, value in content.items() if name != _DIGEST}
    if content.get(_DIGEST) != _digest(rest):
        raise FileError(
            f"{named} was changed after it was written, or is damaged: its digest does not match"
        )
    return rest


def _digest(content: Mapping[str, Any]) -> str:
    """Of plain values, whatever their order: SHA-256, in hexadecimal digits."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
