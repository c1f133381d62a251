"""What PAT does to vLLM's front end, in the process that has the `LLM`."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import psutil

from pat_vllm.patches.replacing import replace

if TYPE_CHECKING:
    from vllm.config import ParallelConfig, VllmConfig


def patch_get_class(executor: type, resolve: Callable[[Any, Callable[[Any], type]], type]) -> None:
    """Have `Executor.get_class` call `resolve(vllm_config, original)`.

    Without it: vLLM takes the bare name "pat" for a dotted path and fails to import it, and nothing
    sets `worker_cls` and `scheduler_cls`, which belong to the executor. vLLM calls the method with
    each `VllmConfig` it builds, in the front end, before any worker starts. That makes it also the
    place to refuse what PAT cannot do. Missing seam: a registry of executor backends.
    """

    def wrap(original: Callable[[Any], type]) -> Callable[[Any], type]:
        return lambda vllm_config: resolve(vllm_config, original)

    replace(executor, "get_class", wrap, static=True)


def log_through_vllm() -> None:
    """Make PAT's loggers children of vLLM's.

    Without it: PAT's lines below WARNING are lost, for vLLM sets up handlers and level for the
    loggers below its own only. Missing seam: a logger for plugins.
    """
    logging.getLogger("pat_vllm").parent = logging.getLogger("vllm")


def serialize_sends() -> None:
    """Put a lock around the sends of each `LLM`'s client.

    Without it: two threads write to one ZMQ socket, which is not made for that. vLLM's synchronous
    client is made for one thread. `generate` runs in that one, and may abort requests just when
    another thread asks for a switch. Missing seam: a client that several threads may use.

    The class is changed, since a client that held a method of its own would outlive its `LLM`,
    and with it the engine.
    """
    from vllm.v1.engine.core_client import SyncMPClient

    locks: weakref.WeakKeyDictionary[Any, threading.Lock] = weakref.WeakKeyDictionary()
    of_locks = threading.Lock()

    def wrap(send: Callable[..., Any]) -> Callable[..., Any]:
        def locked(client: Any, *args: Any, **kwargs: Any) -> Any:
            with of_locks:
                lock = locks.setdefault(client, threading.Lock())
            with lock:
                return send(client, *args, **kwargs)

        return locked

    replace(SyncMPClient, "_send_input", wrap)


ENDS_WITHIN = 30.0
"""Seconds that an engine core has to end its workers and remove what they have left."""
_WORKERS_END_WITHIN = 10.0
"""Seconds that workers have to end by themselves once their engine core has ended."""


def let_engine_cores_end() -> None:
    """Have a front end wait up to `ENDS_WITHIN` for an engine core that it has asked to end.

    Then it ends what is left of the workers, which it has noted when the engine had started.

    Without it: vLLM kills the core and its workers after 5 s, and where a server ends at once. The
    core alone gives workers 4 s before it sends them a signal, and 4 s more. So on a busy machine
    engines are killed while they end, and shared memory stays, some of it until the machine is
    started again. And a worker that is stopped (SIGSTOP) outlives a core that was killed. Missing
    seams: a default that an executor can set; the workers' ids in the front end.
    """
    import vllm.v1.engine.utils as cores

    workers: dict[int, list[psutil.Process]] = {}

    def wrap_monitor(watch: Callable[[Any], None]) -> Callable[[Any], None]:
        def note_workers_and_watch(manager: Any) -> None:
            for process in manager.processes:
                with suppress(psutil.Error):
                    workers[process.pid] = psutil.Process(process.pid).children(recursive=True)
            watch(manager)

        return note_workers_and_watch

    def wrap(shutdown: Callable[..., None]) -> Callable[..., None]:
        def shut_down(processes: Sequence[Any], timeout: float | None = None) -> None:
            shutdown(processes, timeout=max(ENDS_WITHIN, timeout or 0.0))
            left = [worker for process in processes for worker in workers.pop(process.pid, ())]
            _, left = psutil.wait_procs(left, timeout=_WORKERS_END_WITHIN)
            for worker in left:
                with suppress(psutil.Error):
                    worker.kill()

        return shut_down

    replace(cores.CoreEngineProcManager, "monitor_engine_liveness", wrap_monitor)
    replace(cores, "shutdown", wrap)


def interrupt_starts() -> None:
    """Have Ctrl-C end the start of an engine, whenever it comes.

    Without it: while the front end waits for the engine core to start, vLLM takes the interrupt for
    the end of that wait. The core has ended by the same interrupt, and the front end then waits for
    its first message, up to 10 minutes (`VLLM_ENGINE_READY_TIMEOUT_S`). Missing seam: none, a
    mistake of `zmq_socket_ctx`, which vLLM 0.33 has, too. Near to it are vLLM's issue 32116 and its
    pull request 44751, with which this may go.
    """
    import vllm.v1.engine.utils as cores

    def wrap(stock: Callable[..., Any]) -> Callable[..., Any]:
        @contextmanager
        def socket(*args: Any, **kwargs: Any) -> Iterator[Any]:
            interrupt = None
            with stock(*args, **kwargs) as opened:
                try:
                    yield opened
                except KeyboardInterrupt as raised:
                    interrupt = raised
            if interrupt is not None:
                raise interrupt

        return socket

    replace(cores, "zmq_socket_ctx", wrap)


def tell_loggers(config_for_loggers: Callable[[VllmConfig], VllmConfig]) -> None:
    """Have vLLM's loggers of statistics be made for `config_for_loggers(vllm_config)`.

    Without it: `/metrics` has nothing of PAT's, and the loggers fail on its part of the statistics.
    They make the metrics of the KV connector that an engine's config names. PAT's config must name
    none, or every scheduler and worker would use it; the layouts' own configs do. Missing seam:
    stat loggers of plugins, which `LLM` does not load, and which turn statistics on in every engine
    of an installation.
    """
    from vllm.v1.metrics.loggers import StatLoggerManager

    def wrap(init: Callable[..., None]) -> Callable[..., None]:
        def made(self: StatLoggerManager, vllm_config: VllmConfig, *args: Any, **kw: Any) -> None:
            init(self, config_for_loggers(vllm_config), *args, **kw)

        return made

    replace(StatLoggerManager, "__init__", wrap)


_RAY_ADDRESS = "_pat_ray_address"


def note_ray_address(parallel: ParallelConfig, address: str) -> None:
    """Note the address of the Ray cluster in which an engine is configured, in its config.

    Without it: an engine core in a process of its own may join another cluster. vLLM passes the
    cluster on by an environment variable, from a Ray actor only, and not when
    VLLM_WORKER_MULTIPROC_METHOD=spawn is set. Missing seam: a field of `ParallelConfig` for it.
    The attribute is not part of the config's hash.
    """
    setattr(parallel, _RAY_ADDRESS, address)


def noted_ray_address(parallel: ParallelConfig) -> str | None:
    """What `note_ray_address` noted; None: the engine was not configured inside a cluster."""
    return getattr(parallel, _RAY_ADDRESS, None)
