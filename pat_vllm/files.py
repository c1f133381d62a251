"""Files that PAT writes: all of a file or nothing, and what it keeps is its user's alone. Pure."""

from __future__ import annotations

import contextlib
import os
import secrets
from pathlib import Path


def write_whole(path: Path, text: str, *, private: bool = False) -> None:
    """Write a file, all of it or nothing; until then, what was there before stays.

    Args:
        private: nobody but the user may read it (mode 0600). Otherwise the umask says.

    Raises:
        OSError: it cannot be written.
    """
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(scratch, new, 0o600 if private else 0o666)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            # Or a loss of power may leave an empty file by this name.
            file.flush()
            os.fsync(descriptor)
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise


def make_private(directory: Path) -> None:
    """Make a directory that nobody but the user may enter (mode 0700), or make it such a one.

    Raises:
        OSError: it cannot be made, or is another user's.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    if directory.stat().st_mode & 0o077:
        directory.chmod(0o700)
