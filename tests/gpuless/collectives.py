"""Ranks on imitated GPUs that start and switch. A program whose answers go by numbers of ranks.

An answer has the events of each rank, in its order. Ranks that wait for each other in vain are
ended: what they have come to tells why.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
import time
import traceback
from dataclasses import asdict
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from tests.gpuless.programs import answer
from tests.gpuless.sequences import Event, Merge

SILENCE = 120.0
"""Seconds without an event, after which ranks have neither ended nor come to their next call."""
GPUS = 8
"""Of the imitated machine."""

Fields = dict[str, Any]


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
        with tempfile.TemporaryDirectory() as directory:
            answer(out, str(size), _run(config, size, Path(directory)))


def _run(config: Any, num_ranks: int, directory: Path) -> list[list[Fields]]:
    _note_peer_access(directory)
    # vLLM trusts the driver, or else tries peer access out, and all ranks wait for that.
    tried = num_ranks != GPUS
    os.environ |= {"VLLM_CACHE_ROOT": str(directory), "VLLM_SKIP_P2P_CHECK": str(int(not tried))}
    children = []
    for rank in range(num_ranks):
        sys.stdout.flush()
        if (child := os.fork()) == 0:
            _rank(rank, num_ranks, config, directory)
        children.append(child)
    try:
        return _follow(children, directory)
    finally:
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)


def _note_peer_access(directory: Path) -> None:
    """What vLLM found when it tried peer access out: every GPU reaches every other."""
    gpus = range(GPUS)
    name = f"gpu_p2p_access_cache_for_{','.join(map(str, gpus))}.json"
    access = {f"{own}->{other}": True for own in gpus for other in gpus}
    (directory / name).write_text(json.dumps(access))


def _rank(rank: int, num_ranks: int, config: Any, directory: Path) -> None:
    """Life and end of a child process."""
    from tests.gpuless.rank import live

    with open(directory / f"events of {rank}", "a", buffering=1) as file:

        def tell(event: Event) -> None:
            print(json.dumps(asdict(event)), file=file)

        try:
            live(rank, num_ranks, config, f"file://{directory}/rendezvous", tell)
        except BaseException:
            tell(Event(rank, "", "error", "", (), waits=False, detail=traceback.format_exc()))
        finally:
            os._exit(0)


def _follow(children: list[int], directory: Path) -> list[list[Fields]]:
    """What ranks do, until all have ended or those that have not wait in vain."""
    count, since = 0, time.monotonic()
    while True:
        ended = {
            rank
            for rank, child in enumerate(children)
            if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        }
        events = [_told(directory / f"events of {rank}") for rank in range(len(children))]
        stuck = Merge([[Event.read(fields) for fields in rank] for rank in events]).stuck(ended)
        if (now_told := sum(map(len, events))) > count:
            count, since = now_told, time.monotonic()
            print(f"{count} events", flush=True)
        if len(ended) == len(children) or stuck or time.monotonic() - since > SILENCE:
            return events
        time.sleep(0.2)


def _told(path: Path) -> list[Fields]:
    """Events so far."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main(*sys.argv[1:])
