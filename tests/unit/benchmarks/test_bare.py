"""`benchmarks.gpu.bare`: what is packed arrives whole, and the commands of its steps are ours."""

from __future__ import annotations

import json
import random
import shlex
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
import typer

from benchmarks.gpu.bare import pack, receive, run
from pat_vllm.cli.app import app

KEPT = {
    "vllm/__init__.py": b"",
    "vllm/vllm_flash_attn/_vllm_fa3_C.abi3.so": random.Random(0).randbytes(5000),
    "vllm/_C_stable_libtorch.abi3.so": random.Random(1).randbytes(700),
    "other/third_party/deep_gemm/x.py": b"x",
}
DROPPED = (
    "vllm/vllm-rs",
    "vllm/vllm_flash_attn/_vllm_fa2_C.abi3.so",
    "vllm/_flashmla_C.abi3.so",
    "vllm/_qutlass_C.abi3.so",
    "vllm/_moe_C_stable_libtorch.abi3.so",
    "vllm/third_party/deep_gemm/include/a/b.py",
    "vllm/third_party/fmha_sm100/a.hpp",
)
PIECE = 1000


@pytest.fixture
def carried(tmp_path: Path) -> Path:
    """The pieces of a made-up wheel."""
    wheel = tmp_path / "vllm-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for path, data in {**KEPT, **dict.fromkeys(DROPPED, b"dropped")}.items():
            archive.writestr(path, data)
    files = pack.contents([wheel], (*pack.LEFT_OUT, *pack.EXPERTS))
    folder = tmp_path / "carried"
    folder.mkdir()
    (folder / "piece.99").write_bytes(b"of an older archive")
    pieces = pack.pack(files, folder, PIECE)
    assert [piece.stat().st_size for piece in pieces[:-1]] == [PIECE] * (len(pieces) - 1) != []
    assert 0 < pieces[-1].stat().st_size <= PIECE
    assert {file.name for file in folder.iterdir()} == {
        pack.SUMS,
        *(piece.name for piece in pieces),
    }
    return folder


def test_pieces_that_come_one_by_one_are_unpacked_at_last(carried: Path, tmp_path: Path) -> None:
    loads = [(carried / path.name, path.read_bytes()) for path in sorted(carried.glob("piece.*"))]
    kept, site = tmp_path / "kept", tmp_path / "site"
    site.mkdir()
    (site / "old.py").touch()
    for piece, _ in loads:
        piece.unlink()
    for count, (piece, data) in enumerate(reversed(loads), start=1):
        piece.write_bytes(data)
        waiting = receive.receive(carried, kept, site)
        assert waiting == [path.name for path, _ in loads[: len(loads) - count]]
    files = {str(path.relative_to(site)): path.read_bytes() for path in site.rglob("*.*")}
    assert files == KEPT
    assert not list(kept.iterdir())


def test_a_damaged_piece_is_named_and_can_be_carried_again(carried: Path, tmp_path: Path) -> None:
    piece = carried / "piece.01"
    whole = piece.read_bytes()
    piece.write_bytes(whole[:500] + bytes([whole[500] ^ 1]) + whole[501:])
    kept, site = tmp_path / "kept", tmp_path / "site"
    with pytest.raises(ValueError, match=r"again: piece\.01$"):
        receive.receive(carried, kept, site)
    assert not site.exists()
    piece.write_bytes(whole)
    assert receive.receive(carried, kept, site) == []
    assert (site / "vllm" / "__init__.py").exists()


def test_vllm_would_find_pat() -> None:
    files = {Path(path).name: data.decode() for path, data in pack.plugin()}
    assert "Name: pat-vllm" in files["METADATA"]
    assert files["entry_points.txt"].split("\n")[:2] == [
        "[vllm.general_plugins]",
        "pat = pat_vllm.plugin:register",
    ]


@pytest.mark.parametrize("step", ["two", "twographs --shape mixture", "profile qwen3-8b"])
def test_commands_of_a_step_are_accepted(step: str, tmp_path: Path) -> None:
    """By the parsers, which check names of options and their values."""
    name, *arguments = step.split()
    program: Any = typer.main.get_command(app)
    for ranks in (2, 4):
        for command, *words in run.commands(name, arguments, tmp_path, ranks):
            assert command == "pat-vllm"
            context = program.make_context("pat-vllm", [*words])
            subcommand, parser, rest = program.resolve_command(context, words)
            given = parser.make_context(subcommand, rest, parent=context).params
            assert given.get("ranks") in (None, ranks)


def test_steps_are_told_apart(tmp_path: Path) -> None:
    words = "profile qwen3-8b + smoke / two --shape window + tests -k dense"
    assert run.steps_of(words.split()) == [
        [["profile", "qwen3-8b"], ["smoke"]],
        [["two", "--shape", "window"], ["tests", "-k", "dense"]],
    ]
    assert run.steps_of([]) == []
    for words, unknown in (("profile 9b", "9b"), ("smoke + nothing", "nothing")):
        with pytest.raises(ValueError, match=unknown):
            run.steps_of(words.split())


def test_options_of_the_engine_are_one_object() -> None:
    given = ["--engine", '{"gpu_memory_utilization": 0.3, "attention_backend": "X"}', "--eager"]
    (command,) = run.commands("two", given, Path(), 4)
    assert command.count("--engine") == 1 and command[-1] == "--eager"
    engine = json.loads(command[command.index("--engine") + 1])
    assert (engine["gpu_memory_utilization"], engine["attention_backend"]) == (0.3, "X")
    assert engine["disable_custom_all_reduce"] is True


def test_a_mixture_whose_kernels_are_not_here_is_refused(tmp_path: Path) -> None:
    run.check_shape(["--shape", "window"], tmp_path)
    with pytest.raises(ValueError, match=r"--shape latent needs .*: pack --experts"):
        run.check_shape(["--engine", "{}", "--shape", "latent"], tmp_path)
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "_moe_C_stable_libtorch.abi3.so").touch()
    run.check_shape(["--shape", "latent"], tmp_path)


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in place of the machine's; gives what comes back."""
    monkeypatch.setenv("PAT_BARE", str(tmp_path))
    for name in ("RESULTS", "LOCK", "JOURNAL"):
        of_machine: Path = getattr(run, name)
        monkeypatch.setattr(run, name, tmp_path / of_machine.relative_to(receive.KEPT))
    monkeypatch.setattr(run, "OUT", tmp_path / "out")
    return tmp_path / "out"


def names_in(out: Path) -> set[str]:
    with tarfile.open(out / "results.tar.xz") as archive:
        return {Path(name).name for name in archive.getnames()} - {".", ""}


def test_steps_outlive_their_command(
    machine: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What comes next waits for them, and hands out what they wrote."""
    monkeypatch.setattr(run, "PATIENCE", 0)
    assert run.main(shlex.split("tests --no-such-option + tests --version / tests --version")) == 2
    assert "still at it" in capsys.readouterr().out
    monkeypatch.setattr(run, "PATIENCE", 120)
    assert run.main([]) == 1
    said = capsys.readouterr().out
    assert said.count("== tests --version passed after") == 2
    assert said.count("== tests --no-such-option FAILED after") == 1
    names = {"01-tests", "00-tests.log", "01-tests.log", "02-tests.log", "journal.log"}
    assert names <= names_in(machine)
    assert run.main(shlex.split("tests --version")) == 0
    assert "03-tests.log" in names_in(machine)
    assert run.main(shlex.split("two --shape mixture --help")) == 1
    assert "== FAILED: --shape mixture needs kernels for experts" in capsys.readouterr().out
