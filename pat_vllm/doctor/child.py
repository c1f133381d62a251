"""Starts the processes of a stage, follows what they do, and ends those that hang."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from pat_vllm.doctor.symptoms import explain
from pat_vllm.doctor.values import Check
from pat_vllm.text_only import SAFE_PATH, command_of

SILENCE = 420.0
"""Seconds without a sign of life, or a line of its log, after which a process is taken to hang."""
_LOOK = 0.2
_ENDING = 20.0
_GRACE = 5.0
"""Seconds for processes to end by themselves."""


@dataclass(frozen=True)
class Run:
    """What a process has left.

    Attributes:
        answer: text of the file that it wrote; None if it wrote none.
        log: all that it printed.
        checks: what it found, and at the end why it failed, if it did.
    """

    answer: str | None
    log: str
    checks: tuple[Check, ...]


def run_module(
    module: str,
    request: str,
    environment: Mapping[str, str],
    doing: Callable[[str], None],
    silence: float = SILENCE,
) -> Run:
    """Run `python -m module REQUEST ANSWER JOURNAL` in a new process, to its end.

    Neither it nor what it starts imports from the current directory.

    Args:
        request: text of the file that it reads.
        doing: called with what it does, when it begins with something.
        silence: seconds after which it is taken to hang.
    """
    with tempfile.TemporaryDirectory(prefix="pat-vllm-doctor-") as scratch:
        files = [Path(scratch) / name for name in ("request", "answer", "journal", "log")]
        given, answer, journal, log = files
        given.write_text(request)
        journal.touch()
        command = [*command_of(module), str(given), str(answer), str(journal)]
        with log.open("w") as output:
            process = subprocess.Popen(
                command,
                env={**environment, **SAFE_PATH},
                stdout=output,
                stderr=subprocess.STDOUT,
                # So that the engine's processes can be ended with it.
                start_new_session=True,
            )
            codes: list[int] = []
            waiting = threading.Thread(target=lambda: codes.append(process.wait()), daemon=True)
            waiting.start()
            hangs = True  # or this process is to end
            try:
                seen = _follow(journal, log, waiting, doing, silence)
                hangs = seen.hangs
            finally:
                if hangs:
                    process.terminate()
                    waiting.join(_ENDING)
                _end_what_is_left(process)
                waiting.join(_ENDING)
        text = log.read_text(errors="replace")
        checks = list(seen.checks)
        failed = any(one.problem is not None for one in checks)
        if seen.hangs and not failed:
            checks.append(Check(seen.last, problem=f"it hangs: nothing for {silence:.0f} s"))
        elif not failed and codes != [0]:
            checks.append(Check(seen.last, problem=f"the process ended with exit code {codes[0]}"))
        if checks and checks[-1].problem is not None and (cause := explain(text)) is not None:
            last = checks[-1]
            checks[-1] = Check(
                last.name, last.found, f"{cause} ({_brief(last.problem)})", last.seconds
            )
        return Run(answer.read_text() if answer.exists() else None, text, tuple(checks))


def _brief(problem: str | None) -> str:
    return (problem or "").splitlines()[0][:160]


@dataclass
class _Seen:
    checks: list[Check]
    last: str = "start"
    hangs: bool = False


def _follow(
    journal: Path,
    log: Path,
    waiting: threading.Thread,
    doing: Callable[[str], None],
    silence: float,
) -> _Seen:
    seen = _Seen([])
    size, alive = (0, 0), time.monotonic()
    with journal.open() as lines:
        while True:
            ended = not waiting.is_alive()
            while (line := _whole_line(lines)) is not None:
                entry = json.loads(line)
                if "doing" in entry:
                    seen.last = entry["doing"]
                    doing(seen.last)
                elif "check" in entry:
                    seen.checks.append(Check(**entry["check"]))
                    if seen.checks[-1].problem is not None:
                        silence = min(silence, _ENDING)  # it has nothing more to do
            if ended:
                return seen
            now = (journal.stat().st_size, log.stat().st_size)
            if now != size:
                size, alive = now, time.monotonic()
            elif time.monotonic() - alive > silence:
                seen.hangs = True
                return seen
            waiting.join(_LOOK)


def _whole_line(lines: object) -> str | None:
    """The next line, once it has been written to its end."""
    at = lines.tell()  # type: ignore[attr-defined]
    line: str = lines.readline()  # type: ignore[attr-defined]
    if line.endswith("\n"):
        return line
    lines.seek(at)  # type: ignore[attr-defined]
    return None


def _end_what_is_left(process: subprocess.Popen[bytes]) -> None:
    """Kill what a process has started and has not ended itself after some seconds.

    A process that was killed ends nothing, and stock vLLM's engine would keep its devices.
    """
    until = time.monotonic() + _GRACE
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < until:
            os.killpg(process.pid, 0)
            time.sleep(_LOOK)
        os.killpg(process.pid, signal.SIGKILL)


@contextmanager
def ending_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end this process as an error would: what it has started ends, too."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(one, end) for one in signals]
    try:
        yield
    finally:
        for one, handler in zip(signals, before, strict=True):
            signal.signal(one, handler)
