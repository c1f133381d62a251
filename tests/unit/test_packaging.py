"""What importing the package costs, and what it must not need."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest

from tests.support.engine_closure import ENTRY_POINTS, engine_closure

ROOT = Path(__file__).parents[2]

STAGES = """
import sys

def imported():
    print(*sorted({name.split(".")[0] for name in sys.modules}))

import pat_vllm.cli.app
imported()
import pat_vllm.doctor.examination, pat_vllm.doctor.run, pat_vllm.profiling.grid
import pat_vllm.profiling.quality
import pat_vllm.advice.advice
import pat_vllm.predictor.adaptive, pat_vllm.reporting.report_plot
imported()
import benchmarks.bench.__main__
imported()
"""
ENGINE_AND_PLOTS = {"matplotlib", "vllm", "torch", "transformers", "tests"}


def test_imports_bring_in_neither_engine_nor_plots() -> None:
    """So that `pat-vllm --help` answers at once, and what predicts runs where vLLM is not."""
    command = [sys.executable, "-c", STAGES]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert not done.returncode, done.stderr
    of_help, of_commands, of_benchmarks = (set(line.split()) for line in done.stdout.splitlines())
    assert not of_help & {"numpy", "pydantic", "benchmarks", *ENGINE_AND_PLOTS}
    assert {"pat_vllm", "numpy", "typer"} <= of_commands
    assert not of_commands & {"benchmarks", *ENGINE_AND_PLOTS}
    assert "benchmarks" in of_benchmarks
    assert not of_benchmarks & ENGINE_AND_PLOTS


def test_no_integration_imports_the_benchmarks() -> None:
    """Nor the tests. import-linter sees to `pat_vllm` itself."""
    for path in (ROOT / "integrations").rglob("*.py"):
        lines = map(str.strip, path.read_text().splitlines())
        imports = [line for line in lines if line.startswith(("import ", "from "))]
        assert not [line for line in imports if line.split()[1].startswith(("benchmarks", "tests"))]


def test_every_file_of_the_packages_is_shipped() -> None:
    """As pyproject.toml says. That setuptools does so is in tests/nightly/test_packaging.py."""
    project: Any = tomllib.loads((ROOT / "pyproject.toml").read_text())
    options = project["tool"]["setuptools"]
    homes, names = options["packages"]["find"]["where"], options["packages"]["find"]["include"]
    data: dict[str, list[str]] = options["package-data"]
    shipped = set()
    for package in (path for home in homes for path in (ROOT / home).iterdir()):
        if not any(fnmatch(package.name, name) for name in names) or "." in package.name:
            continue
        shipped.add(package.name)
        for path in package.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert (path.parent / "__init__.py").exists(), path
                module = ".".join(path.parent.relative_to(package.parent).parts)
                wanted = ["*.py", *data["*"], *data.get(module, [])]
                assert any(fnmatch(path.name, pattern) for pattern in wanted), path
    assert {"pat_vllm", "pat_verl", "pat_openrlhf"} <= shipped
    extras = project["project"]["optional-dependencies"]
    assert {"cpu", "cuda", "plot", "ray", "verl", "openrlhf"} <= extras.keys()


def test_no_text_for_users_cites_a_file_that_the_wheel_lacks() -> None:
    """Neither help texts nor errors. Docstrings and comments are for who reads the sources."""
    cited = []
    for package in ("pat_vllm", "integrations/verl/pat_verl", "integrations/openrlhf/pat_openrlhf"):
        for path in (ROOT / package).rglob("*.py"):
            tree = ast.parse(path.read_text())
            statements = (
                statement for statement in ast.walk(tree) if isinstance(statement, ast.Expr)
            )
            docstrings = {id(statement.value) for statement in statements}
            cited += [
                (str(path.relative_to(ROOT)), node.value)
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
                if id(node) not in docstrings
                if re.search(r"\bdocs/|CONTRIBUTING\.md|README\.md", node.value)
            ]
    assert not cited


NOISY = "import sys; print('noise\\n' * 300); sys.exit(int(sys.argv[1]))"


@pytest.mark.parametrize("status", [0, 3])
def test_installations_are_quiet_unless_they_fail(status: int) -> None:
    """What `make venv` runs pip with: two lines, or all of pip's."""
    quietly = [str(ROOT / ".ci" / "quietly"), "installing", sys.executable]
    command = [*quietly, "-c", NOISY, str(status)]
    done = subprocess.run(command, capture_output=True, text=True)
    lines = done.stdout.splitlines()
    assert done.returncode == status and lines[0] == "installing"
    assert lines[-1].startswith("installing: failed after" if status else "installing: done in")
    assert lines.count("noise") == (300 if status else 0)


def test_entry_points_lead_somewhere() -> None:
    project: Any = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {**project["entry-points"], "scripts": project["scripts"]}
    assert {*groups} == {"vllm.general_plugins", "verl.plugins", "scripts"}
    for group in groups.values():
        for point in group.values():
            module, _, name = point.partition(":")
            path = ROOT if module.startswith("pat_vllm") else ROOT / "integrations" / "verl"
            file = path.joinpath(*module.split("."))
            file = file / "__init__.py" if file.is_dir() else file.with_suffix(".py")
            assert re.search(rf"^(def )?{name}\b", file.read_text(), re.MULTILINE), point


def test_what_an_engine_imports_is_counted() -> None:
    """Each module once, with its package and what functions import."""
    files = engine_closure()
    assert {*ENTRY_POINTS, "pat_vllm", "pat_vllm.predictor", "pat_vllm.start.prepare"} <= {*files}
    assert len({*files.values()}) == len(files)
    assert {name.split(".")[0] for name in files} == {"pat_vllm"}
