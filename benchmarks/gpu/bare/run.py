"""On the bare machine: `python -m benchmarks.gpu.bare.run [STEP [ARGUMENT...] [+ STEP...]]`.

Steps run in a session of their own, which outlives this command, after those of commands before:
one after the other, and those behind `/` beside those before it. The command waits for them for
`PATIENCE` seconds, shows what they say, and puts all results so far into the folder OUT, as one
archive. Without steps it only waits.
"""

from __future__ import annotations

import argparse
import fcntl
import itertools
import json
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import IO, Any

from benchmarks.gpu.bare.receive import KEPT, SITES
from benchmarks.gpu.known import write_config
from pat_vllm.models.known_models import MODEL_SHAPES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
OUT = Path(os.environ.get("OUT", ROOT / "build" / "bare" / "results"))
RESULTS, MODEL, LOCK = KEPT / "results", KEPT / "model", KEPT / "lock"
JOURNAL = RESULTS / "journal.log"
SHOWN = 4000  # characters of a log
PATIENCE = 540  # seconds; at 600 the machine ends a command

RANKS = int(os.environ.get("RANKS", "2"))
FLASHINFER = bool(os.environ.get("FLASHINFER"))
SITE = SITES["vllm"]
_FOLDERS = (HERE / "start", SITE, *([SITES["flashinfer"]] if FLASHINFER else []), ROOT)
ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(map(str, _FOLDERS)),
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CACHE_ROOT": str(KEPT / "cache"),
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": str(int(FLASHINFER)),
    # There is no network.
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}
ONE_GPU = ("two", "twographs", "tests", "memory")
"""Steps whose ranks share the GPU."""


def commands(step: str, arguments: Sequence[str], out: Path, ranks: int) -> list[list[str]]:
    """The commands of a step, which begin with "pat-vllm" or "python".

    Args:
        arguments: further ones; the first of "profile" and "memory" is the name of a model. The
            objects of `--engine` are one.

    Raises:
        ValueError: there is no such step or model, or kernels for it are not here.
    """
    parser = argparse.ArgumentParser(prog=step, allow_abbrev=False, add_help=False)
    parser.add_argument("--engine", type=json.loads, default={})
    # vLLM counts what the other ranks hold as its own.
    small = {"gpu_memory_utilization": 0.4 / ranks}
    doctor = f"pat-vllm doctor --ranks {ranks} --output-dir {out}".split()
    if step == "smoke":
        return [["python", "-m", "benchmarks.gpu.bare.smoke", *arguments]]
    if step == "kernels":
        return [["python", "-m", "benchmarks.gpu", "--out", str(out), *arguments]]
    if step == "tests":
        return [["python", "-m", "pytest", "-m", "gpu", "tests/gpu", *arguments]]
    if step in ("profile", "memory"):
        name, *more = arguments
        if name not in MODEL_SHAPES:
            raise ValueError(f"no model {name!r}: {', '.join(MODEL_SHAPES)}")
        if step == "memory":
            program = f"python -m benchmarks.gpu.bare.memory {MODEL} --ranks {ranks}"
            return [[*program.split(), *more]]
        limits = "--max-model-len 16384 --max-num-seqs 256 --tensor-parallel-size 1"
        command = f"pat-vllm profile {MODEL} --load-format dummy --output {out}/profile-{name}.json"
        return [[*f"{command} {limits}".split(), *more]]
    if step in ("two", "twographs"):
        given, more = parser.parse_known_args(arguments)
        eager = {"disable_custom_all_reduce": True} if step == "two" else {}
        engine = json.dumps({**small, **eager, **given.engine})
        return [[*doctor, *(["--eager"] if step == "two" else []), "--engine", engine, *more]]
    raise ValueError(f"no step {step!r}: smoke, kernels, profile, memory, two, twographs, tests")


def check_shape(arguments: Sequence[str], site: Path) -> None:
    """Refuse a model whose kernels did not travel.

    Raises:
        ValueError: says how they travel.
    """
    # What these import has travelled, too.
    from pat_vllm.doctor.models import SHAPES

    for option, shape in itertools.pairwise(arguments):
        mixture = option == "--shape" and shape in SHAPES and SHAPES[shape].experts
        if mixture and not [*site.glob("vllm/_moe_C_*")]:
            raise ValueError(f"--shape {shape} needs kernels for experts: pack --experts")


