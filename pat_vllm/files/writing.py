"""Files that PAT writes: all of a file or nothing, and what it keeps is its user's alone. Pure."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
from pathlib import Path
from typing import Any

_FORGOTTEN_SECONDS = 3600.0
"""A file that is not complete after this long was left by a process that was killed."""


def write_whole(path: Path, content: str | bytes, *, private: bool = False) -> None:
    """Write a file, all of it or nothing; until then, what was there before stays.

    What a writer of this file has left that was killed is removed.

    Args:
        content: text is written as UTF-8.
        private: nobody but the user may read it (mode 0600). Otherwise the umask says.

    Raises:
        OSError: it cannot be written, or what has its name is no regular file.
        ValueError: no file can have this name.
    """
    if isinstance(content, str):
        content = content.encode("utf-8", "backslashreplace")
    with contextlib.suppress(FileNotFoundError):
        # A device's name, say, would become that of a file.
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise OSError(errno.EINVAL, "it is no regular file", str(path))
    scratch = path.with_name(f".{path.name}.{secrets.token_hex(8)}")
    new = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    descriptor = os.open(scratch, new, 0o600 if private else 0o666)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            # Or a loss of power may leave an empty file by this name.
            file.flush()
            os.fsync(descriptor)
            now = os.fstat(descriptor).st_mtime
        os.replace(scratch, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(scratch)
        raise
    left = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}", re.DOTALL)
    with contextlib.suppress(OSError), os.scandir(path.parent) as entries:
        for entry in entries:
            if left.fullmatch(entry.name) and forgotten(Path(entry.path), now):
                os.unlink(entry.path)


def to_json(content: Any) -> str:
    """Readable JSON: lists of plain values take one line."""
    text = json.dumps(content, indent=1, default=vars)
    flat = re.compile(r"\[\s*((?:[^\[\]{}\"]|\"[^\"\\]*\")*?)\s*\]")
    return flat.sub(lambda match: "[" + re.sub(r"\s*\n\s*", " ", match[1]) + "]", text) + "\n"


def forgotten(path: Path, now: float) -> bool:
    """Whether the user has not written to a file or directory for an hour; a link is none.

    Args:
        now: when a file beside it was written just now, by the clock of the file system, which may
            be another machine's: seconds.
    """
    status = path.lstat()
    own = status.st_uid == os.geteuid() and not stat.S_ISLNK(status.st_mode)
    return own and status.st_mtime < now - _FORGOTTEN_SECONDS


def make_private(directory: Path) -> None:
    """Make a directory that nobody but the user may enter (mode 0700), or make it such a one.

    Raises:
        OSError: it cannot be made, is a link, or another user's.
    """
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    try:
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError:
        problem = "it is a link, or no directory"
        raise NotADirectoryError(errno.ENOTDIR, problem, str(directory)) from None
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid():
            problem = f"it is another user's ({status.st_uid})"
            raise PermissionError(errno.EPERM, problem, str(directory))
        if status.st_mode & 0o077:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
