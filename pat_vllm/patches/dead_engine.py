"""Whoever waits for an engine that is dead is told so, and of what it died.

A front end knows that an engine is dead from the moment in which vLLM sets `engine_dead` of its
client's resources: when the engine core says so, when the core's process has ended, or when the
client is shut down. That moment is the one place from which all waits are ended.
"""

from __future__ import annotations

import asyncio
import signal
import sys
import weakref
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pat_vllm.patches.replacing import replace

if TYPE_CHECKING:
    from vllm.v1.engine.core import EngineCoreProc
    from vllm.v1.engine.core_client import BackgroundResources, MPClient

_CAUSE = -2604
"""Id of the call that nobody makes: its answer, a failure, is the cause of the engine's death.

vLLM's own ids of calls are random positive numbers, and -1 and -2.
"""
_CLIENT, _TOLD = "_pat_client", "_pat_cause"
"""Attributes of a client's resources: the client, weakly, and the answer to the call `_CAUSE`."""
_TRIGGERED = "_pat_triggered"
"""Attribute of what wakes an engine core that a signal has asked to end."""


def end_waits_for_dead_engines() -> None:
    """In a front end, have every wait for an engine end with `EngineDeadError` once it is dead.

    Without it: after a worker's death a call that waits for its answer never returns. The thread
    that reads the engine's messages ends, and tells only who waits for outputs, once. The monitor
    of the core's process finds the engine dead already, and shuts nothing down. If the core itself
    is killed, nobody is told at all. Missing seam: a callback of `engine_dead`.
    """
    from vllm.v1.engine.core_client import BackgroundResources, MPClient, SyncMPClient
    from vllm.v1.engine.exceptions import EngineDeadError

    if isinstance(BackgroundResources.engine_dead, property):
        return
    setattr(BackgroundResources, "engine_dead", property(_is_dead, _set_dead))  # noqa: B010

    def start_monitor(stock: Callable[[MPClient], None]) -> Callable[[MPClient], None]:
        def start(client: MPClient) -> None:
            cause: Future[Any] = Future()
            client.utility_results[_CAUSE] = cause
            vars(client.resources).update({_TOLD: cause, _CLIENT: weakref.ref(client)})
            stock(client)

        return start

    def name_cause(stock: Callable[..., Any]) -> Callable[..., Any]:
        def check(client: MPClient, *args: Any) -> Any:
            try:
                result = stock(client, *args)
            except EngineDeadError:
                raise _error(client) from None
            return _error(client) if isinstance(result, EngineDeadError) else result

        return check

    def keep_error(stock: Callable[[SyncMPClient], Any]) -> Callable[[SyncMPClient], Any]:
        def get_output(client: SyncMPClient) -> Any:
            try:
                return stock(client)
            except EngineDeadError:
                client.outputs_queue.put_nowait(_error(client))  # for who asks again
                raise

        return get_output

    replace(MPClient, "start_engine_core_monitor", start_monitor)
    replace(MPClient, "ensure_alive", name_cause)
    replace(MPClient, "_format_exception", name_cause)
    replace(SyncMPClient, "get_output", keep_error)


def tell_cause_of_death() -> None:
    """In an engine core, have a message that tells the cause come before its last one.

    Without it: the front end's error says that the engine is dead, and not why. Missing seam: a
    text beside `ENGINE_CORE_DEAD`.
    """
    from vllm.v1.engine import EngineCoreOutputs, UtilityOutput
    from vllm.v1.engine.core import EngineCoreProc

    def wrap(send_dead: Callable[[EngineCoreProc], None]) -> Callable[[EngineCoreProc], None]:
        def send(core: EngineCoreProc) -> None:
            # vLLM calls this while it handles the exception that ends the core.
            cause = getattr(core.model_executor, "cause", "") or str(sys.exc_info()[1] or "")
            for client in range(len(core.addresses.outputs)):
                answer = UtilityOutput(call_id=_CAUSE, failure_message=cause)
                core.output_queue.put_nowait((client, EngineCoreOutputs(utility_output=answer)))
            send_dead(core)

        return send

    replace(EngineCoreProc, "_send_engine_dead", wrap)


