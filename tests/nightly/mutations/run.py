"""Which mistakes of the table the suite of every change catches.

    python -m tests.nightly.mutations.run [--area NAME] [--jobs 2] [--output FILE]

Each mistake is made in a copy of the repository, in which its tests run. It is caught where one of
them fails. Where one cannot start, as where a mistake keeps an engine from starting, the same tests
have to run without the mistake. The runs are forked from a process that has imported vLLM.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from tests.nightly.mutations import table
from tests.nightly.mutations.mutation import Mutation

ROOT = Path(__file__).parents[3]
COPIED = ("pat_vllm", "tests", "benchmarks", "integrations", "docs", ".ci")
IGNORED = shutil.ignore_patterns("__pycache__", "results", "*.png", "*.egg-info")
PRELOADED = ("vllm", "vllm.v1.engine.core", "transformers")
OURS = {"pat_vllm", "tests", "benchmarks", "pat_verl", "pat_openrlhf"}
LIMIT = 900.0
"""Seconds after which a run is ended. A mistake that makes tests hang is not counted as caught."""


@dataclass(frozen=True)
class Verdict:
    """What came of a mistake.

    Attributes:
        status: pytest's exit status, 1 where tests failed; -1 where the run was ended; -2 where the
            tests do not start without the mistake, either.
        failed: the first test that failed.
        seconds: how long the run took.
    """

    name: str
    function: str
    status: int
    failed: str
    seconds: float

    @property
    def caught(self) -> bool:
        return self.status == 1 and bool(self.failed)


def areas() -> list[str]:
    """The names of the parts of the table."""
    return sorted(module.name for module in pkgutil.iter_modules(table.__path__))


def every_mutation(only: Sequence[str] = ()) -> list[Mutation]:
    """The rows of the table, or of some of its parts."""
    modules = (importlib.import_module(f"{table.__name__}.{name}") for name in only or areas())
    return [mutation for module in modules for mutation in module.MUTATIONS]


def judge(mutations: Iterable[Mutation], jobs: int = 2) -> Iterator[Verdict]:
    """Run the tests of each mutation, `jobs` at a time; verdicts come as the runs end."""
    # First those whose tests are pure, and must not find vLLM imported.
    left = sorted(mutations, key=lambda mutation: not _is_pure(mutation))
    running: dict[int, _Run] = {}
    sound: dict[tuple[str, ...], bool] = {}
    while left or running:
        while left and len(running) < jobs:
            mutation = left.pop(0)
            if not _is_pure(mutation):
                _preload()
            run = _Run(mutation)
            running[run.pid] = run
        for run in running.values():
            run.end_if_late()
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid in running:
            run = running.pop(pid)
            verdict = run.verdict(status)
            if verdict.failed.startswith("ERROR") and not _is_pure(run.mutation):
                tests = run.mutation.tests
                if tests not in sound:
                    sound[tests] = _Run(replace(run.mutation, changes={})).wait().status == 0
                if not sound[tests]:
                    verdict = replace(verdict, status=-2)
            yield verdict
        else:
            time.sleep(0.05)


def _is_pure(mutation: Mutation) -> bool:
    return all(test.startswith("tests/unit/") for test in mutation.tests)


def _preload() -> None:
    importlib.import_module("tests.conftest")  # vLLM's environment
    for name in PRELOADED:
        importlib.import_module(name)


class _Run:
    """The tests of a mutation, in a process of their own."""

    def __init__(self, mutation: Mutation) -> None:
        self.mutation = mutation
        self._begun = time.monotonic()
        self._folder = Path(tempfile.mkdtemp(prefix="pat-mutation-"))
        copy_to(self._folder)
        mutation.apply(self._folder)
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            status = 70
            try:
                os.setsid()
                status = self._test()
            finally:
                os._exit(status)

    def _test(self) -> int:
        log = os.open(self._folder / "pytest.log", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        for name in [name for name in sys.modules if name.split(".")[0] in OURS]:
            del sys.modules[name]
        folder = str(self._folder)
        sys.path[:] = [folder, *(path for path in sys.path if path not in ("", str(ROOT)))]
        os.environ |= {"PYTHONPATH": folder, "PYTHONDONTWRITEBYTECODE": "1"}
        sys.dont_write_bytecode = True
        os.chdir(folder)
        import pytest

        os.environ["HYPOTHESIS_PROFILE"] = "first failure"  # of tests/conftest.py
        return int(
            pytest.main(
                ["-x", "-q", "-p", "no:cacheprovider", "--durations=0", *self.mutation.tests]
            )
        )

    def end_if_late(self) -> None:
        if time.monotonic() - self._begun > LIMIT:
            os.killpg(self.pid, signal.SIGKILL)

    def wait(self) -> Verdict:
        """What came of it, once it has ended."""
        while True:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                return self.verdict(status)
            self.end_if_late()
            time.sleep(0.05)

    def verdict(self, status: int) -> Verdict:
        """What came of it, by the exit status of its process."""
        output = (self._folder / "pytest.log").read_text(errors="replace")
        failed = [
            line
            for line in output.splitlines()
            if line.startswith(("FAILED tests/", "ERROR tests/"))
        ]
        shutil.rmtree(self._folder, ignore_errors=True)
        return Verdict(
            self.mutation.name,
            self.mutation.function,
            os.waitstatus_to_exitcode(status) if os.WIFEXITED(status) else -1,
            failed[0][:200] if failed else "",
            round(time.monotonic() - self._begun, 1),
        )


def copy_to(folder: Path) -> None:
    """Copy what tests need of the repository."""
    for name in COPIED:
        shutil.copytree(ROOT / name, folder / name, ignore=IGNORED)
    for path in ROOT.iterdir():
        if path.is_file():
            shutil.copy(path, folder)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--area", action="append", default=[], choices=areas())
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--output", type=Path, help="a file of JSON lines, one for each mistake")
    options = parser.parse_args()
    mutations = every_mutation(options.area)
    caught = 0
    for verdict in judge(mutations, options.jobs):
        caught += verdict.caught
        word = "caught" if verdict.caught else f"MISSED ({verdict.status})"
        print(f"{word} {verdict.seconds:5.1f} s  {verdict.name}  {verdict.failed}", flush=True)
        if options.output:
            with options.output.open("a") as file:
                file.write(json.dumps(asdict(verdict) | {"caught": verdict.caught}) + "\n")
    print(f"{caught} of {len(mutations)} caught")


if __name__ == "__main__":
    main()
