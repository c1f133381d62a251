"""What is shipped to users, and what importing it costs."""

import json
import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest

from pat_vllm import text_only
from tests.models import random_model
from tests.test_doctor import LLAMA_70B

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {
    "pat_vllm": ROOT,
    "pat_verl": ROOT / "integrations" / "verl",
    "pat_openrlhf": ROOT / "integrations" / "openrlhf",
}

BUILD = [*(sys.executable, "-m", "build"), *("--no-isolation", "--outdir", "../dist")]
"""What `make wheel` does, but with the setuptools that is installed, so that nothing is downloaded.
It makes a source distribution, and the wheel out of that."""

LIST_IMPORTED = """
import sys
import pat_vllm.cli, pat_vllm.cli.demo, pat_vllm.cli.profile, pat_vllm.cli.simulate
import pat_vllm.cli.doctor
import pat_vllm.cli.demo_plot, pat_vllm.cli.simulate_plot, pat_vllm.cli.random_model
import pat_vllm.cli.advise, pat_vllm.cli.advise_plot
import pat_vllm.simulator.compare, pat_vllm.predictor.adaptive, pat_vllm.reporting.plot
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""

LIST_IMPORTED_BY_HELP = """
import sys
import pat_vllm.cli
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


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what is built from a copy, as building writes into the sources."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    (source / "integrations").mkdir(parents=True)
    for path in PACKAGES.values():
        if path != ROOT:
            copytree(path, source / path.relative_to(ROOT), ignore=LEFT_OUT)
    copytree(ROOT / "pat_vllm", source / "pat_vllm", ignore=LEFT_OUT)
    for name in ("pyproject.toml", "LICENSE", "README.md", "MANIFEST.in"):
        (source / name).write_text((ROOT / name).read_text())
    # What lies beside the packages is not part of them.
    for name in ("tests", "benchmarks", "docs"):
        (source / name).mkdir()
        (source / name / "__init__.py").touch()
        (source / name / "test_one.py").touch()
    done = subprocess.run(BUILD, cwd=source, capture_output=True, text=True, timeout=240)
    assert not done.returncode, done.stdout + done.stderr
    return directory / "dist"


LEFT_OUT = ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