def end_in_order() -> None:
    """Have no SIGTERM and no Ctrl-C kill an engine core while it ends.

    Without it: vLLM gives these signals their default action back before the core ends its workers
    and removes its rings of messages. A front end that hears then that the engine is dead, or of a
    Ctrl-C, asks the core to end, which kills it: a ring stays as long as Python's resource tracker
    lives. A core that hangs is still killed (`front_end.ENDS_WITHIN`). Missing seam: what a core
    does with signals at its end. vLLM's pull request 50529 does the same; with it this goes.
    """
    import vllm.v1.engine.core as core

    def set_action(number: int, action: Any) -> Any:
        return signal.signal(number, signal.SIG_IGN if action is signal.SIG_DFL else action)

    # Later than vLLM's own call would be too late.
    setattr(core, "signal", SimpleNamespace(**vars(signal) | {"signal": set_action}))  # noqa: B010


def let_signals_meet() -> None:
    """Have no engine core hang when a signal comes while it handles another.

    Without it: a Ctrl-C in a terminal reaches the core and the front end, which then sends the core
    SIGTERM. vLLM's handler sets a `threading.Event`. Where it interrupts itself in there, it waits
    for a lock that it holds, until the core is killed (`front_end.ENDS_WITHIN`). Missing seam:
    none, a mistake of `SignalCallback`, which vLLM 0.33 has, too, and no issue names. This goes
    when `trigger` takes no lock.
    """
    from vllm.v1.engine.utils import SignalCallback

    def wrap(trigger: Callable[[SignalCallback], None]) -> Callable[[SignalCallback], None]:
        def trigger_once(callback: SignalCallback) -> None:
            if not vars(callback).get(_TRIGGERED):
                vars(callback)[_TRIGGERED] = True
                trigger(callback)

        return trigger_once

    replace(SignalCallback, "trigger", wrap)


def let_others_remove_rings() -> None:
    """Have a process that has made a ring of messages not mind that it is removed already.

    Without it: the engine core removes what killed workers leave. Each other worker then ends with
    tracebacks of `ShmRingBuffer.__del__`, which hide the cause. Missing seam: `unlink` that may
    find nothing.
    """
    from vllm.distributed.device_communicators.shm_broadcast import ShmRingBuffer

    def wrap(remove: Callable[[ShmRingBuffer], None]) -> Callable[[ShmRingBuffer], None]:
        def remove_if_there(ring: ShmRingBuffer) -> None:
            with suppress(FileNotFoundError):
                remove(ring)

        return remove_if_there

    replace(ShmRingBuffer, "__del__", wrap)


def describe_exit(exitcode: int) -> str:
    """How a process has ended, by its exit code as `multiprocessing` has it."""
    if exitcode >= 0:
        return f"ended with exit status {exitcode}"
    with suppress(ValueError):
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"was killed by signal {-exitcode}"


def _is_dead(resources: BackgroundResources) -> bool:
    return bool(vars(resources).get("engine_dead", False))


def _set_dead(resources: BackgroundResources, dead: bool) -> None:
    vars(resources)["engine_dead"] = dead
    reference = vars(resources).get(_CLIENT)
    client = reference and reference()
    if dead and client is not None:
        _end_waits(client)


def _end_waits(client: MPClient) -> None:
    from vllm.v1.engine.core_client import SyncMPClient

    # Its own calls are registered before they look at `engine_dead`: none comes in between.
    for call_id, future in list(client.utility_results.items()):
        if call_id == _CAUSE:
            continue
        if isinstance(future, Future):
            with suppress(InvalidStateError):
                future.set_exception(_error(client))
        else:
            with suppress(RuntimeError):  # its event loop is closed
                future.get_loop().call_soon_threadsafe(_fail, future, _error(client))
    if isinstance(client, SyncMPClient) and hasattr(client, "outputs_queue"):
        client.outputs_queue.put_nowait(_error(client))


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)


def _error(client: MPClient) -> Exception:
    """vLLM's error, with the cause if it is known."""
    from vllm.v1.engine.exceptions import EngineDeadError

    error = EngineDeadError(suppress_context=True)
    if cause := _cause(client):
        error.args = (f"{error.args[0]} The cause: {cause}.",)
    return error


def _cause(client: MPClient) -> str:
    """What the engine core has told, or how its process has ended; empty if neither is known."""
    cause = vars(client.resources).get(_TOLD)
    if cause is not None and cause.done():
        return str(cause.exception()).rstrip(".")
    processes = getattr(client.resources.engine_manager, "finished_procs", None)
    ended: dict[str, int] = processes() if processes else {}
    return "; ".join(f"{name} {describe_exit(code)}" for name, code in ended.items() if code)
