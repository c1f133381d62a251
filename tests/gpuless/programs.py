"""Programs of this folder, each run as a process of its own because it changes vLLM for good.

A program gets a file to write its answers to, a line of JSON each: a name and a value. Tests wait
for the answers that they need while the program goes on.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.child import SILENCE, Child

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"


def answer(out: str, name: str, value: Any) -> None:
    """Write an answer to a program's file."""
    print(f"{name}: done", flush=True)
    with open(out, "a") as file:
        file.write(json.dumps([name, value]) + "\n")


def in_child(name: str, work: Callable[[], None]) -> None:
    """Have a fork of this process do what changes a process for good."""
    if (child := os.fork()) == 0:
        status = 1
        try:
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0, name


class Program:
    """A program at work."""

    def __init__(self, child: Child, out: Path) -> None:
        self.child = child
        self._out = out

    def answers(self) -> list[tuple[str, Any]]:
        """Those so far."""
        lines = self._out.read_text().split("\n")[:-1] if self._out.exists() else []
        return [(name, value) for name, value in map(json.loads, lines)]

    def of(self, name: str) -> Any:
        """The value of a name, when it is there.

        Raises:
            AssertionError: the program has ended without it, or is silent.
        """
        self.child.wait_for(lambda: name in dict(self.answers()), name)
        return dict(self.answers())[name]

    def all_of(self) -> list[tuple[str, Any]]:
        """Every answer, after the program's end."""
        assert self.child.wait() == 0, self.child.tail()
        return self.answers()


@contextmanager
def running(
    module: str,
    folder: Path,
    *args: str,
    support: str = "v2_on_cpu",
    silence: float = SILENCE,
    without: tuple[str, ...] = (),
    **environment: str,
) -> Iterator[Program]:
    """`python -m tests.gpuless.<module> OUT ARGS...`, which is killed at the end.

    Args:
        folder: for its log and its answers.
        support: folder of `tests/support` that is on its path.
        without: environment variables that it does not get.
        environment: those that it gets beside this process's.
    """
    path = [os.environ.get("PYTHONPATH", ""), str(SUPPORT / support), str(ROOT)]
    variables = {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        "TRITON_INTERPRET": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "1",
    }
    inherited = {name: value for name, value in os.environ.items() if name not in without}
    out = folder / "answers.jsonl"
    child = Child(
        [sys.executable, "-m", f"tests.gpuless.{module}", str(out), *args],
        folder / "log",
        silence=silence,
        cwd=ROOT,
        env=inherited | variables | environment,
    )
    try:
        yield Program(child, out)
    finally:
        child.kill()


def program(module: str, parameter: str, **environment: Any) -> Any:
    """A module's fixture: a program with the values of a parameter that the module's tests have."""

    @pytest.fixture(scope="module")
    def started(
        request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
    ) -> Iterator[Program]:
        items = [item for item in request.session.items if item.path == request.path]
        calls = [item.callspec.params for item in items if hasattr(item, "callspec")]
        asked_for = dict.fromkeys(call[parameter] for call in calls if parameter in call)
        with running(module, tmp_path_factory.mktemp(module), *asked_for, **environment) as process:
            yield process

    return started
