"""The documentation names files, commands and classes that exist, and the README stays short."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import typer

from pat_vllm.cli.app import app
from pat_vllm.start.refused import RULES, Rule

ROOT = Path(__file__).parents[2]
PACKAGES = ("pat_vllm", "integrations/verl", "integrations/openrlhf")
"""Folders under which the docs shorten paths: `scheduler/build.py`, `pat_verl/plugin.py`."""
SOURCES = ("pat_vllm", "benchmarks", "tests", "integrations")
FOREIGN_MODULES = ("vllm", "verl", "openrlhf", "pytest")
MAX_README_WORDS = 1000

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
"""Not the change log, which names what was moved by its old name, too."""
RESULTS = sorted((ROOT / "benchmarks" / "results").rglob("*.md"))


@cache
def code_of(page: Path) -> list[str]:
    """Lines of code blocks and inline code spans. Continued lines are joined."""
    text = page.read_text().replace("\\\n", " ")
    blocks = re.findall(r"^```\w*\n(.*?)^```", text, flags=re.MULTILINE | re.DOTALL)
    text = re.sub(r"^```\w*\n.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = re.findall(r"`([^`]+)`", text)
    indented = re.findall(r"^    (\S.*)$", text, flags=re.MULTILINE)
    return [line for block in blocks for line in block.splitlines()] + spans + indented


def expand_braces(path: str) -> list[str]:
    """`a/{b,c}.py` as `a/b.py` and `a/c.py`."""
    parts = re.split(r"\{([^}]*)\}", path)
    choices = [part.split(",") if i % 2 else [part] for i, part in enumerate(parts)]
    return ["".join(choice) for choice in product(*choices)]


@cache
def source_files() -> tuple[Path, ...]:
    return tuple(
        path
        for folder in SOURCES
        for path in (ROOT / folder).rglob("*")
        if path.suffix in (".py", ".sh") and "__pycache__" not in path.parts
    )


@cache
def class_sources() -> dict[str, str]:
    """By name of a class of ours: the text of the files that define one of that name."""
    sources: dict[str, str] = {}
    for file in source_files():
        if file.relative_to(ROOT).parts[0] in ("pat_vllm", "integrations"):
            text = file.read_text()
            for name in re.findall(r"^class (\w+)", text, flags=re.MULTILINE):
                sources[name] = sources.get(name, "") + text
    return sources


def anchors(page: Path) -> set[str]:
    """Those that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


# Each yields what a page names and what is not there.


def files(page: Path) -> Iterator[str]:
    text = re.sub(r"https?://\S+", "", page.read_text())
    named = re.findall(r"(?<![\w/.{-])[\w{][\w./{},-]*\.(?:py|sh)\b", text)
    folders = "|".join(SOURCES)
    named += [
        span for span in re.findall(r"`([^`\s]+)`", text) if re.match(f"(?:{folders})/", span)
    ]
    bases = [page.parent, ROOT, *(ROOT / package for package in PACKAGES)]
    for path in (path for name in named for path in expand_braces(name)):
        by_name = "/" not in path and any(file.name == path for file in source_files())
        if not (by_name or any((base / path).exists() for base in bases) or [*ROOT.glob(path)]):
            yield path


def modules(page: Path) -> Iterator[str]:
    """Those that are run: `python -m name`."""
    for name in (
        name for line in code_of(page) for name in re.findall(r"python -m ([\w.]+)", line)
    ):
        relative = Path(*name.split("."))
        files = [
            base / file
            for base in (ROOT, *(ROOT / package for package in PACKAGES))
            for file in (relative.with_suffix(".py"), relative / "__main__.py")
        ]
        if name.split(".")[0] not in FOREIGN_MODULES and not any(file.exists() for file in files):
            yield name


def make_targets(page: Path) -> Iterator[str]:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    for line in code_of(page):
        if match := re.match(r"make ((?:[a-z-]+ ?)+)", line.split("#")[0]):
            yield from set(match[1].split()) - targets


def subcommands_and_options(page: Path) -> Iterator[str]:
    """Not the hidden ones, which only say where a command is now."""
    program: Any = typer.main.get_command(app)
    options = {
        name: {
            option
            for param in command.params
            if not getattr(param, "hidden", False)
            for option in param.opts
        }
        for name, command in program.commands.items()
        if not command.hidden
    }
    for line in code_of(page):
        for name, arguments in re.findall(r"pat-vllm ([a-z][a-z-]*)([^#`]*)", line):
            if name not in options or set(re.findall(r"--[a-z-]+", arguments)) - options[name]:
                yield line


def dotted_names(page: Path) -> Iterator[str]:
    """`pat_vllm.a.b.name`: module a.b is there and has the name."""
    for dotted in set(re.findall(r"\bpat_vllm(?:\.\w+)+", page.read_text())):
        if (ROOT / dotted).exists():  # a name of a file: `pat_vllm.py`
            continue
        *parts, name = dotted.split(".")
        folder = ROOT.joinpath(*parts)
        file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        is_module = (folder / name).is_dir() or (folder / f"{name}.py").exists()
        if not is_module and not (file.exists() and re.search(rf"\b{name}\b", file.read_text())):
            yield dotted


def methods(page: Path) -> Iterator[str]:
    """`Class.name`, where the class is one of ours."""
    for class_name, name in re.findall(r"`(?:\w+\.)*([A-Z]\w+)\.(\w+)[(`]", page.read_text()):
        source = class_sources().get(class_name)
        if source is not None and not re.search(rf"\b{name}\b", source):
            yield f"{class_name}.{name}"


def links(page: Path) -> Iterator[str]:
    text = page.read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    targets += re.findall(r"^\[[^\]]+\]: (\S+)$", text, flags=re.MULTILINE)
    for target in targets:
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if "://" not in target and (not file.exists() or (anchor and anchor not in anchors(file))):
            yield target


@pytest.mark.parametrize(
    "missing",
    [files, modules, make_targets, subcommands_and_options, dotted_names, methods, links],
    ids=lambda function: function.__name__,
)
def test_what_pages_name_exists(missing: Callable[[Path], Iterator[str]]) -> None:
    pages = [*PAGES, ROOT / "CHANGELOG.md", *RESULTS] if missing is links else PAGES
    absent = {str(page.relative_to(ROOT)): sorted(missing(page)) for page in pages}
    assert not {page: names for page, names in absent.items() if names}


def test_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text().split()) <= MAX_README_WORDS


def test_the_limits_list_what_is_refused() -> None:
    """Rules that allow the same share a line of the table."""

    def title(rule: Rule) -> str:
        if rule.mixtures:
            return f"mixtures: `{rule.option}`"
        if rule.linear:
            return f"linear attention: `{rule.option}`"
        return rule.kind or f"`{rule.option}`"

    rows: dict[str, list[str]] = {}
    for rule in RULES:
        rows.setdefault(rule.allowed.format(ranks="N"), []).append(title(rule))
    table = ["| option or model | allowed |", "|---|---|"]
    table += [f"| {', '.join(titles)} | {allowed} |" for allowed, titles in rows.items()]
    text = (ROOT / "docs" / "limits.md").read_text()
    listed = re.search(r"^## Refused at start\n.*?\n(\|.*?)\n\n", text, re.MULTILINE | re.DOTALL)
    assert listed is not None
    assert listed[1].splitlines() == table
