"""What the tests cover of each class of models: the table of docs/limits.md.

    python -m tests.support.support_table    puts it there

It is read off the tests themselves: the engines that they name, the models that they take.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.families import ARCHS
from tests.support.models import SPECS
from tests.support.vision import CLASSES

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "limits.md"
ENGINES = {
    "live switch": "test_every_ordered_pair_of_layouts",
    "KV computed again": "test_recomputing|test_every_ordered_pair_when_kv_is_computed_again",
    "storm": "test_random_switch_storm|test_storm",
    "new weights": "test_an_update.*reaches_every_layout",
}
"""What a test shows of the models of its engines, by how its name begins."""
WEIGHTS = "test_a_whole_model|test_.*models"
"""Tests of loaders, which take models by name."""
TRAINERS = {"VeRL": "verl", "OpenRLHF": "openrlhf"}
"""The folder of their tests, which run in an environment of their own and name models' kinds."""

Found = tuple[str, str, str]
"""A model, a column, and what stands there: ranks or "yes"."""


def table() -> list[str]:
    """Its lines, in Markdown."""
    columns = ["weights", *ENGINES, "Model Runner V2", "drafts", "images", *TRAINERS]
    nights: dict[tuple[str, str], dict[str, bool]] = defaultdict(dict)
    for path in sorted(ROOT.glob("tests/**/*.py")):
        for model, column, mark in _found(path):
            marks = nights[_class_of(model), column]
            marks[mark] = marks.get(mark, True) and "nightly" in path.parts
    lines = ["| class | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name in dict.fromkeys([*ARCHS.values(), *(name for _, name, _ in CLASSES.values())]):
        cells = (_text(nights[name, column]) for column in columns)
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines


def _text(nights: dict[str, bool]) -> str:
    """What is tested on every change; in brackets what else at night."""
    often, seldom = ([m for m in sorted(nights) if nights[m] == night] for night in (False, True))
    return " ".join(filter(None, [", ".join(often), f"({', '.join(seldom)})" if seldom else ""]))


def _found(path: Path) -> Iterator[Found]:
    text, names = path.read_text(), {*ARCHS, *ARCHS.values(), *CLASSES}
    for trainer, folder in TRAINERS.items():
        if folder == path.parent.name and path.name.startswith("test_"):
            for node in ast.walk(ast.parse(text)):
                if isinstance(node, ast.Constant) and node.value in names:
                    yield str(node.value), trainer, "yes"
    if "mark.engine(" not in text and not re.search(f"def ({WEIGHTS})", text):
        return
    module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
    for name, test in vars(module).items():
        if name.startswith("test_") and inspect.isfunction(test):
            yield from _of_engines(module, name, test)
            if re.match(WEIGHTS, name):
                yield from ((model, "weights", "yes") for model in _models(test))


def _of_engines(module: Any, name: str, test: Any) -> Iterator[Found]:
    """As `pytest_generate_tests` of engine_fixtures.py takes engines for a test."""
    marks = [*getattr(test, "pytestmark", ()), *_listed(getattr(module, "pytestmark", ()))]
    named = next((mark.args for mark in marks if mark.name == "engine"), ())
    for spec in getattr(module, "ENGINES", {}).get(name, named):
        columns = [column for column, names in ENGINES.items() if re.match(names, name)]
        columns += ["Model Runner V2"] * spec.model_runner_v2
        columns += ["drafts"] * ("speculative_config" in spec.options)
        columns += ["images"] * (spec.options.get("language_model_only") is False)
        yield from ((spec.model, column, str(spec.ranks)) for column in columns)


def _models(test: Any) -> Iterator[str]:
    """Those that a parametrized test takes."""
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            for values in mark.args[1]:
                row = values if isinstance(values, tuple) else (values,)
                yield from (model for model in row if model in (*SPECS, *CLASSES))


def _listed(marks: Any) -> list[pytest.Mark]:
    marks = marks if isinstance(marks, list | tuple) else [marks]
    return [mark.mark for mark in marks]


def _class_of(model: str) -> str:
    """The class of a test's model, or of a kind of random ones."""
    if model in CLASSES:
        return CLASSES[model][1]
    arch = SPECS[model]["arch"] if model in SPECS else model
    return ARCHS.get(arch, arch)


def listed() -> re.Match[str]:
    """The table as the page has it."""
    match = re.search(r"^\| class \|.*?\n(?=\n)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert match is not None
    return match


if __name__ == "__main__":
    begin, end = listed().span()
    page = PAGE.read_text()
    PAGE.write_text(page[:begin] + "\n".join(table()) + "\n" + page[end:])
