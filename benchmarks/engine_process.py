"""Engines in processes of their own, which run functions on command.

Several can be kept alive, so that the sides of a comparison alternate while each pays for its start
once. Nothing here imports vLLM before the environment that binds an engine to cores is set.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, Self

PARK_SECONDS = 1.5
"""vLLM's idle readers spin for 1 s before they park; engines that wait must not take a core."""

PATIENCE_SECONDS = 900.0
"""For a start, or a batch, of which any takes less."""
_CLOSE_SECONDS = 30.0
_TIDY_SECONDS = 5.0
"""For helpers of a process that has ended, which free its shared memory."""
_TAIL_LINES = 40
"""Of a failed engine's output, for the error message."""


class EngineFailed(RuntimeError):
    """An engine's process failed; the message has the child's traceback or its last output."""


class EngineProcess:
    """An `LLM` in a process of its own."""

    def __init__(
        self,
        options: Mapping[str, Any],
        environment: Mapping[str, str],
        log: Path | None = None,
        code: Path | None = None,
    ) -> None:
        """Begin to start the engine.

        Args:
            options: of `LLM`.
            environment: all of the process's environment.
            log: file for what the engine writes; None leaves it to the terminal.
            code: a folder whose packages go before all others, such as another `pat_vllm`.
        """
        context = multiprocessing.get_context("spawn")
        self._log = log
        self._pipe, theirs = context.Pipe()
        arguments = (theirs, dict(environment), dict(options), log, code)
        self._process = context.Process(target=_serve, args=arguments)
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> float:
        """Seconds that `LLM(...)` took."""
        seconds: float = self._result(PATIENCE_SECONDS)
        return seconds

    def call(self, function: Callable[..., Any], *args: Any, timeout: float | None = None) -> Any:
        """What `function(llm, *args)` returns in the engine's process.

        Raises:
            EngineFailed: it failed, its process ended, or `timeout` seconds have passed.
        """
        self._pipe.send((function, args))
        return self._result(timeout)

    def _result(self, timeout: float | None) -> Any:
        ready = wait([self._pipe, self._process.sentinel], timeout)
        if not ready:
            raise EngineFailed(f"the engine gave no answer for {timeout:g} s{self._last_words()}")
        try:
            succeeded, value = self._pipe.recv()
        except (EOFError, OSError):
            self._process.join(_CLOSE_SECONDS)
            raise EngineFailed(
                f"the engine's process ended with exit code {self._process.exitcode}"
                f"{self._last_words()}"
            ) from None
        if not succeeded:
            raise EngineFailed(f"the engine's process failed:\n{value}{self._last_words()}")
        return value

    def pause(self) -> None:
        """Stop all of its processes, so that it takes no core while it waits."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Let its processes go on."""
        self._signal(signal.SIGCONT)

    def close(self) -> None:
        """Shut the engine down; what does not end by itself is killed, workers included."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            self.resume()
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._pipe.close()
        self._process.join(_CLOSE_SECONDS)
        # The child leads a process group of its own, so that nothing of its engine is left behind.
        if self._process.pid is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                deadline = time.monotonic() + (_TIDY_SECONDS if self._process.exitcode == 0 else 0)
                while time.monotonic() < deadline:
                    os.killpg(self._process.pid, 0)
                    time.sleep(0.05)
                os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        os.killpg(self._process.pid, number)

    def _last_words(self) -> str:
        if self._log is None or not self._log.exists():
            return ""
        lines = self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return "\nThe last lines that it wrote:\n" + "\n".join(lines) if lines else ""


def step_until(llm: Any, produced: dict[str, int], tokens: int | None) -> int:
    """Step until every request has so many tokens, or all have ended; returns how many steps.

    Args:
        produced: tokens that each request has; kept up to date.
        tokens: None: until all have ended.
    """
    engine, steps = llm.llm_engine, 0
    while engine.has_unfinished_requests() and (tokens is None or min(produced.values()) < tokens):
        steps += 1
        for output in engine.step():
            produced[output.request_id] = len(output.outputs[0].token_ids)
    return steps


def _serve(
    pipe: Any,
    environment: Mapping[str, str],
    options: dict[str, Any],
    log: Path | None,
    code: Path | None,
) -> None:
    os.setpgrp()
    if code is not None:
        sys.path.insert(0, str(code))
    for name in os.environ.keys() - environment.keys():
        del os.environ[name]
    os.environ.update(environment)
    if log is not None:
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        os.close(handle)
    llm: Any = None
    try:
        from vllm import LLM

        begun = time.perf_counter()
        llm = LLM(**options)
        pipe.send((True, time.perf_counter() - begun))
        while (order := pipe.recv()) is not None:
            function, args = order
            pipe.send((True, function(llm, *args)))
    except (EOFError, BrokenPipeError):
        pass  # whoever asked is gone
    except BaseException:
        with contextlib.suppress(OSError):
            pipe.send((False, traceback.format_exc()))
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
