"""Work that imports vLLM, in a process of its own: no engine inherits another's state.

The parent runs `python -m MODULE REQUEST EVENTS` with `run_module` and reads what the child tells.
The child reads its request and tells with `Events`: a file to which it appends lines of JSON.
"""

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
from io import StringIO
from pathlib import Path
from typing import Any, TextIO

import psutil

from pat_vllm.start.safe_path import SAFE_PATH, command_of

_LOOK = 0.2
"""Seconds between looks at a process or a file."""
_GRACE = 5.0
"""Seconds for processes to end by themselves."""
_ENDING = 20.0
"""Seconds for a process to end after SIGTERM, or when it has nothing more to do."""


def environment(ranks: int) -> dict[str, str]:
    """Variables for engine processes with `ranks` ranks; what the user has set stays.

    On a CPU every rank gets a core of its own where there are enough, else one thread.
    """
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if ranks <= len(cores):
        threads = {"VLLM_CPU_OMP_THREADS_BIND": "|".join(str(core) for core in cores[:ranks])}
    else:
        # With more threads than cores, a waiting thread spins on a core that another needs.
        threads = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1"}
    defaults = {
        **threads,
        # Numba, which the n-gram drafter uses, gives OpenMP a thread for each core otherwise.
        "NUMBA_NUM_THREADS": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # At tp > 1 vLLM compiles one small function, with C++ and for each layout: seconds of start
        # for microseconds of a step.
        "TORCHDYNAMO_DISABLE": "1",
    }
    chosen = {**defaults, **os.environ}
    # Even if the user has set it: it would override `kv_cache_memory_bytes`.
    chosen.pop("VLLM_CPU_KVCACHE_SPACE", None)
    return chosen


class Events:
    """What a child tells its parent, a line of JSON each, at once.

    Keys of an event: `doing`, what begins; `answer`, the result; `last`, true when the child has
    nothing left to do but to end. Others are the module's own. An event may have several, or none.
    """

    def __init__(self, path: str | None = None) -> None:
        """Append to the file `path`, and have this process end when its parent has ended.

        None keeps the lines in memory.
        """
        self.file: TextIO = StringIO() if path is None else open(path, "a")  # noqa: SIM115
        if path is not None:
            _end_with(os.getppid())

    def tell(self, **event: Any) -> None:
        """Append an event. One without keys is a sign of life."""
        self.file.write(json.dumps(event) + "\n")
        self.file.flush()


def _end_with(parent: int) -> None:
    """End this process, and what it has started, when its parent was killed and cannot do so."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_LOOK)
        started = psutil.Process().children(recursive=True)
        for process in started:
            with suppress(psutil.Error):
                process.terminate()
        for process in psutil.wait_procs(started, timeout=_GRACE)[1]:
            with suppress(psutil.Error):
                process.kill()
        os._exit(1)

    threading.Thread(target=watch, daemon=True, name="PATParentWatch").start()


@dataclass(frozen=True)
class ChildResult:
    """How a child has ended.

    Attributes:
        code: exit code; None for one that was silent for too long and was ended.
        log: what it and its own children have printed.
        answer: the last `answer` that it told, or None.
    """

    code: int | None
    log: str
    answer: Any = None


def run_module(
    module: str,
    request: str,
    variables: Mapping[str, str],
    told: Callable[[dict[str, Any]], object] = lambda event: None,
    silence: float = float("inf"),
) -> ChildResult:
    """Run `python -m module REQUEST EVENTS` in a new process, to its end.

    Neither it nor what it starts imports from the current directory. All that it has started is
    ended with it.

    Args:
        request: text of the file that the child reads.
        variables: the child's environment.
        told: called with each event.
        silence: seconds without an event or output after which the child is ended.
    """
    with tempfile.TemporaryDirectory(prefix="pat-vllm-child-") as scratch:
        given, events, log = (Path(scratch) / name for name in ("request", "events", "log"))
        given.write_text(request)
        events.touch()
        with log.open("w") as output:
            process = subprocess.Popen(
                [*command_of(module), str(given), str(events)],
                env={**variables, **SAFE_PATH},
                stdout=output,
                stderr=subprocess.STDOUT,
                # So that the engine's processes can be ended with it.
                start_new_session=True,
            )
            hangs, answer = True, None  # if an exception leaves the loop, the child is ended, too
            try:
                for event in _events_of(process, events, log, silence):
                    answer = event.get("answer", answer)
                    told(event)
                hangs = process.poll() is None
            finally:
                if hangs:
                    process.terminate()
                    _wait(process)
                _end_what_is_left(process)
        return ChildResult(
            None if hangs else process.poll(), log.read_text(errors="replace"), answer
        )


def _events_of(
    process: subprocess.Popen[bytes], events: Path, log: Path, silence: float
) -> Iterator[dict[str, Any]]:
    """Events as they come, until the process has ended or is silent for too long."""
    size, alive = (0, 0), time.monotonic()
    with events.open() as lines:
        while True:
            ended = process.poll() is not None
            while (line := _whole_line(lines)) is not None:
                event: dict[str, Any] = json.loads(line)
                if "last" in event:
                    silence = min(silence, _ENDING)
                yield event
            now = (events.stat().st_size, log.stat().st_size)
            if now != size:
                size, alive = now, time.monotonic()
            elif time.monotonic() - alive > silence:
                return
            if ended:
                return
            time.sleep(_LOOK)


def _whole_line(lines: TextIO) -> str | None:
    """The next line, once it has been written to its end."""
    at = lines.tell()
    line = lines.readline()
    if line.endswith("\n"):
        return line
    lines.seek(at)
    return None


def _wait(process: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + _ENDING
    while process.poll() is None and time.monotonic() < until:
        time.sleep(_LOOK)


def _end_what_is_left(process: subprocess.Popen[bytes]) -> None:
    """Give what an ended process has started some seconds to end, too, then kill it.

    If it was killed, its children run on: those of stock vLLM would keep their devices.
    """
    until = time.monotonic() + _GRACE
    with suppress(ProcessLookupError, PermissionError):
        while time.monotonic() < until:
            os.killpg(process.pid, 0)
            time.sleep(_LOOK)
        os.killpg(process.pid, signal.SIGKILL)
    _wait(process)


@contextmanager
def ending_by_signals() -> Iterator[None]:
    """Have SIGTERM and SIGHUP end this process as an error would: what it has started ends, too."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    signals = (signal.SIGTERM, signal.SIGHUP)
    before = [signal.signal(number, end) for number in signals]
    try:
        yield
    finally:
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
