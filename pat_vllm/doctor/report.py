"""What the doctor finds, as one report for people and for a bug report. It travels as JSON."""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

LOG_LINES = 40
"""Lines that are kept of a failed engine's log, the last ones."""


class Unfit(Exception):
    """What a check found wrong, in words that need no name of an exception before them."""


NamedCheck = tuple[str, Callable[[], object]]
"""A check returns what it has found, which `str` says in a few words, and raises what is wrong."""


@dataclass(frozen=True)
class Check:
    """One thing that was looked at.

    Attributes:
        found: in a few words.
        problem: what is wrong; None if nothing is.
    """

    name: str
    found: str = ""
    problem: str | None = None
    seconds: float = 0.0


@dataclass(frozen=True)
class Report:
    """All checks of one run.

    Attributes:
        date: UTC, ISO 8601.
        command: as it was given.
        checks: in their order; after one that found a problem there is none.
        fit: whether all have passed; None while some are to come.
        log: after a problem, the last lines that the engines wrote.
    """

    date: str
    command: str
    checks: tuple[Check, ...] = ()
    fit: bool | None = None
    log: tuple[str, ...] = ()

    @property
    def conclusion(self) -> str:
        """In a sentence."""
        if self.fit:
            return f"Fit: {len(self.checks)} checks have passed."
        wrong = [f"{check.name}: {check.problem}" for check in self.checks if check.problem]
        return f"Not fit. {'; '.join(wrong)}"

    def without_names(self) -> Report:
        """Without the names of the machine, its user and their folders."""
        names = names_of_this_machine()

        def clean(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: clean(inner) for key, inner in value.items()}
            if isinstance(value, list):
                return [clean(inner) for inner in value]
            return without_names(value, names) if isinstance(value, str) else value

        return REPORT.validate_python(clean(REPORT.dump_python(self, mode="json")))


REPORT = TypeAdapter(Report)


def without_names(text: str, names: dict[str, str]) -> str:
    """Replace whole words and paths, longer ones first."""
    for name in sorted(names, key=len, reverse=True):
        edge = r"(?<![\w])" if name[0].isalnum() else ""
        text = re.sub(edge + re.escape(name) + r"(?![\w])", names[name], text)
    return text


def names_of_this_machine() -> dict[str, str]:
    """What says whose machine this is, and what stands for it."""
    names = {
        str(Path(__file__).parents[2]): "<pat-vllm>",
        sys.prefix: "<python>",
        tempfile.gettempdir(): "<tmp>",
        socket.gethostname(): "<host>",
    }
    with suppress(OSError):  # it was removed
        names[os.getcwd()] = "."
    with suppress(RuntimeError):  # the user has none
        names[str(Path.home())] = "~"
    with suppress(KeyError, OSError):
        names[getpass.getuser()] = "<user>"
    # Those say nothing, or are parts of all other names.
    return {k: v for k, v in names.items() if len(k) > 2 and k not in ("root", "localhost")}
