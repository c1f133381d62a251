"""Ranks on imitated GPUs that start and switch. A program that prints a line of JSON per case.

A case is a number of ranks, and possibly a mistake. Ranks that wait for each other in vain are
ended: what they have come to tells why.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from tests.gpuless.sequences import Event, Merge
from tests.support.mutation import mutated

SILENCE = 120.0
"""Seconds without an event, after which ranks have neither ended nor come to their next call."""


@dataclass(frozen=True)
class Mistake:
    """A change of PAT's code.

    Attributes:
        function: what is changed: a module and a name in it.
        changes: what replaces what.
        rank: of whom; None is all.
    """

    function: str
    changes: dict[str, str]
    rank: int | None = None


_INIT = "pat_vllm.worker.worker:PATWorkerMixin.init_device"
_SWITCH = "pat_vllm.worker.worker:PATWorkerMixin.pat_switch"
_MAKE_GROUP = "pat_vllm.worker.runtime:make_tp_group"

MISTAKES = {
    "peers are asked for by their place in the group": Mistake(
        "pat_vllm.patches.groups:probe_p2p_between",
        {"custom_all_reduce._can_p2p = can_p2p": "pass"},
    ),
    "a rank makes its groups in another order": Mistake(
        _INIT, {"for layout in layouts\n": "for layout in layouts[::-1]\n"}, rank=1
    ),
    "groups are made by their members only": Mistake(
        _MAKE_GROUP,
        {"in range(layout.replicas)": "in [torch.distributed.get_rank() % layout.replicas]"},
    ),
    "a rank's device is its place in the group": Mistake(
        _INIT, {"(layout, self.local_rank,": "(layout, layout.tp_rank_of(self.rank),"}
    ),
    "a rank measures its layouts in another order": Mistake(
        "pat_vllm.worker.gpu_worker:PATGPUWorker.determine_available_memory",
        {"reversed(runtimes)": "runtimes"},
        rank=1,
    ),
    "a layout keeps the workspace of another": Mistake(
        "pat_vllm.patches.groups:_change_workspaces",
        {"vars(module).update(": "dict().update("},
    ),
    "a rank does not take part in an exchange": Mistake(
        _SWITCH, {"if command.moves:": "if command.moves and self.rank != 2:"}
    ),
    "a switch makes its exchange": Mistake(
        _SWITCH,
        {"kv_bytes = 0\n": "kv_bytes = 0; Exchange(device_world_group(), self.device)\n"},
    ),
}


@dataclass
class Outcome:
    """What the ranks of a case have done.

    Attributes:
        events: of each rank, in its order.
        errors: of ranks that have failed, as text.
        ended: ranks that have come to their end.
    """

    events: list[list[Event]]
    errors: list[str] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)


def read(line: str) -> tuple[str, Outcome]:
    """A case's name and outcome, from a line of this program."""
    name, outcome = json.loads(line)
    events = [[_event(one) for one in rank] for rank in outcome["events"]]
    return name, Outcome(events, outcome["errors"], outcome["ended"])


def _event(told: dict[str, Any]) -> Event:
    lists = {name: tuple(value) for name, value in told.items() if isinstance(value, list)}
    return Event(**(told | lists))


GPUS = 8
"""Of the imitated machine."""


def main(sizes: list[int]) -> None:
    """One case of each size without a mistake, and each mistake with the first of them."""
    import pat_vllm.worker.gpu_worker  # noqa: F401  # once for all ranks
    from tests.gpuless.platforms import become

    become("sm90", GPUS)
    import vllm.model_executor.models.registry as registry

    # vLLM looks at each new model class in a process of its own, which takes long.
    registry._run_in_subprocess = lambda fn: fn()  # type: ignore[assignment]
    import tests.gpuless.rank
    from tests.gpuless.matrix import _engine_config

    configs = {
        size: _engine_config("default", "v2", "gqa", tensor_parallel_size=size) for size in sizes
    }
    # One for all ranks, not one for each.
    resource_tracker.ensure_running()
    import tests.support.frozen  # noqa: F401

    for size in sizes:
        _print(str(size), _run(configs[size], size))
    for name, mistake in MISTAKES.items():
        _print(name, _run(configs[sizes[0]], sizes[0], mistake))


