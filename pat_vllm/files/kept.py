"""What an engine keeps for the next one in `pat.state_dir`. Pure.

No file stops an engine: one that cannot be read is set aside, one that cannot be written is warned
of, and the engine goes on.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from pat_vllm.files.reading import FileError, name_of
from pat_vllm.files.writing import write_whole

logger = logging.getLogger(__name__)

SET_ASIDE = ".unreadable"
"""What is added to the name of a file that cannot be read."""

_T = TypeVar("_T")


class KeptFile:
    """A file in an engine's directory of state.

    Attributes:
        path: None: the engine keeps nothing.
    """

    def __init__(self, state_dir: Path | None, name: str, what: str) -> None:
        """Touch nothing yet.

        Args:
            what: it holds, for messages: "earlier responses".
        """
        self.path = None if state_dir is None else state_dir / name
        self._what = what
        self._failed: str | None = None

    def read(self, parse: Callable[[Path], _T]) -> _T | None:
        """What `parse` makes of the file; None where there is none. One that `parse` refuses with
        a `FileError` is set aside, unless it is no regular file: no engine has made that."""
        path = self.path
        if path is None or not os.path.exists(path):
            return None
        try:
            return parse(path)
        except FileError as error:
            done = "it stays"
            try:
                if os.path.isfile(path):
                    aside = path.with_name(path.name + SET_ASIDE)
                    os.replace(path, aside)
                    done = f"it is now {name_of(aside)}"
            except OSError as failure:
                done = f"it cannot be renamed ({failure.strerror})"
            logger.warning("pat.state_dir: %s; %s, the engine starts without it", error, done)
            return None

    def write(self, content: str | bytes) -> None:
        """Write the file for the user alone, all of it or nothing."""
        assert self.path is not None
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_whole(self.path, content, private=True)
        except (OSError, ValueError) as error:
            # Once for each kind: the next batch will most likely meet the same.
            reason = getattr(error, "strerror", None) or str(error)
            if self._failed != reason:
                self._failed = reason
                logger.warning(
                    "pat.state_dir: %s cannot be written (%s): %s will be lost when this engine "
                    "ends",
                    name_of(self.path),
                    reason,
                    self._what,
                )
