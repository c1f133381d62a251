"""Engine cores and workers start from a server that has already imported vLLM.

Each spends most of its start on imports: eight seconds, in which a small engine's tests could have
run; and then on collecting garbage among what it has imported. What they do is not changed, and
neither is their environment.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import importlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import forkserver
from typing import Any

import psutil

_PRELOADED = [
    "pat_vllm.worker.cpu_worker",
    "pat_vllm.scheduler.scheduler",
    "vllm.v1.engine.core",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.llama",
    "vllm.model_executor.models.qwen2",
    "vllm.model_executor.models.qwen3",
    # The last one.
    "tests.support.frozen",
]


def preload() -> None:
    """Say what the server of this process imports when it starts; there is one for all."""
    multiprocessing.set_forkserver_preload(_PRELOADED)


@contextlib.contextmanager
def another_server(preloaded: tuple[str, ...]) -> Iterator[None]:
    """Inside, processes start from a server that began with the environment of the first time.

    Args:
        preloaded: what it imports beside what the server of this process does.
    """
    server = _server(preloaded)
    stock = forkserver.connect_to_new_process
    forkserver.connect_to_new_process = server.connect_to_new_process
    try:
        yield
    finally:
        forkserver.connect_to_new_process = stock


@functools.cache
def _server(preloaded: tuple[str, ...]) -> forkserver.ForkServer:
    server = forkserver.ForkServer()
    server.set_forkserver_preload([*_PRELOADED[:-1], *preloaded, _PRELOADED[-1]])
    server.ensure_running()
    atexit.register(_end, server)
    return server


def _end(server: forkserver.ForkServer) -> None:
    # By itself it would wait for the last process that it has started.
    os.kill(server._forkserver_pid, signal.SIGKILL)  # type: ignore[attr-defined]
    server._stop()  # type: ignore[attr-defined]


def context() -> Any:
    """A multiprocessing context: its processes start from the server, and so do their engines."""
    preload()
    return _Context(multiprocessing.get_context("forkserver"))


class Program:
    """In the place of `subprocess.Popen`, for `python -m MODULE ARGUMENT...`: from the server.

    The module's `main` runs in a new process; what that prints is appended to the file `stdout`.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        stdout: Any,
        start_new_session: bool = False,
        **_: Any,
    ) -> None:
        module, *arguments = command[command.index("-m") + 1 :]
        self._process = context().Process(
            target=_run_program,
            args=(module, arguments, dict(env), stdout.name, start_new_session),
        )
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self) -> int | None:
        """Its exit status, None while it runs."""
        return self._process.exitcode

    def poll(self) -> int | None:
        """Its exit status, None while it runs."""
        return self.returncode

    def wait(self) -> int:
        """Its exit status, when it has ended."""
        self._process.join()
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ask it to end."""
        self._process.terminate()


def _run_program(
    module: str,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    log: str,
    start_new_session: bool,
) -> None:
    if start_new_session:
        os.setsid()
    os.environ.clear()
    os.environ.update(environment)
    handle = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(handle, 1)
    os.dup2(handle, 2)
    try:
        importlib.import_module(module).main(*arguments)
    finally:
        # As a program ends: by itself a process of multiprocessing waits for those that it has
        # started before it shuts an engine down.
        atexit._run_exitfuncs()


_from_server = False


def start_from_server(yes: bool = True) -> None:
    """To be called before an engine is made; the server starts with the first process.

    Args:
        yes: or the engine's processes start as they do for users.
    """
    global _from_server
    _from_server = yes
    if yes:
        _patch()


@functools.cache
def _patch() -> None:
    import vllm.v1.engine.utils as cores
    import vllm.v1.executor.multiproc_executor as workers

    forked = context()
    stock = workers.get_mp_context

    def get_mp_context() -> Any:
        own = stock()  # with vLLM's own preparations
        return forked if _from_server else own

    cores.get_mp_context = workers.get_mp_context = get_mp_context


class _Context:
    """A multiprocessing context whose processes have the environment of who starts them."""

    def __init__(self, context: Any) -> None:
        self._context = context

    def Process(self, target: Callable[..., None], **arguments: Any) -> Any:
        inside = functools.partial(_run, dict(os.environ), target)
        return self._context.Process(target=inside, **arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def _run(
    environment: Mapping[str, str], target: Callable[..., None], *args: Any, **arguments: Any
) -> None:
    os.environ.clear()
    os.environ.update(environment)
    # The operating system's parent is the server. PAT ends a process whose parent is another one
    # than the process that started it.
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    pid = parent.pid
    os.getppid = lambda: pid if psutil.pid_exists(pid) else 1
    # An engine core's workers come from the same server, whose address it knows: it must not start
    # one of its own.
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined, method-assign]
    start_from_server()
    target(*args, **arguments)
