"""Reads files and JSON that come from outside: bounded, decoded, parsed and checked. Pure.

A file is a regular one: a pipe could block for ever, and a device could have no end.
"""

from __future__ import annotations

import os
import reprlib
import stat
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import from_json

MOST_BYTES = 64 << 20
"""Of a file, unless its reader says otherwise."""

_MARK = b"\xef\xbb\xbf"
"""Windows' editors put this before UTF-8."""
_MOST_CHARACTERS = 200

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
    return from_json(text.removeprefix(_MARK) if isinstance(text, bytes) else text)


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
