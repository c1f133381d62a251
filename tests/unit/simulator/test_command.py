"""`pat-vllm simulate`: a profile and a workload under every policy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pat_vllm.cli import app
from pat_vllm.simulator.modelled.hardware import modelled_profile


def invoke(*arguments: str) -> tuple[int, str]:
    done = CliRunner().invoke(app, arguments, env={"COLUMNS": "200", "TERM": "dumb"})
    return done.exit_code, " ".join(done.output.replace("│", " ").split())


@pytest.fixture(scope="module")
def profile_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    profile = modelled_profile("llama-3.1-8b", "H100", 2)
    measured = profile.model_copy(update={"kind": "measured", "title": "some engine"})
    path = tmp_path_factory.mktemp("profile") / "profile.json"
    measured.save(path)
    return path


def test_files_and_table(tmp_path: Path, profile_file: Path) -> None:
    out, lengths = tmp_path / "out", tmp_path / "lengths.txt"
    arguments = ["simulate", "--profile", str(profile_file), "--requests", "8", "--iterations", "2"]
    code, text = invoke(*arguments, "--max-tokens", "300", "--output-dir", str(out))
    assert code == 0, text
    assert "some engine" in text and "MODELLED" not in text
    content = json.loads((out / "simulate.json").read_text())
    assert content["modelled"] is False
    policies = [row["policy"] for row in content["policies"]]
    assert policies == ["static tp1dp2", "static tp2dp1", "PAT"]
    for row in content["policies"]:
        batches = row["batches"]
        assert len(batches) == 2 and row["seconds"] == sum(each["seconds"] for each in batches)
    assert (out / "simulate.png").stat().st_size > 10_000
    written = (out / "simulate.md").read_text()
    assert "(best static)" in written and "clairvoyant" not in written

    lengths.write_text("100\n20\n7\n")
    # --max-tokens had another name before.
    code, text = invoke(*arguments, "--lengths", str(lengths), "--bound", "300")
    assert code == 0 and "3 requests" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--workload", "none"), "workload 'none' is unknown"),
        (("--profile", "nowhere"), "cannot be read"),
        (("--gpu", "H100"), "python -m benchmarks.paper simulate --gpu"),
        (("--paper",), "python -m benchmarks.paper settings"),
    ],
)
def test_wrong_and_moved_options(
    arguments: tuple[str, ...], message: str, profile_file: Path
) -> None:
    code, text = invoke("simulate", "--profile", str(profile_file), *arguments)
    assert code == 2 and message in text
