"""Child processes that may work for long, but not be silent for long.

How long honest work takes is the machine's affair: a limit on its length fails on a slow one. A
process that hangs prints nothing, so the limit is on that.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

SILENCE = 180.0
"""Seconds. On a slow machine, vLLM's import alone is silent for 60."""


class Child:
    """A process in a group of its own, whose output goes to a file.

    Args:
        log: the file for its standard output and errors.
        silence: seconds without output after which waiting for it fails.
        popen: starts it; `tests.support.fork_server.Program` has it start sooner.
        options: of `subprocess.Popen`.
    """

    def __init__(
        self,
        command: Sequence[str],
        log: Path,
        silence: float = SILENCE,
        popen: Any = subprocess.Popen,
        **options: Any,
    ) -> None:
        self.log = log
        self.silence = silence
        with log.open("wb") as file:
            self.process = popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                **options,
            )

    @property
    def output(self) -> str:
        """What it has printed so far."""
        return self.log.read_bytes().decode(errors="replace")

    def wait_for(self, condition: Callable[[], bool], what: str = "it") -> None:
        """Until the condition holds.

        Raises:
            AssertionError: the process has ended before, or is silent.
        """
        printed, since = -1, time.monotonic()
        while not condition():
            # Asked for first: what it printed last may fulfil the condition.
            ended = self.process.poll() is not None
            if condition():
                return
            assert not ended, f"ended ({self.process.returncode}) before {what}:\n{self.tail()}"
            if (size := self.log.stat().st_size) != printed:
                printed, since = size, time.monotonic()
            silent = time.monotonic() - since
            assert silent < self.silence, f"silent for {silent:.0f} s before {what}:\n{self.tail()}"
            time.sleep(0.05)

    def wait(self) -> int:
        """Until it ends by itself; its exit status."""
        self.wait_for(lambda: self.process.poll() is not None, "its end")
        return self.process.returncode

    def tail(self, length: int = 6000) -> str:
        """The end of the output."""
        return self.output[-length:]

    def kill(self) -> None:
        """End it, and what it has started in its process group."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
