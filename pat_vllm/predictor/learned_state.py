"""What an engine has learnt from batches, kept for the next one. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pat_vllm.files.kept import KeptFile
from pat_vllm.files.reading import FileError, name_of, read_json_object
from pat_vllm.predictor.acceptance import Acceptance
from pat_vllm.predictor.length_model import LengthModel

NAME = "learnt.json"
"""The file in `pat.state_dir`."""
_FORMAT = 1
_DIGEST = "digest"
"""By which damage is seen. It is no signature: who may write may make one."""


class LearnedState:
    """Keeps what an engine has learnt, if it has a directory of state."""

    def __init__(self, state_dir: Path | None) -> None:
        self._file = KeptFile(state_dir, NAME, "what is learnt about lengths and drafts")

    def load(self, bound: int, draft_lengths: Sequence[int]) -> tuple[LengthModel, Acceptance]:
        """What was kept, or models that have learnt nothing; for the arguments, see `load`."""
        kept = self._file.read(lambda path: load(path, bound, draft_lengths))
        return kept or (LengthModel(bound), Acceptance(draft_lengths))

    def save(self, lengths: LengthModel, acceptance: Acceptance | None) -> None:
        """Keep what has been learnt."""
        if self._file.path is not None:
            self._file.write(to_json(lengths, acceptance))


def to_json(lengths: LengthModel, acceptance: Acceptance | None = None) -> str:
    """What has been learnt, as `load` reads it."""
    content: dict[str, Any] = {
        "format": _FORMAT,
        "bound": lengths.bound,
        "batches": lengths.batches,
        "responses": lengths.responses,
        "history": lengths.history.tolist(),
        "acceptance": None if acceptance is None else acceptance.counts.tolist(),
    }
    return json.dumps({_DIGEST: _digest(content), **content})


def load(
    path: Path, bound: int | None = None, draft_lengths: Sequence[int] = (0,)
) -> tuple[LengthModel, Acceptance]:
    """What `to_json` gave, in a file.

    Args:
        bound: the longest possible response, tokens (default: the same).
        draft_lengths: as in `Acceptance`; they may be others than before. What was accepted counts
            as with other weights: those of another engine are.

    Raises:
        FileError: the file cannot be read, is damaged, or was not written by an engine.
    """
    content, named = read_json_object(path, "learnt state"), f"learnt state {name_of(path)}"
    if content.pop(_DIGEST, None) != _digest(content):
        raise FileError(
            f"{named} was changed after it was written, or is damaged: its digest does not match"
        )
    if content.get("format") != _FORMAT:
        raise FileError(f"{named} has another format; this version reads {_FORMAT}")
    lengths, acceptance = LengthModel(bound or content["bound"]), Acceptance(draft_lengths)
    lengths.batches, lengths.responses = content["batches"], content["responses"]
    lengths.history[:] = content["history"]
    if content["acceptance"] is not None:
        acceptance.take(np.array(content["acceptance"]))
        acceptance.weights_changed()
    return lengths, acceptance


def _digest(content: Mapping[str, Any]) -> str:
    """SHA-256 of plain values in hexadecimal digits, whatever their order."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
