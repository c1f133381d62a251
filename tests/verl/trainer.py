"""Runs the GRPO example as a user would, and follows it."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.support.child import Child
from tests.verl.environment import ROOT

EXAMPLE = ROOT / "integrations" / "verl" / "examples" / "grpo.sh"
_MARK = "PAT_TEST_RUN"
_SILENCE = 300
"""Seconds. A dozen processes import verl and vLLM at once."""


@dataclass(frozen=True)
class Step:
    """What verl logged of a training step."""

    probs_diff_max: float
    longest: float
    mean_length: float


class Run:
    """A run of the example: its output so far, its processes."""

    def __init__(self, child: Child, ray: Path, mark: str) -> None:
        self.child = child
        self._ray = ray
        self._mark = f"{_MARK}={mark}".encode()

    @property
    def output(self) -> str:
        return self.child.output

    def printed(self) -> str:
        """What Ray's workers printed, before Ray forwards it."""
        files = self._ray.glob("session_*/logs/worker-*")
        return "".join(file.read_text(errors="replace") for file in files if file.is_file())

    def steps(self) -> list[Step]:
        """The training steps that are complete."""
        return [
            Step(*[float(re.search(rf"{key}:(\S+)", line)[1]) for key in _KEYS])  # type: ignore[index]
            for line in re.findall(r"\bstep:\d+ - .*", self.output)
        ]

    def rollouts(self) -> list[str]:
        """PAT's line about each rollout."""
        return re.findall(r"PAT rollout \d+ of replica 0, weights of step \d+: (.*)", self.output)

    def wait_for(self, condition: Callable[[], bool], what: str) -> None:
        """Until something holds."""
        self.child.wait_for(condition, what)

    def ended(self) -> int:
        """The exit status, when it has ended by itself."""
        return self.child.wait()

    def processes(self) -> dict[int, str]:
        """All processes of the run that live, with their names."""
        found = {}
        for directory in Path("/proc").iterdir():
            if not directory.name.isdigit():
                continue
            with contextlib.suppress(OSError):
                if self._mark in (directory / "environ").read_bytes().split(b"\0"):
                    name = (directory / "cmdline").read_bytes().replace(b"\0", b" ").strip()
                    state = (directory / "stat").read_text().rpartition(")")[2].split()[0]
                    if state != "Z":
                        found[int(directory.name)] = name.decode(errors="replace")
        return found

    def left_after(self, seconds: float) -> dict[int, str]:
        """Processes that are still there so long after the end."""
        give_up = time.monotonic() + seconds
        while (left := self.processes()) and time.monotonic() < give_up:
            time.sleep(0.2)
        return left

    def engine_workers(self) -> list[int]:
        """The engine's worker processes, by rank."""
        return [
            pid
            for pid, name in sorted(self.processes().items())
            if name.startswith(("VLLM::Worker", "VLLM::PATWorker"))
        ]


_KEYS = ("training/rollout_probs_diff_max", "response_length/max", "response_length/mean")


@contextlib.contextmanager
def grpo(*arguments: str) -> Iterator[Run]:
    """Start the example; kill what is left of it at the end."""
    mark = uuid.uuid4().hex
    # A short path: Ray's sockets are in it.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as scratch:
        log, ray = Path(scratch, "log"), Path(scratch, "ray")
        inside = os.environ | {
            _MARK: mark,
            "WORK": scratch,
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "PYTHONUNBUFFERED": "1",
        }
        command = [
            str(EXAMPLE),
            "+ray_kwargs.ray_init.address=local",
            f"+ray_kwargs.ray_init._temp_dir={ray}",
            *arguments,
        ]
        child = Child(command, log, _SILENCE, env=inside)
        run = Run(child, ray, mark)
        try:
            yield run
        finally:
            for pid in run.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            child.kill()
