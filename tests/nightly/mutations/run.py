"""Which mistakes of the table the suite of every change catches.

    python -m tests.nightly.mutations.run [--area NAME] [--jobs 2] [--output FILE]

Each mistake is made in a copy of the repository, in which its tests run. It is caught where one of
them fails. A run in which no test fails, or in which no test runs, has missed it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.nightly.mutations import table
from tests.nightly.mutations.mutation import Mutation

ROOT = Path(__file__).parents[3]
COPIED = ("pat_vllm", "tests", "benchmarks", "integrations", "docs", "README.md", "Makefile")
CONFIG = ("pyproject.toml", "CONTRIBUTING.md", "CHANGELOG.md", "MANIFEST.in", "LICENSE")
SILENCE = 900.0
"""Seconds after which a run has hung, which is a way to catch a mistake, though not a good one."""


@dataclass(frozen=True)
class Verdict:
    """What came of a mistake.

    Attributes:
        status: pytest's exit status; 1: tests failed. None: it hung.
        failed: the first test that failed.
        seconds: how long the run took.
        output: the end of pytest's output.
    """

    status: int | None
    failed: str
    seconds: float
    output: str

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


def copy_to(folder: Path, root: Path = ROOT) -> None:
    """Copy what tests need of a repository."""
    for name in (*COPIED, *CONFIG):
        source = root / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "results", "*.png", "*.egg-info")
            shutil.copytree(source, folder / name, ignore=ignored)
        elif source.exists():
            shutil.copy(source, folder / name)


def caught(
    mutation: Mutation, folder: Path, root: Path = ROOT, tests: Iterable[str] | None = None
) -> Verdict:
    """Make a mistake in a copy under an empty folder, and run its tests there.

    Args:
        root: the repository.
        tests: those to run, if not the mutation's own.
    """
    copy_to(folder, root)
    mutation.apply(folder)
    environment = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    environment["PAT_TEST_ALL"] = "1"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider"]
    command += ["--durations=0", *(mutation.tests if tests is None else tests)]
    begun = time.monotonic()
    log = folder / "pytest.log"
    with log.open("wb") as file:
        process = subprocess.Popen(
            command, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT
        )
        status: int | None
        try:
            status = process.wait(SILENCE)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            status = None
    output = log.read_text(errors="replace")
    failed = [line for line in output.splitlines() if line.startswith(("FAILED", "ERROR"))]
    return Verdict(status, failed[0] if failed else "", time.monotonic() - begun, output[-3000:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--area", action="append", default=[], choices=areas())
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    parser.add_argument("--output", type=Path, help="a JSON file with all verdicts")
    parser.add_argument("--root", type=Path, default=ROOT, help="another version's repository")
    parser.add_argument("--tests", type=Path, help="JSON: for each mistake, its tests there")
    options = parser.parse_args()
    elsewhere = json.loads(options.tests.read_text()) if options.tests else {}

    def judge(mutation: Mutation) -> Verdict:
        with tempfile.TemporaryDirectory(prefix="pat-mutation-") as folder:
            tests = elsewhere[mutation.name].split() if elsewhere else None
            return caught(mutation, Path(folder), options.root, tests)

    mutations = every_mutation(options.area)
    rows = []
    with ThreadPoolExecutor(options.jobs) as pool:
        for mutation, verdict in zip(mutations, pool.map(judge, mutations), strict=True):
            word = "caught" if verdict.caught else "MISSED"
            print(f"{word} {verdict.seconds:5.0f} s  {mutation.name}  {verdict.failed}", flush=True)
            rows.append({"name": mutation.name, "function": mutation.function, "word": word})
            rows[-1] |= {"status": verdict.status, "failed": verdict.failed}
            rows[-1] |= {"seconds": round(verdict.seconds, 1)}
            if options.output:
                options.output.write_text(json.dumps(rows, indent=1) + "\n")
    share = sum(row["word"] == "caught" for row in rows)
    print(f"{share} of {len(rows)} caught")


if __name__ == "__main__":
    main()
