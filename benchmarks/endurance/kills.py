"""Workers killed at random moments: each time a clear error soon, and nothing left.

    python -m benchmarks.endurance.kills --kills 50

For each kill an engine is started, which speculates, and is given a batch. A worker is killed (by
SIGKILL) in the middle of the batch, in a part of a switch, while it verifies drafts, or in a storm
of calls that several callers make at once. Each who waits must hear of it within 30 s, by an error
that says that the engine failed. Processes and shared memory that the engine had must be gone. Exit
status 1 if they are not.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import random
import re
import signal
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any
from unittest import mock

import psutil
import typer

from benchmarks.common import ENVIRONMENT
from benchmarks.endurance import callers, sabotage
from benchmarks.endurance import storm as storms
from benchmarks.endurance.processes import engine_processes, left_in_memory, names_held
from benchmarks.record import Summary, machine, table, write_results

ERROR_WITHIN = 30.0
"""Seconds from a worker's death to the front end's error."""
_GIVE_UP = 120.0
"""Seconds after which an engine that has not noticed is ended, so that the next has its turn."""
_GONE_WITHIN = 60.0
_TURNS = ("storm", "switch", "asynchronous storm", "switch", "storm", "batch", "verification")
STEP_TIMES_OUT_AFTER = 5
"""Seconds, where a worker is stopped and not killed. By default vLLM waits for a step 300 s."""


@dataclass(frozen=True)
class Kill:
    """Whom to kill, and when.

    Attributes:
        moment: one of `_TURNS`.
        part: of a switch: one of `sabotage.PARTS`.
        call: which call of the part, or which verification.
        delay: in the middle of a batch or a storm: seconds.
        tp: of the layout that the batch runs in, or that the switch leaves.
        callers: of a storm: of `callers.SYNC` or `callers.ASYNC`.
        seed: of what they do.
        stops: whether the worker is stopped (SIGSTOP), and lives.
    """

    moment: str
    rank: int
    tp: int
    part: str = ""
    call: int = 1
    delay: float = 0.0
    callers: tuple[str, ...] = ()
    seed: int = 0
    stops: bool = False

    @classmethod
    def draw(cls, moment: str, ranks: int, rng: random.Random, part: str = "") -> Kill:
        """A random one, of a switch in this part, or in any."""
        rank, tp = rng.randrange(ranks), rng.choice([tp for tp in (1, 2, 4) if ranks % tp == 0])
        if moment == "switch":
            part = part or rng.choice(sabotage.PARTS)
            return cls(moment, rank, tp, part, call=rng.randint(1, 4) if part == "KV" else 1)
        if moment == "verification":
            return cls(moment, rank, tp, call=rng.randint(1, 60))
        if moment.endswith("storm"):
            sync = moment == "storm"
            steps, others = (callers.SYNC[:2], callers.SYNC[2:]) if sync else ((), callers.ASYNC)
            chosen = rng.sample(others, rng.randint(1, len(others)))
            called = (*([rng.choice(steps)] if sync else []), *chosen)
            seed, delay = rng.randrange(1 << 30), rng.uniform(0, 1.5)
            stops = rng.random() < 0.1
            return cls(moment, rank, tp, delay=delay, callers=called, seed=seed, stops=stops)
        return cls(moment, rank, tp, delay=rng.uniform(0, 1.5))

    @property
    def name(self) -> str:
        """When, in words."""
        return f"{self.moment} {self.part}".strip() + (", stopped only" if self.stops else "")


@dataclass(frozen=True)
class Outcome:
    """What came of a kill.

    Attributes:
        errors: what each caller was told; empty if it waits for ever.
        noticed: seconds from the death to the last error; NaN if no worker died.
        gone: seconds from the death to the end of the last process.
        left: processes and shared memory that are there afterwards.
    """

    kill: Kill
    errors: dict[str, str]
    noticed: float
    gone: float
    left: list[str]

    @property
    def fine(self) -> bool:
        """Whether the error was clear and in time, and nothing is left."""
        return self.clear and self.noticed <= ERROR_WITHIN and not self.left

    @property
    def clear(self) -> bool:
        """Whether each error says that the engine failed."""
        errors = self.errors.values()
        return all(re.search(r"EngineDeadError|[Ff]ailed|died", error) for error in errors)


def kill_one(kill: Kill, ranks: int = 2) -> Outcome:
    """Start an engine, kill a worker of it, and see what comes of it."""
    before = psutil.Process().children(recursive=True)
    held_before = names_held([psutil.Process()])
    with tempfile.TemporaryDirectory() as scratch:
        note = Path(scratch) / "died"
        timeout = {"VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": str(STEP_TIMES_OUT_AFTER)}
        environment = mock.patch.dict(os.environ, timeout if kill.stops else {})
        with environment, _engine(kill, ranks) as llm:
            processes = engine_processes(before)
            spawned = processes["engine core"] + processes["workers"]
            held = names_held([psutil.Process(), *spawned]) - held_before
            with _ended_after(_GIVE_UP, processes["engine core"]):
                heard = _run_until_it_fails(llm, kill, ranks, note)
            died = float(note.read_text()) if note.exists() else math.nan
            _, alive = psutil.wait_procs(spawned, timeout=_GONE_WITHIN)
            gone = time.monotonic()
    left = [f"process {process.pid}" for process in alive] + left_in_memory(held)
    errors = {name: caller.error for name, caller in heard.items()}
    last = max(caller.time for caller in heard.values())
    return Outcome(kill, errors, last - died, gone - died, left)


def _engine(kill: Kill, ranks: int) -> contextlib.AbstractContextManager[Any]:
    from tests.support.engines import OPTIONS, engine
    from tests.support.fork_server import start_from_server
    from tests.support.models import random_model

    pat = {"kv_transfer": "migrate"}
    if kill.moment != "asynchronous storm":
        return engine(
            storms.MODEL,
            ranks,
            pat,
            in_process=False,
            speculative_config=storms.SPECULATIVE,
        )
    start_from_server(True)
    static = {"policy": {"kind": "static", "tp": kill.tp}}
    return callers.asynchronous(
        model=str(random_model(storms.MODEL)),
        tensor_parallel_size=ranks,
        additional_config={"pat": pat | static},
        speculative_config=dict(storms.SPECULATIVE),
        **OPTIONS,
    )


def _run_until_it_fails(llm: Any, kill: Kill, ranks: int, note: Path) -> dict[str, callers.Heard]:
    """Give the engine work until it fails; what its callers hear."""
    if not kill.moment.endswith("storm"):
        error = _run_alone_until_it_fails(llm, kill, ranks, note)
        return {"step": callers.Heard(error, time.monotonic())}
    pids: list[int] = []

    def kill_worker() -> None:
        time.sleep(kill.delay)
        _kill(pids[kill.rank], note, signal.SIGSTOP if kill.stops else signal.SIGKILL)

    sizes = [tp for tp in (1, 2, 4) if ranks % tp == 0]
    if kill.moment == "storm":
        pids += llm.collective_rpc(sabotage.process_id)
    else:
        pids += llm.run(llm.llm.collective_rpc(sabotage.process_id))
    return callers.storm(llm, kill.callers, kill.seed, sizes, kill_worker)


def _run_alone_until_it_fails(llm: Any, kill: Kill, ranks: int, note: Path) -> str:
    import pat_vllm

    pat_vllm.switch(llm, tp=kill.tp)
    workers = llm.collective_rpc(sabotage.process_id)
    if kill.moment == "switch":
        llm.collective_rpc(
            sabotage.die_in_switch, args=(kill.rank, kill.part, kill.call, str(note))
        )
    elif kill.moment == "verification":
        llm.collective_rpc(sabotage.die_in_verification, args=(kill.rank, kill.call, str(note)))
    callers.add_batch(llm)
    try:
        # All of them run.
        for _ in range(20):
            llm.llm_engine.step()
        if kill.moment == "batch":
            threading.Timer(kill.delay, _kill, (workers[kill.rank], note)).start()
        elif kill.moment == "switch":
            pat_vllm.switch(llm, tp=1 if kill.tp == ranks else ranks)
        while True:
            if not llm.llm_engine.has_unfinished_requests():
                callers.add_batch(llm)
            llm.llm_engine.step()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _kill(pid: int, note: Path, number: int = signal.SIGKILL) -> None:
    note.write_text(str(time.monotonic()))
    os.kill(pid, number)


@contextlib.contextmanager
def _ended_after(seconds: float, processes: Sequence[psutil.Process]) -> Iterator[None]:
    """Kill processes if what is inside takes longer."""
    timer = threading.Timer(seconds, lambda: [process.kill() for process in processes])
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _text(outcomes: Sequence[Outcome], ranks: int) -> str:
    text = (
        f"A worker of {ranks} killed by SIGKILL, each time in a new engine that speculates "
        "(n-gram, up to 4 drafts), a tiny random model. `error`: from the death to the last "
        "caller's error; `gone`: to the end of the last process. Median (low-high), s. `left`: "
        "processes and shared memory.\n\n"
    )
    by_moment: dict[str, list[Outcome]] = {}
    for outcome in outcomes:
        by_moment.setdefault(outcome.kill.name, []).append(outcome)
    rows = [
        [
            name,
            len(of_moment),
            sum(outcome.clear and outcome.noticed <= ERROR_WITHIN for outcome in of_moment),
            Summary.of([outcome.noticed for outcome in of_moment]).show(),
            Summary.of([outcome.gone for outcome in of_moment]).show(),
            sum(len(outcome.left) for outcome in of_moment) or "nothing",
        ]
        for name, of_moment in sorted(by_moment.items())
    ]
    clear = f"clear error within {ERROR_WITHIN:.0f} s"
    text += table(["killed in", "kills", clear, "error", "gone", "left"], rows)
    for outcome in outcomes:
        if not outcome.fine:
            text += f"\n* {outcome.kill}: {outcome.errors}; left {outcome.left or 'nothing'}\n"
    return text


def run(
    kills: Annotated[int, typer.Option(min=1, help="Each in an engine of its own.")] = 50,
    ranks: Annotated[int, typer.Option(min=2, help="Of an engine.")] = 2,
    seed: Annotated[int, typer.Option(min=0, help="Of the moments.")] = 0,
) -> None:
    """Kill workers, and see whether the front end is told, and whether something is left."""
    os.environ.update(ENVIRONMENT | storms.ENVIRONMENT)
    facts = machine()
    rng = random.Random(seed)
    parts = itertools.cycle(sabotage.PARTS)
    outcomes = []
    for i, moment in enumerate(itertools.islice(itertools.cycle(_TURNS), kills)):
        kill = Kill.draw(moment, ranks, rng, next(parts) if moment == "switch" else "")
        outcome = kill_one(kill, ranks)
        outcomes.append(outcome)
        print(f"{i + 1}/{kills}", "fine" if outcome.fine else "NOT FINE", outcome, flush=True)
    body = {"ranks": ranks, "seed": seed, "kills": [asdict(outcome) for outcome in outcomes]}
    write_results("kills", facts, body, _text(outcomes, ranks))
    raise typer.Exit(not all(outcome.fine for outcome in outcomes))


if __name__ == "__main__":
    typer.run(run)
