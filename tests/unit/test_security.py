"""Nothing that is read is unpickled or run, and nothing that lies in the current directory."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pat_vllm.doctor import child
from pat_vllm.start.safe_path import starting_with_safe_path

ROOT = Path(__file__).parents[2]
SHIPPED = ("pat_vllm", "integrations")

RUN_CODE = {"cloudpickle", "dill", "jsonpickle", "joblib", "marshal", "pickle", "shelve"}
RUN_CODE |= {"_pickle"}
"""Modules that make objects, and may run code, of what they read."""
LOADERS = {"torch.load", "np.load", "numpy.load", "yaml.load", "yaml.unsafe_load"}
LOADERS |= {"allow_pickle", "from_pickle", "read_pickle"}
"""torch.load unpickles; numpy's and pandas' may; yaml's may make any object."""
OF_THE_USER = {
    "pat_vllm/executor/executor.py": {"import cloudpickle", "cloudpickle.dumps(method)"},
    "pat_vllm/worker/weight_updates.py": {"import cloudpickle", "cloudpickle.loads(method)"},
    "pat_vllm/worker/logits_processors.py": {"import pickle"},
    "pat_vllm/worker/row_state.py": {"import pickle", "pickle.dumps(element)"},
}
"""A function that who runs the engine hands to its workers, and what a logits processor of theirs
keeps: both travel between processes of this engine, as in vLLM, and come from no file."""


def loading(source: str) -> set[str]:
    """What in a module could make objects of what is read, as text."""
    matches = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names) if {n.name.split(".")[0] for n in names} & RUN_CODE:
                matches.add(ast.unparse(node))
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in RUN_CODE:
                matches.add(ast.unparse(node))
            case ast.ImportFrom(module=str(module), names=names):
                if {f"{module}.{alias.name}" for alias in names} & LOADERS:
                    matches.add(ast.unparse(node))
            case ast.Call(func=ast.Name(id="eval" | "exec" | "__import__")):
                matches.add(ast.unparse(node))
            case ast.Call(func=function, keywords=words):
                name = ast.unparse(function)
                plain = any(ast.unparse(keyword) == "allow_pickle=False" for keyword in words)
                called = {name, name.split(".")[-1], *(str(keyword.arg) for keyword in words)}
                called -= {"np.load", "allow_pickle"} if plain else set()
                if name.split(".")[0] in RUN_CODE or called & LOADERS:
                    matches.add(ast.unparse(node))
    return matches


def test_nothing_that_is_read_is_unpickled() -> None:
    """That the scan sees what it looks for shows in the calls that it has to leave out."""
    by_path = {}
    for folder in SHIPPED:
        for path in (ROOT / folder).rglob("*.py"):
            if here := loading(path.read_text()):
                by_path[str(path.relative_to(ROOT))] = here
    assert by_path == OF_THE_USER
    assert not loading("np.load(path, allow_pickle=False)")
    for source in ("from torch import load", "np.load(path)", "f(allow_pickle=True)", "eval(text)"):
        assert loading(source)


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In a directory with modules of everyone's names, which say so when they are imported."""
    for name in ("json", "multiprocessing", "pydantic", "typing"):
        (tmp_path / f"{name}.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w'); 1 / 0")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    # It is here where tests are run by `python -m pytest`.
    monkeypatch.setattr(
        sys, "path", [folder for folder in sys.path if folder not in ("", os.getcwd())]
    )
    yield
    assert not (tmp_path / "ran").exists()


def test_the_current_directory_is_not_imported_from(
    trap: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the processes of our commands; that the trap works, stock Python shows."""
    stock = subprocess.run([sys.executable, "-c", "import json"], capture_output=True)
    assert b"ZeroDivisionError" in stock.stderr
    Path("ran").unlink()

    checkout = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = child.run_module("pat_vllm.doctor.examination", "{}", checkout)
    assert "ValidationError: " in ended.log, ended.log  # its request is none
    with starting_with_safe_path():  # as multiprocessing starts a process
        spawn = [sys.executable, "-c", "import multiprocessing.spawn"]
        assert subprocess.run(spawn).returncode == 0
    assert "PYTHONSAFEPATH" not in os.environ


class Started(Exception):
    """Instead of a process."""


def test_processes_start_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """The doctor's."""

    def start(*command: Any, env: Any = os.environ, **options: Any) -> None:
        raise Started([env["PYTHONSAFEPATH"], *map(str, command[0])] if env else [])

    monkeypatch.setattr(child.subprocess, "Popen", start)
    with pytest.raises(Started, match=r"'1', .*'-P', '-m', 'pat_vllm.doctor.examination'"):
        child.run_module("pat_vllm.doctor.examination", "{}", os.environ)