def _print(name: str, outcome: Outcome) -> None:
    print(json.dumps([name, asdict(outcome)]), flush=True)


def _run(config: Any, num_ranks: int, mistake: Mistake | None = None) -> Outcome:
    with tempfile.TemporaryDirectory() as directory:
        _note_peer_access(Path(directory))
        # vLLM trusts the driver, or else tries peer access out, and all ranks wait for that.
        tried = num_ranks != GPUS
        environment = {"VLLM_CACHE_ROOT": directory, "VLLM_SKIP_P2P_CHECK": str(int(not tried))}
        address = f"file://{directory}/rendezvous"
        children, pipes = [], []
        for rank in range(num_ranks):
            receive, send = os.pipe()
            sys.stdout.flush()
            if (child := os.fork()) == 0:
                os.close(receive)
                os.environ.update(environment)
                _rank(rank, num_ranks, config, address, mistake, send)
            os.close(send)
            children.append(child)
            pipes.append(receive)
        try:
            return _follow(pipes)
        finally:
            for child in children:
                os.kill(child, signal.SIGKILL)
                os.waitpid(child, 0)
            for receive in pipes:
                os.close(receive)


def _note_peer_access(directory: Path) -> None:
    """What vLLM found when it tried peer access out: every GPU reaches every other."""
    gpus = range(GPUS)
    name = f"gpu_p2p_access_cache_for_{','.join(map(str, gpus))}.json"
    found = {f"{own}->{other}": True for own in gpus for other in gpus}
    (directory / name).write_text(json.dumps(found))


def _rank(
    rank: int, num_ranks: int, config: Any, address: str, mistake: Mistake | None, pipe: int
) -> None:
    """Life and end of a child process."""
    from tests.gpuless.rank import live

    def tell(event: Event) -> None:
        os.write(pipe, json.dumps(asdict(event)).encode() + b"\n")

    def run() -> None:
        live(rank, num_ranks, config, address, tell)

    try:
        if mistake is not None and mistake.rank in (None, rank):
            with mutated(_find(mistake.function), mistake.changes):
                run()
        else:
            run()
    except BaseException:
        os.write(pipe, json.dumps(traceback.format_exc()).encode() + b"\n")
    finally:
        os.close(pipe)
        os._exit(0)


def _find(function: str) -> Callable[..., Any]:
    module, path = function.split(":")
    found: Any = __import__(module, fromlist=["_"])
    for name in path.split("."):
        found = vars(found)[name]
    return found


def _follow(pipes: list[int]) -> Outcome:
    """What ranks do, until all have ended or those that have not wait in vain."""
    outcome = Outcome([[] for _ in pipes])
    merge, rest = Merge(len(pipes)), [b""] * len(pipes)
    with selectors.DefaultSelector() as selector:
        for rank, pipe in enumerate(pipes):
            selector.register(pipe, selectors.EVENT_READ, rank)
        while selector.get_map() and not merge.stuck(outcome.ended):
            ready = selector.select(SILENCE)
            if not ready:
                outcome.errors.append(f"silent for {SILENCE:.0f} s")
                break
            for key, _ in ready:
                rank = key.data
                if not (some := os.read(pipes[rank], 1 << 16)):
                    selector.unregister(pipes[rank])
                    outcome.ended.append(rank)
                    continue
                *lines, rest[rank] = (rest[rank] + some).split(b"\n")
                for told in map(json.loads, lines):
                    if isinstance(told, str):
                        outcome.errors.append(told)
                        continue
                    event = _event(told)
                    outcome.events[rank].append(event)
                    if event.waits:
                        merge.add(event)
    return outcome


if __name__ == "__main__":
    main([int(size) for size in sys.argv[1:]])