def steps_of(words: Sequence[str]) -> list[list[list[str]]]:
    """Steps with their arguments, by those that follow each other.

    Raises:
        ValueError: there is none of that name.
    """
    chains = [
        [list(step) for of_step, step in itertools.groupby(chain, "+".__ne__) if of_step]
        for of_chain, chain in itertools.groupby(words, "/".__ne__)
        if of_chain
    ]
    for step, *arguments in itertools.chain(*chains):
        commands(step, arguments, RESULTS, RANKS)
    return chains


def run(step: str, arguments: Sequence[str], out: Path) -> bool:
    """Run the commands of a step until one fails; whether none did.

    Args:
        out: folder for its results, beside which its log is.
    """
    programs = {
        "python": [sys.executable],
        "pat-vllm": [sys.executable, "-c", "from pat_vllm.cli.app import app; app()"],
    }
    environment = {**os.environ, **ENVIRONMENT}
    if step in ONE_GPU:
        environment["PAT_ONE_GPU"] = str(RANKS)
    out.mkdir()
    log, begun = out.with_suffix(".log"), time.monotonic()
    if step in ("profile", "memory"):
        write_config(MODEL, arguments[0])
    with log.open("wb") as file:
        call = partial(subprocess.call, cwd=ROOT, env=environment, stdout=file, stderr=file)
        todo = commands(step, arguments, out, RANKS)
        passed = all(call([*programs[program], *words]) == 0 for program, *words in todo)
    seconds = time.monotonic() - begun
    verdict = f"{'passed' if passed else 'FAILED'} after {seconds:.0f} s"
    end = log.read_text(errors="replace")[-SHOWN:]
    print(f"{end}\n== {shlex.join([step, *arguments])} {verdict}", flush=True)
    return passed


def run_all(words: Sequence[str]) -> bool:
    """Run steps, each to its end; whether all passed."""
    first = len([*RESULTS.glob("*-*.log")])
    numbers = itertools.count(first)
    chains = [
        [(step, arguments, RESULTS / f"{next(numbers):02}-{step}") for step, *arguments in chain]
        for chain in steps_of(words)
    ]
    for _, arguments, _ in itertools.chain(*chains):
        check_shape(arguments, SITE)
    with ThreadPoolExecutor(len(chains)) as beside:
        return all([*beside.map(lambda chain: all([run(*step) for step in chain]), chains)])


def when_free(until: float) -> IO[str] | None:
    """The lock that a session of steps holds; None if one still has it at that time."""
    lock = LOCK.open("w")
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if time.monotonic() > until:
                lock.close()
                return None
            time.sleep(0.5)


def main(words: Sequence[str]) -> int:
    """Begin steps if some are given, and wait; the exit status, 2 while some still run."""
    until = time.monotonic() + PATIENCE
    steps_of(words)
    RESULTS.mkdir(parents=True, exist_ok=True)
    JOURNAL.touch()
    seen = len(JOURNAL.read_text(errors="replace"))
    free = when_free(until)
    if free is not None and words:
        # Whoever inherits the lock holds it.
        program = [sys.executable, "-m", "benchmarks.gpu.bare.run", "--now", *words]
        environment = {**os.environ, **ENVIRONMENT}
        with free, JOURNAL.open("ab") as journal:
            outlives: dict[str, Any] = {"start_new_session": True, "pass_fds": [free.fileno()]}
            subprocess.Popen(
                program, cwd=ROOT, env=environment, stdout=journal, stderr=journal, **outlives
            )
        free = when_free(until)
    journal_so_far = JOURNAL.read_text(errors="replace")
    print(journal_so_far[-3 * SHOWN :])
    OUT.mkdir(parents=True, exist_ok=True)
    shutil.make_archive(str(OUT / "results"), "xztar", RESULTS)
    if free is None:
        print("== still at it: call again without a step")
        return 2
    free.close()
    verdicts = [line for line in journal_so_far[seen:].splitlines() if line.startswith("== ")]
    return int(any("FAILED" in line for line in verdicts))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--now"]:
        try:
            sys.exit(not run_all(sys.argv[2:]))
        except ValueError as error:
            sys.exit(f"== FAILED: {error}")
    sys.exit(main(sys.argv[1:]))
