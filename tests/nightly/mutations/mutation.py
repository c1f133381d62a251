"""A mistake in one function, and the tests that must fail because of it."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Mutation:
    """A change of a function's source.

    Attributes:
        name: the mistake, in words.
        function: where it is: `package.module:Class.method` or `package.module:function`.
        changes: what replaces what. Each key occurs exactly once in the function's source.
        tests: pytest arguments (files or node ids) of which at least one test must fail.
    """

    name: str
    function: str
    changes: Mapping[str, str]
    tests: tuple[str, ...]

    def apply(self, root: Path) -> None:
        """Change the file under `root` that holds the function.

        Raises:
            AssertionError: the function, or a key of `changes`, is not there exactly once.
        """
        module, _, name = self.function.partition(":")
        path = root.joinpath(*module.split(".")).with_suffix(".py")
        if not path.exists():
            path = path.with_suffix("") / "__init__.py"
        source = path.read_text()
        start, end = _lines_of(ast.parse(source), name.split("."), self.function)
        lines = source.splitlines(keepends=True)
        body = "".join(lines[start:end])
        for old, new in self.changes.items():
            count = body.count(old)
            assert count == 1, f"{old!r} occurs {count} times in {self.function}, not once"
            body = body.replace(old, new)
        changed = "".join(lines[:start]) + body + "".join(lines[end:])
        ast.parse(changed)
        path.write_text(changed)


def _lines_of(tree: ast.AST, names: list[str], whole: str) -> tuple[int, int]:
    """First line, from 0, and the line after the last one of a definition."""
    node = tree
    for name in names:
        definitions = [
            child
            for child in ast.iter_child_nodes(node)
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            and child.name == name
        ]
        assert definitions, f"there is no {whole}"
        node = definitions[-1]  # of overloads, the implementation
    assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
    first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
    assert node.end_lineno is not None
    return first - 1, node.end_lineno


def mutations(table: Mapping[str, Sequence[tuple[str, ...]]]) -> list[Mutation]:
    """A table's rows: the mistake, the function, and what is replaced by what, in pairs.

    Args:
        table: by the tests that must see the mistakes, with " + " between several. A
            function is of `pat_vllm` unless it begins with another folder of the repository.
    """
    return [
        Mutation(
            name,
            place if place.startswith(("tests.", "benchmarks.")) else f"pat_vllm.{place}",
            dict(zip(pieces[::2], pieces[1::2], strict=True)),
            tuple(tests.split(" + ")),
        )
        for tests, rows in table.items()
        for name, place, *pieces in rows
    ]
