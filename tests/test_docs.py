"""The documentation names files, commands and classes that exist, and the README stays short."""

from __future__ import annotations

import re
from functools import cache
from itertools import product
from pathlib import Path

import pytest
import typer

from pat_vllm.cli import app

ROOT = Path(__file__).parents[1]
PACKAGES = ("pat_vllm", "integrations/verl", "integrations/openrlhf")
"""Folders under which the docs shorten paths: `scheduler/switch.py`, `pat_verl/plugin.py`."""
SOURCES = ("pat_vllm", "benchmarks", "tests", "integrations")
FOREIGN_MODULES = ("verl", "openrlhf", "pytest")
MAX_README_WORDS = 1000

PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted((ROOT / "docs").glob("*.md")),
]
"""Not the change log, which names what was moved by its old name, too."""


def pages(*more: str) -> pytest.MarkDecorator:
    paths = [*PAGES, *(ROOT / name for name in more)]
    return pytest.mark.parametrize("page", paths, ids=lambda path: path.name)


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


def exists(path: str, page: Path) -> bool:
    bases = [page.parent, ROOT, *(ROOT / package for package in PACKAGES)]
    if any((base / path).exists() for base in bases):
        return True
    return "/" not in path and any(file.name == path for file in source_files())


def module_file(name: str) -> Path | None:
    """The file that `python -m name` runs, if it is one of ours."""
    relative = Path(*name.split("."))
    for base in (ROOT, *(ROOT / package for package in PACKAGES)):
        for file in (base / relative.with_suffix(".py"), base / relative / "__main__.py"):
            if file.exists():
                return file
    return None


@cache
def class_sources() -> dict[str, str]:
    """By name of a class of ours: the text of the files that define one of that name."""
    found: dict[str, str] = {}
    for file in source_files():
        if file.relative_to(ROOT).parts[0] not in ("pat_vllm", "integrations"):
            continue
        text = file.read_text()
        for name in re.findall(r"^class (\w+)", text, flags=re.MULTILINE):
            found[name] = found.get(name, "") + text
    return found


def anchors(page: Path) -> set[str]:
    """Those that GitHub makes of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


def test_readme_is_short() -> None:
    words = len((ROOT / "README.md").read_text().split())
    assert words <= MAX_README_WORDS


@pages("CHANGELOG.md")
def test_links_lead_somewhere(page: Path) -> None:
    text = page.read_text()
    targets = re.findall(r"\]\(([^)\s]+)\)", text)
    targets += re.findall(r"^\[[^\]]+\]: (\S+)$", text, flags=re.MULTILINE)
    broken = []
    for target in targets:
        if "://" in target:
            continue
        path, _, anchor = target.partition("#")
        file = page.parent / path if path else page
        if not file.exists() or (anchor and anchor not in anchors(file)):
            broken.append(target)
    assert not broken


@pages()
def test_files_exist(page: Path) -> None:
    text = re.sub(r"https?://\S+", "", page.read_text())
    named = re.findall(r"(?<![\w/.{-])[\w{][\w./{},-]*\.(?:py|sh)\b", text)
    folders = "|".join(SOURCES)
    named += [
        span for span in re.findall(r"`([^`\s]+)`", text) if re.match(rf"(?:{folders})/", span)
    ]
    missing = [
        path
        for name in named
        for path in expand_braces(name)
        if not exists(path, page) and not list(ROOT.glob(path))
    ]
    assert not missing


@pages()
def test_modules_can_be_run(page: Path) -> None:
    named = {name for line in code_of(page) for name in re.findall(r"python -m ([\w.]+)", line)}
    ours = {name for name in named if name.split(".")[0] not in FOREIGN_MODULES}
    assert not {name for name in ours if module_file(name) is None}


@pages()
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE))
    named = set()
    for line in code_of(page):
        if match := re.match(r"make ((?:[a-z-]+ ?)+)", line.split("#")[0]):
            named |= set(match[1].split())
    assert named <= targets


@pages()
def test_subcommands_and_their_options_exist(page: Path) -> None:
    """Not the hidden ones, which only say where a command is now."""
    program = typer.main.get_command(app)
    commands = {
        name: command
        for name, command in program.commands.items()  # type: ignore[attr-defined]
        if not command.hidden
    }
    for line in code_of(page):
        for name, arguments in re.findall(r"pat-vllm ([a-z][a-z-]*)([^#`]*)", line):
            assert name in commands, line
            options = {
                option
                for param in commands[name].params
                if not getattr(param, "hidden", False)
                for option in param.opts
            }
            assert set(re.findall(r"--[a-z-]+", arguments)) <= options, line


@pages()
def test_dotted_names_exist(page: Path) -> None:
    """`pat_vllm.a.b.name`: module a.b is there and has the name."""
    missing = []
    for dotted in set(re.findall(r"\bpat_vllm(?:\.\w+)+", page.read_text())):
        if (ROOT / dotted).exists():  # a name of a file: `pat_vllm.py`
            continue
        *parts, name = dotted.split(".")
        folder = ROOT.joinpath(*parts)
        file = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
        is_module = (folder / name).is_dir() or (folder / f"{name}.py").exists()
        if not is_module and not (file.exists() and re.search(rf"\b{name}\b", file.read_text())):
            missing.append(dotted)
    assert not missing


@pages()
def test_methods_exist(page: Path) -> None:
    """`Class.name`, where the class is one of ours."""
    missing = []
    for class_name, name in re.findall(r"`(?:\w+\.)*([A-Z]\w+)\.(\w+)[(`]", page.read_text()):
        source = class_sources().get(class_name)
        if source is not None and not re.search(rf"\b{name}\b", source):
            missing.append(f"{class_name}.{name}")
    assert not missing
