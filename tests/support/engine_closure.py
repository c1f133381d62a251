"""What an engine imports of this package, in all of its processes.

    python -m tests.support.engine_closure

Imports inside functions count, those for type checkers alone don't. Entry points are what vLLM
makes by name or by its plugin, and what users call.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
ENTRY_POINTS = (
    "pat_vllm.api",
    "pat_vllm.executor.executor",
    "pat_vllm.executor.ray",
    "pat_vllm.kv_transfer.connector",
    "pat_vllm.plugin",
    "pat_vllm.predictor.adaptive",
    "pat_vllm.scheduler.scheduler",
    "pat_vllm.worker.cpu_worker",
    "pat_vllm.worker.gpu_worker",
)


def file_of(module: str) -> Path | None:
    """The source of a module of this package; None: it is none."""
    path = ROOT.joinpath(*module.split("."))
    for file in (path.with_suffix(".py"), path / "__init__.py"):
        if module.split(".")[0] == "pat_vllm" and file.exists():
            return file
    return None


def imports_of(file: Path) -> Iterator[str]:
    """Names of modules that a file imports when it runs, and of what it takes from them."""
    waiting: list[ast.AST] = [ast.parse(file.read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            waiting += node.orelse
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        waiting += ast.iter_child_nodes(node)


def engine_closure() -> dict[str, Path]:
    """Source files of the engine's modules, by the modules' names."""
    found: dict[str, Path] = {}
    waiting = [*ENTRY_POINTS]
    while waiting:
        module = waiting.pop()
        file = file_of(module)
        if file is None or module in found:
            continue
        found[module] = file
        waiting += [module.rpartition(".")[0], *imports_of(file)]
    return dict(sorted(found.items()))


if __name__ == "__main__":
    files = engine_closure()
    lines = sum(len(file.read_text().splitlines()) for file in files.values())
    print(f"{lines:,} lines in {len(files)} modules")
