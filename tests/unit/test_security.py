"""Nothing that is read is unpickled or run."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
SHIPPED = ("pat_vllm", "integrations")

RUN_CODE = {
    "cloudpickle",
    "dill",
    "jsonpickle",
    "joblib",
    "marshal",
    "pickle",
    "shelve",
    "_pickle",
}
"""Modules that make objects, and may run code, of what they read."""
LOADERS = {
    # torch.load unpickles; numpy's and pandas' may; yaml's may make any object.
    "allow_pickle",
    "from_pickle",
    "read_pickle",
    "torch.load",
    "np.load",
    "numpy.load",
    "yaml.load",
    "yaml.unsafe_load",
}
CALLS_OF_THE_USER = {
    "pat_vllm/executor/executor.py": {"import cloudpickle", "cloudpickle.dumps(method)"},
    "pat_vllm/worker/worker.py": {"import cloudpickle", "cloudpickle.loads(method)"},
}
"""A function that who runs the engine hands to its workers: it travels between processes of this
engine, as in vLLM, and comes from no file."""


def loading(source: str) -> set[str]:
    """What in a module could make objects of what is read, as text."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names) if {n.name.split(".")[0] for n in names} & RUN_CODE:
                found.add(ast.unparse(node))
            case ast.ImportFrom(module=str(module)) if module.split(".")[0] in RUN_CODE:
                found.add(ast.unparse(node))
            case ast.ImportFrom(module=str(module), names=names):
                if {f"{module}.{one.name}" for one in names} & LOADERS:
                    found.add(ast.unparse(node))
            case ast.Call(func=ast.Name(id="eval" | "exec" | "__import__")):
                found.add(ast.unparse(node))
            case ast.Call(func=function, keywords=words):
                name = ast.unparse(function)
                called = {name, name.split(".")[-1], *(str(one.arg) for one in words)}
                if name.split(".")[0] in RUN_CODE or called & LOADERS:
                    found.add(ast.unparse(node))
    return found


def test_nothing_that_is_read_is_unpickled() -> None:
    """That the scan sees what it looks for shows in the calls that it has to leave out."""
    found = {}
    for folder in SHIPPED:
        for path in (ROOT / folder).rglob("*.py"):
            if here := loading(path.read_text()):
                found[str(path.relative_to(ROOT))] = here
    assert found == CALLS_OF_THE_USER
    for source in ("from torch import load", "np.load(path)", "f(allow_pickle=True)", "eval(text)"):
        assert loading(source)
