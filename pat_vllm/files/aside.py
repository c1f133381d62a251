"""What engines keep for the next ones and cannot read: it stops none of them. Pure."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from pat_vllm.files.reading import FileError, name_of

logger = logging.getLogger(__name__)

SET_ASIDE = ".unreadable"
"""What is added to the name of a file that cannot be read."""


def set_aside(path: Path, option: str, error: FileError) -> None:
    """Rename a file that cannot be read, so that the engine can keep what it learns; the log says
    why. What is no regular file (a directory, a device) stays: it was not an engine that made it.

    Args:
        option: that names the file, for the message.
    """
    done = "it stays"
    try:
        if os.path.isfile(path):
            aside = path.with_name(path.name + SET_ASIDE)
            os.replace(path, aside)
            done = f"it is now {name_of(aside)}"
    except OSError as failure:
        done = f"it cannot be renamed ({failure.strerror})"
    logger.warning("%s: %s; %s, and the engine starts without it", option, error, done)
