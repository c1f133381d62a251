"""What the stages find, as one report for people and for a bug report. It travels as JSON."""

from __future__ import annotations

import getpass
import os
import re
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter

Status = Literal["passed", "failed", "skipped"]

WITHOUT_ENGINES = ("environment", "model", "memory")
"""The first stages."""
LOG_LINES = 40
"""Of a failed stage's log, at the end of it."""


@dataclass(frozen=True)
class Check:
    """One thing that a stage looked at.

    Attributes:
        found: in a few words.
        problem: what is wrong; None if nothing is.
        seconds: that it took.
        values: what was found, as JSON.
    """

    name: str
    found: str = ""
    problem: str | None = None
    seconds: float = 0.0
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Stage:
    """A stage and how it ended.

    Attributes:
        why: it failed or was skipped.
        log: of a failed stage, the last lines that its processes wrote.
    """

    name: str
    status: Status
    seconds: float = 0.0
    checks: tuple[Check, ...] = ()
    why: str = ""
    log: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, checks: Sequence[Check], seconds: float, log: str = "") -> Stage:
        """A stage that has been run: it failed if one of its checks did."""
        problems = [
            f"{check.name}: {check.problem}" for check in checks if check.problem is not None
        ]
        status: Status = "failed" if problems else "passed"
        last = tuple(log.splitlines()[-LOG_LINES:]) if problems else ()
        return cls(name, status, seconds, tuple(checks), "; ".join(problems), last)


@dataclass(frozen=True)
class Report:
    """All stages of one run.

    Attributes:
        date: UTC, ISO 8601.
        command: as it was given.
        stages: in their order; after one that failed, all are skipped.
    """

    date: str
    command: str
    stages: tuple[Stage, ...]

    @property
    def failed(self) -> Stage | None:
        """The stage at which it ended, if one failed."""
        return next((stage for stage in self.stages if stage.status == "failed"), None)

    @property
    def conclusion(self) -> str:
        """In a sentence."""
        if (failed := self.failed) is not None:
            return f"Not fit: stage '{failed.name}' failed. {failed.why}"
        passed = [stage.name for stage in self.stages if stage.status == "passed"]
        if set(passed) <= set(WITHOUT_ENGINES):
            return f"No engine was started. Passed: {', '.join(passed)}."
        return f"Fit, as far as was tested: {', '.join(passed)}."

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
