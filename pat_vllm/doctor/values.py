"""What the stages find, and the verdict. They travel as JSON."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import TypeAdapter

Status = Literal["passed", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """One thing that a stage looked at.

    Attributes:
        found: in a few words.
        problem: what is wrong; None if nothing is.
        seconds: that it took.
        values: what was measured, JSON.
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
        why: of one that failed or was skipped.
        log: of one that failed, the last lines that its processes wrote.
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
        problems = [f"{one.name}: {one.problem}" for one in checks if one.problem is not None]
        status: Status = "failed" if problems else "passed"
        last = tuple(log.splitlines()[-LOG_LINES:]) if problems else ()
        return cls(name, status, seconds, tuple(checks), "; ".join(problems), last)

    @classmethod
    def skipped(cls, name: str, why: str) -> Stage:
        """One that was not run."""
        return cls(name, "skipped", why=why)


LOG_LINES = 40
"""Of a failed stage's log, at the end of it."""


@dataclass(frozen=True)
class Verdict:
    """All stages of one run, for people and for a bug report.

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
    def sentence(self) -> str:
        """The verdict in a sentence."""
        if (failed := self.failed) is not None:
            return f"Not fit: stage '{failed.name}' failed. {failed.why}"
        passed = [stage.name for stage in self.stages if stage.status == "passed"]
        if "eager" not in passed:
            return f"No engine was started. Passed: {', '.join(passed)}."
        return f"Fit, as far as was tested: {', '.join(passed)}."

    def to_json(self) -> str:
        """As text, without names of users and of their folders."""
        return _VERDICT.dump_json(self, indent=1).decode()

    @classmethod
    def from_json(cls, text: str) -> Verdict:
        """Inverse of `to_json`."""
        return _VERDICT.validate_json(text)


_VERDICT = TypeAdapter(Verdict)


def without_names(text: str, names: Mapping[str, str]) -> str:
    """A text without what says whose machine it is.

    Args:
        names: what to replace, whole words or paths, by what; longer ones first, whatever the
            order.
    """
    for name in sorted(names, key=len, reverse=True):
        if len(name) > 2:
            edge = r"(?<![\w])" if name[0].isalnum() else ""
            text = re.sub(edge + re.escape(name) + r"(?![\w])", names[name], text)
    return text


def names_of_this_machine() -> dict[str, str]:
    """What `without_names` replaces, wherever it is run."""
    import getpass
    import socket
    import sys
    import tempfile
    from pathlib import Path

    import pat_vllm

    names = {
        str(Path(pat_vllm.__file__).parents[1]): "<pat-vllm>",
        sys.prefix: "<python>",
        tempfile.gettempdir(): "<tmp>",
        socket.gethostname(): "<host>",
    }
    with contextlib.suppress(OSError):  # it was removed
        names[os.getcwd()] = "."
    with contextlib.suppress(RuntimeError):  # the user has none
        names[str(Path.home())] = "~"
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = ""
    # "root" says nothing, and is a word.
    if user not in ("", "root"):
        names[user] = "<user>"
    return {name: to for name, to in names.items() if name not in ("", "/", "localhost")}
