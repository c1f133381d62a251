"""Ranks on imitated GPUs that start and switch. A program whose answers go by numbers of ranks.

Ranks that wait for each other in vain are ended: what they have come to tells why.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from tests.gpuless.programs import answer
from tests.gpuless.sequences import Event, Merge

SILENCE = 120.0
"""Seconds without an event, after which ranks have neither ended nor come to their next call."""


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

    @classmethod
    def read(cls, answer: dict[str, Any]) -> Outcome:
        """An outcome, from an answer of this program."""
        events = [[_event(fields) for fields in rank] for rank in answer["events"]]
        return cls(events, answer["errors"], answer["ended"])


def _event(fields: dict[str, Any]) -> Event:
    lists = {name: tuple(value) for name, value in fields.items() if isinstance(value, list)}
    return Event(**(fields | lists))


GPUS = 8
"""Of the imitated machine."""


def main(out: str, *sizes: str) -> None:
    """A case of each number of ranks."""
    import pat_vllm.worker.gpu_worker  # noqa: F401  # once for all ranks
    from tests.gpuless.platforms import become

    become("sm90", GPUS)
    import tests.gpuless.rank
    from tests.gpuless.matrix import engine_config

    configs = {
        int(size): engine_config("default", "v2", "gqa", tensor_parallel_size=int(size))
        for size in sizes
    }
    # One for all ranks, not one for each.
    resource_tracker.ensure_running()
    import tests.support.frozen  # noqa: F401

    for size, config in configs.items():
        answer(out, str(size), asdict(_run(config, size)))


def _run(config: Any, num_ranks: int) -> Outcome:
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
                _rank(rank, num_ranks, config, address, send)
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


def _rank(rank: int, num_ranks: int, config: Any, address: str, pipe: int) -> None:
    """Life and end of a child process."""
    from tests.gpuless.rank import live

    def tell(event: Event) -> None:
        os.write(pipe, json.dumps(asdict(event)).encode() + b"\n")

    try:
        live(rank, num_ranks, config, address, tell)
    except BaseException:
        os.write(pipe, json.dumps(traceback.format_exc()).encode() + b"\n")
    finally:
        os.close(pipe)
        os._exit(0)


def _follow(pipes: list[int]) -> Outcome:
    """What ranks do, until all have ended or those that have not wait in vain."""
    outcome = Outcome([[] for _ in pipes])
    merge, rest = Merge(len(pipes)), [b""] * len(pipes)
    phases: set[str] = set()
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
                for received in map(json.loads, lines):
                    if isinstance(received, str):
                        outcome.errors.append(received)
                        continue
                    event = _event(received)
                    if event.phase not in phases:
                        phases.add(event.phase)
                        print(event.phase, flush=True)
                    outcome.events[rank].append(event)
                    if event.waits:
                        merge.add(event)
    return outcome


if __name__ == "__main__":
    main(*sys.argv[1:])
