"""`pat-vllm doctor`: its options, its models, and what it prints and writes."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pat_vllm.cli import doctor_models
from pat_vllm.doctor.doctor_options import Options
from pat_vllm.doctor.models import Weights
from pat_vllm.doctor.report import REPORT, Check, Report, Stage, without_names
from pat_vllm.models.known_models import MODEL_SHAPES
from tests.support.command_line import invoke

STAGES = (
    Stage.of("environment", [Check("versions", "[vllm] $0_32$")], 3.0),
    Stage.of("eager", [Check("start", problem="rank 1 died")], 60.0, "one\nlast words"),
    Stage("piecewise", "skipped", why="'eager' failed"),
)
LAST = Stage.of("as used", [Check("model", f"in {Path.cwd()}/here")], 1.0)


def test_names_of_users_and_folders_are_left_out() -> None:
    names = {"/home/ann": "~", "ann": "<user>", "/home/ann/venv": "<python>", "box": "<host>"}
    text = "/home/ann/venv/lib /home/ann/x ann@box annual boxes /home/anna"
    cleaned = without_names(text, names)
    assert cleaned == "<python>/lib ~/x <user>@<host> annual boxes /home/anna"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu", "H100"), "name one by --model"),
        (("--shape", "huge"), "allowed: tiny, large, moe, linear, latent, window, sinks"),
        (
            ("--shape", "window", "--speculate", "4"),
            "--speculate 4 needs another --shape than window",
        ),
        (("--stage", "full", "--stage", "graphs"), "'graphs' is not known; allowed: environment,"),
        (("--engine", "[1]"), "--engine takes a JSON object"),
        (("--model", "nowhere"), "neither a config.json nor a folder"),
        (("--pat", '{"layouts": [3]}'), "tp=3, which does not divide"),
        (("--engine", '{"additional_config": {"pat": {}}}'), "give them by --pat"),
        (("--model", ".", "--gpu", "B1"), "B1"),
    ],
)
def test_what_a_user_got_wrong_is_said(arguments: tuple[str, ...], words: str) -> None:
    code, text = invoke("doctor", *arguments)
    assert code == 2 and words in text


@pytest.mark.parametrize(("stages", "code"), [(STAGES, 1), (STAGES[:1], 0)], ids=["no", "fit"])
def test_exit_status_table_and_file(
    stages: tuple[Stage, ...], code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Options] = []
    report = tmp_path / "out" / "doctor.json"
    config = tmp_path / "config.json"
    config.write_text(json.dumps(MODEL_SHAPES["llama-3.1-8b"]))

    def run_stages(options: Options, *_: Any) -> Iterator[Stage]:
        given.append(options)
        assert options.model is not None and (options.model / "config.json").exists()
        for ended, stage in enumerate((*stages, LAST)):
            # What is killed in a stage leaves those before it.
            assert not ended or len(REPORT.validate_json(report.read_text()).stages) == ended
            yield stage

    monkeypatch.setattr("pat_vllm.doctor.stages.run_stages", run_stages)
    options = (
        "--ranks",
        "8",
        "--gpu",
        "H100",
        "--stage",
        "as used",
        "--model",
        str(config),
        "--pat",
        '{"base_tp": 4}',
    )
    status, text = invoke("doctor", "--output-dir", str(tmp_path / "out"), *options)
    assert status == code, text
    assert "[vllm] $0_32$" in text
    assert ("last words" in text and "Not fit" in text) == bool(code)
    written = report.read_text()
    assert REPORT.validate_json(written).stages[:-1] == stages
    assert "in ./here" in written and str(Path.cwd()) not in written
    assert (given[0].ranks, given[0].gpu, given[0].pat) == (8, "H100", {"base_tp": 4})
    assert given[0].stage == ["as used"]


def test_what_was_tested_is_said() -> None:
    """Also where it was not the eager engines."""
    passed = {name: Stage.of(name, [], 1.0) for name in ("environment", "memory", "full")}
    said = [Report("", "", stages).conclusion for stages in (STAGES[:1], tuple(passed.values()))]
    assert said[0].startswith("No engine was started.")
    assert said[1] == "Fit, as far as was tested: environment, memory, full."


def test_models_of_the_self_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[tuple[dict[str, Any], Weights]] = []
    monkeypatch.setattr(
        doctor_models.models,
        "write_checkpoint",
        lambda path, config, like: written.append((config, like)),
    )
    for shape, ranks in itertools.product(doctor_models.SHAPES, (2, 3, 8)):
        asked = doctor_models.shape_of(shape)
        models = doctor_models.self_test_models(tmp_path, asked, ranks, 5)
        assert written[-1][0]["num_attention_heads"] % ranks == 0
        assert models.draft_lengths == (5, 0, 1, 2, 4, 5) and written[-1][1].repeat
        assert models.dtype == ("bfloat16" if shape == "linear" else None)
    assert [like.seed for _, like in written[:2]] == [0, 1]
    assert doctor_models.self_test_models(tmp_path, asked, 2, 0).draft_lengths == ()
