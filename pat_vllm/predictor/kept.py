"""The file in which engines keep what they learnt from batches. Pure."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path

from pat_vllm.files import write_whole
from pat_vllm.predictor.acceptance import Acceptance
from pat_vllm.predictor.lengths import LengthModel

logger = logging.getLogger(__name__)


class Keeper:
    """The file of an engine, if it has one."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._failed: str | None = None

    def load(self, bound: int, draft_lengths: Sequence[int]) -> tuple[LengthModel, Acceptance]:
        """What the file holds, or models that have learnt nothing; otherwise like `load`."""
        if self._path is not None and os.path.exists(self._path):
            return load(self._path, bound, draft_lengths)
        return LengthModel(bound), Acceptance(draft_lengths)

    def save(self, lengths: LengthModel, acceptance: Acceptance | None) -> None:
        """Keep what has been learnt. The engine goes on where the file cannot be written."""
        if self._path is None:
            return
        try:
            save(self._path, lengths, acceptance)
        except OSError as error:
            # Once for each kind: the next batch will most likely meet the same.
            reason = error.strerror or str(error)
            if self._failed != reason:
                self._failed = reason
                logger.warning(
                    "pat.policy.lengths_file=%s cannot be written (%s): what is learnt about "
                    "lengths and drafts will be lost when this engine ends",
                    self._path,
                    reason,
                )


def save(path: Path, lengths: LengthModel, acceptance: Acceptance | None = None) -> None:
    """Write a JSON file that only the user may read, all of it or nothing.

    Raises:
        OSError: it cannot be written.
    """
    content = lengths.to_json()
    if acceptance is not None:
        content["acceptance"] = acceptance.to_json()
    write_whole(path, json.dumps(content), private=True)


def load(
    path: Path, bound: int | None = None, draft_lengths: Sequence[int] = (0,)
) -> tuple[LengthModel, Acceptance]:
    """What `save` wrote.

    Args:
        bound: the longest possible response, tokens (default: the same).
        draft_lengths: as in `Acceptance`; they may be others than before. What was accepted counts
            as with other weights: those of another engine are.

    Raises:
        ValueError: the file cannot be read, or was not written by `save`.
    """
    try:
        content = json.loads(path.read_bytes())
        lengths = LengthModel.from_json(content, bound)
        acceptance = Acceptance(draft_lengths)
        if "acceptance" in content:  # not in older files, and where there were no drafts
            acceptance = Acceptance.from_json(content["acceptance"], draft_lengths)
            acceptance.weights_changed()
    except OSError as error:
        raise ValueError(f"the lengths file {path} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"{path} holds no length history ({error}); delete it to start afresh"
        ) from error
    return lengths, acceptance