def files_of_packages() -> set[str]:
    """Paths from the folder that has a package."""
    expected = set()
    for package, directory in PACKAGES.items():
        for path in (directory / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                expected.add(str(path.relative_to(directory)))
        assert f"{package}/py.typed" in expected
    assert "pat_vllm/cli/simulate.py" in expected
    return expected


def test_the_source_distribution_holds_the_packages_and_what_builds_them(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        names = {name.partition("/")[2] for name in archive.getnames() if "egg-info" not in name}
        without_suffix = {"LICENSE", "PKG-INFO"}
        files = {n for n in names if "." in n.rpartition("/")[2] or n in without_suffix}
    homes = ("integrations/verl/", "integrations/openrlhf/")
    packaged = {next((name[len(h) :] for h in homes if name.startswith(h)), name) for name in files}
    beside = {"pyproject.toml", "LICENSE", "README.md", "MANIFEST.in", "PKG-INFO", "setup.cfg"}
    assert packaged - beside == files_of_packages()
    assert beside <= packaged


def test_the_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel: Path) -> None:
    expected = files_of_packages()
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        assert {name for name in names if not name.startswith(info)} == expected
        points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
        assert f"{info}/licenses/LICENSE" in names
    for line in (
        "pat-vllm = pat_vllm.cli:app",
        "[vllm.general_plugins]\npat = pat_vllm.plugin:register",
        "[verl.plugins]\npat = pat_verl.plugin",
    ):
        assert line in points
    for extra in ("cpu", "cuda", "ray", "verl", "openrlhf"):
        assert f"Provides-Extra: {extra}\n" in metadata


def installed(wheel: Path, directory: Path) -> Mapping[str, str]:
    """Environment in which Python finds the wheel's packages before all others."""
    with zipfile.ZipFile(wheel) as archive:  # which for a wheel of pure Python is to install it
        archive.extractall(directory)
    return {"PYTHONPATH": str(directory), "PATH": os.environ["PATH"]}


COMMAND = """
import pat_vllm, sys
assert pat_vllm.__file__.startswith(sys.argv.pop(1)), pat_vllm.__file__
from pat_vllm.cli import app
app()
"""


SCRIPT = """
import os
import pat_vllm
assert pat_vllm.__file__.startswith(os.environ["PYTHONPATH"]), pat_vllm.__file__
from pat_vllm.cli import app
if __name__ == "__main__":
    app()
"""
"""As pip writes it: the processes of an engine import it, too."""


def test_commands_run_from_the_wheel_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    from tests.test_report_plot import a_report

    environment = installed(wheel, tmp_path / "installed")
    report = tmp_path / "report.json"
    a_report().save(report)
    done = subprocess.run(
        [sys.executable, "-c", COMMAND, str(tmp_path / "installed"), "plot", str(report)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert not done.returncode, done.stderr
    assert report.with_suffix(".png").stat().st_size > 10_000


@pytest.fixture(scope="module")
def as_pip_installs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheel's packages, and with those that pip installs with vLLM's CPU build.

    They were made for another torch.
    """
    directory = tmp_path_factory.mktemp("installed")
    installed(wheel, directory)
    for name in text_only.PACKAGES:
        (directory / name).mkdir()
        broken = f"raise RuntimeError('operator {name}::nms does not exist')"
        (directory / name / "__init__.py").write_text(broken)
    return directory


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.parametrize(
    ("command", "said", "made"),
    [
        pytest.param(
            "demo --model MODEL --requests 6 --max-tokens 24 --switch-at 2",
            "Outputs of all three runs agree",
            "demo.png",
            id="demo",
        ),
        pytest.param(
            "profile MODEL --enforce-eager --kv-cache-memory-bytes 33554432 --quick --budget 5 "
            "--output it.json",
            "",
            "it.json",
            id="profile",
        ),
    ],
)
def test_engines_run_from_the_wheel_without_the_repository(
    command: str, said: str, made: str, as_pip_installs: Path, tmp_path: Path
) -> None:
    """Its engines, too, which are processes of their own; vLLM has not met the model before."""
    arguments = command.replace("MODEL", str(random_model("qwen3"))).split()
    script = tmp_path / "pat-vllm"
    script.write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, str(script), *arguments],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(as_pip_installs),
            "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stdout + done.stderr
    assert said in done.stdout
    assert (tmp_path / made).stat().st_size > 2_000


@pytest.mark.slow
@pytest.mark.nightly
def test_the_doctor_runs_from_the_wheel_without_the_repository(wheel: Path, tmp_path: Path) -> None:
    """Its processes, too: the one that asks vLLM, and the one that measures devices."""
    environment = installed(wheel, tmp_path / "installed")
    (tmp_path / "config.json").write_text(json.dumps(LLAMA_70B | LLAMA_NAMES))
    arguments = ["doctor", "--model", str(tmp_path / "config.json"), "--gpu", "H100"]
    arguments += ["--ranks", "8", "--pat", '{"base_tp": 4}', "--output-dir", str(tmp_path / "out")]
    command = [sys.executable, "-c", COMMAND, str(tmp_path / "installed"), *arguments]
    options: dict[str, Any] = dict(cwd=tmp_path, env=environment, capture_output=True, text=True)
    done = subprocess.run(command, timeout=240, **options)
    assert not done.returncode, done.stdout + done.stderr
    assert "KV cache" in (tmp_path / "out" / "doctor.json").read_text()
    for name, text in (("request", MEASURE), ("journal", "")):
        (tmp_path / name).write_text(text)
    files = [str(tmp_path / name) for name in ("request", "answer", "journal")]
    command = [sys.executable, "-m", "pat_vllm.doctor.device", *files]
    done = subprocess.run(command, timeout=240, **options)
    assert not done.returncode, done.stdout + done.stderr
    assert "% of a copy" in (tmp_path / "journal").read_text()


LLAMA_NAMES = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
MEASURE = json.dumps(
    {
        "model": None,
        "ranks": 2,
        "tps": [1, 2],
        "scale": dict(copies=[1 << 20], weights=1, kv=1, requests=1, tokens=64, repeats=1),
    }
)


def test_the_command_starts_without_what_its_commands_need() -> None:
    """So that `pat-vllm --help` answers at once."""
    imported = run(LIST_IMPORTED_BY_HELP)
    assert not imported & {"matplotlib", "numpy", "pydantic", "torch", "vllm"}


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
