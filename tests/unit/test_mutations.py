"""The table of mutations is up to date: each has its text, its tests and a name of its own."""

from __future__ import annotations

import ast
import importlib
import re
import textwrap
from collections import Counter
from functools import cache
from pathlib import Path

from tests.nightly.mutations.mutation import Mutation

ROOT = Path(__file__).parents[2]
TABLE = ROOT / "tests" / "nightly" / "mutations" / "table"


def mutations() -> list[Mutation]:
    names = sorted(path.stem for path in TABLE.glob("*.py") if path.stem != "__init__")
    modules = [importlib.import_module(f"tests.nightly.mutations.table.{name}") for name in names]
    return [mutation for module in modules for mutation in module.MUTATIONS]


def is_there(test: str) -> bool:
    """Whether the file of a node id is there, and names the function: it may import it."""
    file, _, function = test.partition("::")
    path, name = ROOT / file, function.partition("[")[0]
    return path.exists() and re.search(rf"\b{name}\b", text_of(path)) is not None


@cache
def text_of(path: Path) -> str:
    return path.read_text()


@cache
def definitions(module: str) -> dict[str, str]:
    """Source of each function and class of a module, by its name in it; of overloads, the last."""
    path = ROOT.joinpath(*module.split("."))
    source = (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()
    lines = source.splitlines(keepends=True)
    sources: dict[str, str] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                first = min([child.lineno, *(each.lineno for each in child.decorator_list)])
                sources[prefix + child.name] = "".join(lines[first - 1 : child.end_lineno])
                walk(child, f"{prefix}{child.name}.")

    walk(ast.parse(source), "")
    return sources


def problem_of(mutation: Mutation) -> str | None:
    """What is wrong with a mutation: its text does not occur once, or it is no Python any more."""
    module, _, name = mutation.function.partition(":")
    source = definitions(module).get(name)
    if source is None:
        return f"there is no {mutation.function}"
    for old, new in mutation.changes.items():
        if (count := source.count(old)) != 1:
            return f"{old!r} occurs {count} times in {mutation.function}"
        source = source.replace(old, new)
    try:
        ast.parse(textwrap.dedent(source))
    except SyntaxError as error:
        return str(error)
    return None


def test_every_mutation_is_up_to_date() -> None:
    problems = []
    for mutation in mutations():
        if problem := problem_of(mutation):
            problems.append(f"{mutation.name}: {problem}")
        missing = [test for test in mutation.tests if not is_there(test)]
        if missing or not mutation.tests:
            problems.append(f"{mutation.name}: no tests {missing}")
        if any(test.startswith("tests/nightly") for test in mutation.tests):
            problems.append(f"{mutation.name}: its tests are not run on every change")
    assert not problems, "\n".join(problems)


def test_names_are_unique() -> None:
    counts = Counter(mutation.name for mutation in mutations())
    assert not [name for name, count in counts.items() if count > 1]
