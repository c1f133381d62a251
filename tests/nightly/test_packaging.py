"""What is shipped to users: the source distribution, the wheel, and what runs from it."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from shutil import copytree, ignore_patterns
from typing import Any

import pytest

from tests.support.modelled_profile import modelled_profile
from tests.support.models import random_model

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = {
    "pat_vllm": ROOT,
    "pat_verl": ROOT / "integrations" / "verl",
    "pat_openrlhf": ROOT / "integrations" / "openrlhf",
}

BUILD = [*(sys.executable, "-m", "build"), *("--no-isolation", "--outdir", "../dist")]
"""What `make wheel` does, but with the setuptools that is installed, so that nothing is downloaded.
It makes a source distribution, and the wheel out of that."""

LEFT_OUT = ignore_patterns("__pycache__", "*.egg-info")


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what is built from a copy, as building writes into the sources."""
    directory = tmp_path_factory.mktemp("wheel")
    source = directory / "source"
    (source / "integrations").mkdir(parents=True)
    for path in (ROOT / "pat_vllm", PACKAGES["pat_verl"], PACKAGES["pat_openrlhf"]):
        copytree(path, source / path.relative_to(ROOT), ignore=LEFT_OUT)
    for name in ("pyproject.toml", "LICENSE", "README.md", "MANIFEST.in"):
        (source / name).write_text((ROOT / name).read_text())
    # What lies beside the packages is not part of them.
    for name in ("tests", "benchmarks", "docs"):
        (source / name).mkdir()
        (source / name / "__init__.py").touch()
        (source / name / "test_some.py").touch()
    done = subprocess.run(BUILD, cwd=source, capture_output=True, text=True)
    assert not done.returncode, done.stdout + done.stderr
    return directory / "dist"


@pytest.fixture(scope="module")
def wheel(dist: Path) -> Path:
    (wheel,) = dist.glob("*.whl")
    return wheel


def files_of_packages() -> set[str]:
    """Paths from the folder that has a package."""
    return {
        str(path.relative_to(directory))
        for package, directory in PACKAGES.items()
        for path in (directory / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


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
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        assert {name for name in names if not name.startswith(info)} == files_of_packages()
        points = archive.read(f"{info}/entry_points.txt").decode()
        metadata = archive.read(f"{info}/METADATA").decode()
        assert f"{info}/licenses/LICENSE" in names
    for line in (
        "pat-vllm = pat_vllm.cli.app:app",
        "[vllm.general_plugins]\npat = pat_vllm.plugin:register",
        "[verl.plugins]\npat = pat_verl.plugin",
    ):
        assert line in points
    assert metadata.partition("\n\n")[2] == (ROOT / "README.md").read_text()
    for extra in ("cpu", "cuda", "plot", "ray", "verl", "openrlhf"):
        assert f"Provides-Extra: {extra}\n" in metadata


# ---------------------------------------------------------------- without the repository

SCRIPT = """
import os
import pat_vllm
assert pat_vllm.__file__.startswith(os.environ["PYTHONPATH"]), pat_vllm.__file__
from pat_vllm.cli.app import app
if __name__ == "__main__":
    app()
"""
"""As pip writes it: the processes of an engine import it, too."""


@pytest.fixture(scope="module")
def as_pip_installs(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder with the wheel's packages."""
    directory = tmp_path_factory.mktemp("installed")
    with zipfile.ZipFile(wheel) as archive:  # which for a wheel of pure Python is to install it
        archive.extractall(directory)
    return directory


def run_from(installed: Path, directory: Path, command: Iterable[Any]) -> str:
    """Run `python COMMAND` in a folder, with the packages that are installed in another one."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(installed),
        "VLLM_CACHE_ROOT": str(directory / "cache"),  # so vLLM has not met the model before
    }
    (directory / "pat-vllm").write_text(SCRIPT)
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert not done.returncode, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("command", "words", "file"),
    [
        pytest.param(
            "advise --profile profile.json --responses 8 --max-tokens 256 --output advice.json",
            "static tp2dp2",
            "advice.json",
            id="advise",
        ),
        pytest.param(
            "profile MODEL --enforce-eager --kv-cache-memory-bytes 33554432 --budget 5 "
            "--output it.json",
            "",
            "it.json",
            id="profile",
        ),
    ],
)
def test_commands(
    command: str, words: str, file: str, as_pip_installs: Path, tmp_path: Path
) -> None:
    """Their engines, too, which are processes of their own."""
    modelled_profile("llama-3.1-8b", "H100", 4).save(tmp_path / "profile.json")
    arguments = command.replace("MODEL", str(random_model("qwen3"))).split()
    assert words in run_from(as_pip_installs, tmp_path, ["pat-vllm", *arguments])
    assert (tmp_path / file).stat().st_size > 2_000


def test_the_doctor(as_pip_installs: Path, tmp_path: Path) -> None:
    """Its process and its engines, too."""
    words = run_from(as_pip_installs, tmp_path, ["pat-vllm", "doctor", "--output-dir", tmp_path])
    assert "Fit: " in words and '"fit": true' in (tmp_path / "doctor.json").read_text()
