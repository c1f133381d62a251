"""Reads files and JSON that come from outside: bounded, decoded, parsed and checked. Pure.

A file is a regular one. A pipe could block for ever, and a device could have no end. What engines
keep for the next ones and cannot read stops none of them (`set_aside`).
"""

from __future__ import annotations

import logging
import os
import reprlib
import stat
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

logger = logging.getLogger(__name__)

MOST_BYTES = 64 << 20
"""Of a file, unless its reader says otherwise."""
SET_ASIDE = ".unreadable"
"""What is added to the name of a file that cannot be read."""

_MOST_CHARACTERS = 200
_LONGEST_NAME, _LONGEST_PATH = 255, 4095
"""Bytes that Linux allows."""

_short = reprlib.Repr()
_short.maxlevel, _short.maxlist, _short.maxtuple, _short.maxdict, _short.maxset = 4, 12, 12, 8, 8
_short.maxstring = _short.maxother = 120


class FileError(ValueError):
    """A file cannot be used. The message names it and says why."""


def read_bytes(
    path: str | Path, what: str = "file", *, most: int = MOST_BYTES, own: bool = False
) -> bytes:
    """The content of a regular file.

    Args:
        what: the file is, for messages: "profile".
        most: bytes that it may have.
        own: it has to be this user's, as what PAT keeps for itself is.

    Raises:
        FileError: it cannot be read, is no regular file, too large, or another user's.
    """
    named = f"{what} {name_of(path)}"
    try:
        with open(path, "rb", opener=_open) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise FileError(f"{named} is no regular file, but a pipe, a socket or a device")
            if own and status.st_uid != os.geteuid():
                raise FileError(f"{named} is another user's ({status.st_uid})")
            if status.st_size > most:
                raise FileError(_too_large(named, status.st_size, most))
            content = file.read(most + 1)
    except OSError as error:
        raise FileError(f"{named} cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        if isinstance(error, FileError):
            raise
        raise FileError(f"{named} cannot be read: no file can have this name") from None
    if len(content) > most:
        raise FileError(_too_large(named, len(content), most))  # it grew, or is of /proc
    return content


def _too_large(named: str, size: int, most: int) -> str:
    return f"{named} has {size:,} bytes; at most {most:,} are read"


def _open(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def read_text(path: str | Path, what: str = "file", *, most: int = MOST_BYTES) -> str:
    """The content of a regular file of UTF-8.

    Raises:
        FileError: as `read_bytes`, or it is no such text.
    """
    content = read_bytes(path, what, most=most)
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{what} {name_of(path)} is no text file: {error.reason}") from None


def read_json(
    path: str | Path, what: str = "file", *, most: int = MOST_BYTES, own: bool = False
) -> Any:
    """The value in a file of JSON.

    Raises:
        FileError: as `read_bytes`, or it is no JSON.
    """
    content = read_bytes(path, what, most=most, own=own)
    try:
        return parse_json(content)
    except ValueError as error:
        raise FileError(f"{what} {name_of(path)} is no JSON ({error})") from None


def read_json_object(path: str | Path, what: str = "file") -> dict[str, Any]:
    """The object in a file of JSON.

    Raises:
        FileError: as `read_json`, or it holds another value.
    """
    value = read_json(path, what)
    if not isinstance(value, dict):
        raise FileError(f"{what} {name_of(path)} is no JSON object, but {shown(value)}")
    return value


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text. Unlike Python's own parser, this one has a limit to nesting (200).

    Raises:
        ValueError: it is no JSON, or holds an integer of thousands of digits.
    """
    if isinstance(text, bytes):
        return from_json(text.removeprefix(b"\xef\xbb\xbf"))
    try:
        return from_json(text)
    except UnicodeEncodeError:
        raise ValueError("it has a character that is none") from None


def check_name(path: str) -> str:
    """The same, if a file can have this name.

    Raises:
        ValueError: it is empty, too long, has a NUL, or cannot be encoded.
    """
    try:
        name = os.fsencode(path)
    except UnicodeEncodeError:
        raise ValueError("no file can have this name: it cannot be encoded") from None
    if not name or b"\0" in name:
        raise ValueError(f"no file can have this name: it {'has a NUL' if name else 'is empty'}")
    if len(name) > _LONGEST_PATH or max(map(len, name.split(b"/"))) > _LONGEST_NAME:
        raise ValueError(f"no file can have this name: it is too long ({len(name)} bytes)")
    return path


def name_of(path: str | Path) -> str:
    """A path for messages: printable, and not endless."""
    text = str(path)
    return cut(text if text.isprintable() else ascii(text))


def shown(value: Any) -> str:
    """A value for messages: as Python writes it, but not endless."""
    try:
        return cut(_short.repr(value))
    except (ValueError, RecursionError):  # thousands of digits; nested without end
        return f"a {type(value).__name__}"


def cut(text: str, most: int = _MOST_CHARACTERS) -> str:
    """A text, or its beginning and end."""
    return text if len(text) <= most else f"{text[: most // 2]}...{text[-most // 4 :]}"


def first_problem(error: ValidationError, most: int = _MOST_CHARACTERS) -> str:
    """Where in a value pydantic has found the first mistake, and which, without pydantic's words.

    Args:
        most: characters of each.
    """
    first = error.errors(include_url=False)[0]
    where = cut(".".join(map(str, first["loc"])), most)
    said = cut(said_of(first), most)
    return f"{where}: {said}" if where else said


def said_of(error: Any) -> str:
    """What one of pydantic's errors says, without the words that it puts before those of ours."""
    return str(error["ctx"]["error"] if error["type"] == "value_error" else error["msg"])


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
