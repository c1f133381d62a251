"""Runs a trainer's example as a user would, and follows it."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil

from tests.support import patient_ray
from tests.support.child import Child
from tests.support.ray_nodes import until

_SILENCE = 300
"""Seconds. A dozen processes import a trainer and vLLM at once."""


R = TypeVar("R", bound="Run")


@dataclass
class Run:
    """A run of an example: its output so far, its processes.

    Attributes:
        work: its directory, by which its processes are known.
    """

    child: Child
    work: Path

    @property
    def output(self) -> str:
        return self.child.output

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Until something holds."""
        self.child.wait_for(condition, what)

    def succeed(self) -> None:
        """To the end of the training."""
        assert self.child.wait() == 0, self.tail()

    def tail(self) -> str:
        """The first errors, and the last that was printed."""
        errors = [line for line in self.output.splitlines() if re.search("ERROR|Error:", line)]
        return "\n".join([*errors[:30], "...", self.output[-4000:]])

    def processes(self, named: str = "") -> list[psutil.Process]:
        """What it has started and still runs, by age: Ray, its workers, engines."""
        alive = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error):
                own = process.environ().get("WORK") == str(self.work)
                ended = process.status() == psutil.STATUS_ZOMBIE
                if own and not ended and named in " ".join(process.cmdline()):
                    alive.append(process)
        return alive

    def leaves_nothing(self) -> None:
        """All its processes end within a while after it."""
        assert until(lambda: not self.processes()), self.processes()


@contextlib.contextmanager
def example(kind: type[R], script: Path, *arguments: str, **environment: str) -> Iterator[R]:
    """Start an example in a directory of its own; kill what is left of it at the end.

    Args:
        kind: reads what it prints.
        environment: beside this process's.
    """
    # Ray's sockets lie in it, and their paths must be short.
    with tempfile.TemporaryDirectory(
        prefix="pat-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:
        own: Mapping[str, str] = {
            **patient_ray.ENVIRONMENT,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
            "RAY_TMPDIR": folder,
            "WORK": folder,
        }
        inherited = {k: v for k, v in os.environ.items() if k != "RAY_ADDRESS"}
        log = Path(folder, "log")
        child = Child(
            [str(script), *arguments], log, _SILENCE, env={**inherited, **own, **environment}
        )
        run = kind(child, Path(folder))
        try:
            yield run
        finally:
            for process in run.processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
            child.kill()
