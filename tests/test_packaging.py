"""What is shipped to users, and what importing it costs."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "pat_vllm": ROOT,
    "pat_verl": ROOT / "integrations" / "verl",
    "pat_openrlhf": ROOT / "integrations" / "openrlhf",
}

LIST_MODULES = """
from setuptools import Distribution
from setuptools.config.pyprojecttoml import apply_configuration

distribution = Distribution({"script_name": "setup.py"})
apply_configuration(distribution, "pyproject.toml")
command = distribution.get_command_obj("build_py")
command.ensure_finalized()
for package, module, path in command.find_all_modules():
    print(f"{package}.{module}")
"""
"""As `pip wheel` does it, but without building anything."""

LIST_IMPORTED = """
import sys
import pat_vllm.cli, pat_vllm.cli.demo, pat_vllm.cli.profile, pat_vllm.cli.simulate
import pat_vllm.cli.demo_plot, pat_vllm.cli.simulate_plot, pat_vllm.cli.random_model
import pat_vllm.cli.advise, pat_vllm.cli.advise_plot
import pat_vllm.simulator.compare, pat_vllm.predictor.adaptive
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""

LIST_IMPORTED_BY_BENCHMARKS = """
import sys
import benchmarks.bench.__main__, benchmarks.bench.run, benchmarks.bench.plot
import benchmarks.paper.__main__, benchmarks.paper.tables, benchmarks.paper.plot
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""


def run(script: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=240
    )
    assert not done.returncode, done.stderr
    return set(done.stdout.split())


def test_the_wheel_holds_every_module_that_users_run_and_nothing_else() -> None:
    expected = set()
    for package, directory in PACKAGES.items():
        for path in (directory / package).rglob("*.py"):
            expected.add(".".join(path.relative_to(directory).with_suffix("").parts))
    assert "pat_vllm.cli.simulate" in expected and "pat_vllm.predictor.__init__" in expected
    assert run(LIST_MODULES) == expected


def test_commands_and_simulator_import_neither_engine_nor_plots_nor_benchmarks() -> None:
    imported = run(LIST_IMPORTED)
    assert {"pat_vllm", "numpy", "typer"} <= imported
    assert not {"matplotlib", "vllm", "torch", "transformers", "benchmarks", "tests"} & imported


def test_benchmarks_import_plots_and_engines_when_they_use_them() -> None:
    imported = run(LIST_IMPORTED_BY_BENCHMARKS)
    assert "benchmarks" in imported
    assert not {"matplotlib", "vllm", "torch", "transformers", "tests"} & imported


def test_no_module_of_the_package_names_the_benchmarks_in_an_import() -> None:
    for package, directory in PACKAGES.items():
        for path in (directory / package).rglob("*.py"):
            lines = path.read_text().splitlines()
            importing = [line for line in lines if line.strip().startswith(("import ", "from "))]
            assert not [line for line in importing if "benchmarks" in line], path
