"""What `python -m pat_openrlhf` refuses, and how it says so. Starts nothing."""

from __future__ import annotations

import argparse
import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("pat_openrlhf")

from pat_openrlhf import launch, options

ARGUMENTS: dict[str, Any] = {
    "vllm.engine": "pat",
    "vllm.pat": None,
    "vllm.speculative_config": None,
    "vllm.num_engines": 1,
    "vllm.tensor_parallel_size": 4,
    "actor.model_name_or_path": "ORGANIZATION/MODEL",
    "actor.num_nodes": 1,
    "actor.num_gpus_per_node": 4,
    "train.colocate_all": False,
    "train.async_enable": False,
    "train.full_determinism_enable": False,
    "data.max_images_per_prompt": 0,
}
"""Those of OpenRLHF that matter here, by their dotted names."""
OURS = {"vllm.engine", "vllm.pat", "vllm.speculative_config"}


def arguments(**changed: Any) -> argparse.Namespace:
    """`ARGUMENTS` with changes, whose names have `__` for the dot."""
    return argparse.Namespace(
        **ARGUMENTS | {name.replace("__", ".", 1): value for name, value in changed.items()}
    )


def pat_options(**changed: Any) -> dict[str, Any]:
    taken = options.take_options(arguments(**changed))
    assert taken is not None
    return taken.pat


def test_options_are_checked_and_passed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Relative names of files are those of the user's directory."""
    assert options.take_options(arguments()) == options.EngineOptions({})
    given: dict[str, Any] = {
        "layouts": [1, 4],
        "policy": {"kind": "schedule", "switch_at": {"8": 4}},
    }
    assert pat_options(vllm__pat=json.dumps(given)) == given
    ngrams = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    for drafts in (ngrams, {"method": "eagle3", "model": "HEAD", "num_speculative_tokens": 2}):
        changed = {"vllm__speculative_config": json.dumps(drafts), "vllm__num_engines": 2}
        assert options.take_options(arguments(**changed)) == options.EngineOptions({}, drafts, 2)
    monkeypatch.chdir(tmp_path)
    given = {"state_dir": "state", "policy": {"kind": "predictor", "profile": "profile.json"}}
    assert pat_options(vllm__pat=json.dumps(given)) == {
        "state_dir": str(tmp_path / "state"),
        "policy": {"kind": "predictor", "profile": str(tmp_path / "profile.json")},
    }
    mp = '{"launcher": "mp"}'
    assert pat_options(vllm__sync_with_ray=True) == {}
    assert pat_options(vllm__pat=mp) == json.loads(mp)


def test_vllm_leaves_openrlhf_as_it_is() -> None:
    args = arguments(vllm__engine="vllm", vllm__tensor_parallel_size=1, vllm__num_engines=None)
    assert options.take_options(args) is None
    assert vars(args).keys() == ARGUMENTS.keys() - OURS


@pytest.mark.parametrize(
    ("changed", "parts"),
    [
        ({"vllm.speculative_config": "ngram"}, ("is not JSON", '\'{"method": "ngram",')),
        ({"vllm.speculative_config": "4"}, ("must be a JSON object",)),
        (
            {"vllm.speculative_config": '{"method": "suffix"}'},
            ("has the method 'suffix'", "allowed ngram, ngram_gpu, mtp, eagle3"),
        ),
        ({"vllm.pat": "{layouts: 1}"}, ("is not JSON", "--vllm.pat '{\"layouts\": [1, 4]}'")),
        ({"vllm.pat": "[1, 4]"}, ("must be a JSON object", "layouts, base_tp")),
        ({"vllm.pat": '{"layout": [1]}'}, ("unknown option 'layout'", "allowed: layouts")),
        ({"vllm.pat": '{"layouts": [3]}'}, ("which does not divide", "allowed: [1, 2, 4]")),
        (
            {"vllm.pat": '{"policy": {"kind": "static", "tp": 3}}'},
            ("pat.policy names tp=3", "4 ranks", "tp=1, 2, 4; name one of these"),
        ),
        ({"vllm.pat": '{"launcher": "slurm"}'}, ("launcher", "'slurm'", "'ray'")),
        # For another engine.
        ({"vllm.pat": "{}", "vllm.engine": "vllm"}, ("--vllm_engine pat",)),
        ({"vllm.speculative_config": "{}", "vllm.engine": "vllm"}, ("--vllm_engine pat",)),
        # Ray's collectives need Ray's workers.
        ({"vllm.pat": '{"launcher": "mp"}', "vllm.sync_with_ray": True}, ("sync_with_ray",)),
        ({"vllm.num_engines": None}, ("--vllm.num_engines is None", "--vllm.num_engines 1")),
        ({"vllm.num_engines": 0}, ("--vllm.num_engines is 0", "--vllm.num_engines 1")),
        (
            {"vllm.tensor_parallel_size": 1, "vllm.num_engines": 8},
            (
                "--vllm.tensor_parallel_size is 1",
                "--vllm.num_engines 1 --vllm.tensor_parallel_size 8",
                "--vllm_engine vllm",
            ),
        ),
        # Colocated engines must cover the actors' GPUs, and do not span nodes.
        (
            {"train.colocate_all": True, "actor.num_gpus_per_node": 8},
            ("--vllm.tensor_parallel_size 4", "--actor.num_gpus_per_node 8"),
        ),
        (
            {
                "vllm.tensor_parallel_size": 16,
                "train.colocate_all": True,
                "actor.num_nodes": 2,
                "actor.num_gpus_per_node": 8,
            },
            ("does not span nodes", "--vllm.tensor_parallel_size is 16"),
        ),
        ({"train.full_determinism_enable": True}, ("full_determinism_enable True", "measured")),
    ],
)
def test_refused(changed: dict[str, Any], parts: tuple[str, ...]) -> None:
    """The error names the option, its value if it is text, and what is allowed."""
    with pytest.raises(ValueError) as error:
        options.take_options(argparse.Namespace(**ARGUMENTS | changed))
    (option, value), *_ = changed.items()
    assert f"--{option}" in str(error.value)
    for part in (*parts, *[repr(value)] * isinstance(value, str)):
        assert part in str(error.value)


def test_images_of_classes_that_are_served(tmp_path: Path) -> None:
    """A class is known where its checkpoint is at hand; elsewhere the engine says."""
    given = arguments(data__max_images_per_prompt=2)
    assert options.take_options(given) == options.EngineOptions({})
    vars(given)["actor.model_name_or_path"] = str(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({"architectures": ["Qwen2_5_VLForConditionalGeneration"]}))
    assert options.take_options(given) == options.EngineOptions({})
    config.write_text(json.dumps({"architectures": ["Gemma4ForConditionalGeneration"]}))
    with pytest.raises(ValueError, match=r"--data.max_images_per_prompt 2 .* Gemma4For.* Qwen3VL"):
        options.take_options(given)


def test_colocated_engines_that_cover_the_actors_gpus() -> None:
    """In asynchronous training only the training models share GPUs."""
    options.take_options(arguments(train__colocate_all=True))
    options.take_options(
        arguments(train__colocate_all=True, train__async_enable=True, actor__num_gpus_per_node=8)
    )


@pytest.mark.parametrize(
    ("gpus", "changed", "parts"),
    [
        ([2.0, 2.0], {}, ("--vllm.tensor_parallel_size 4", "[2, 2]")),
        ([], {}, ("--vllm.tensor_parallel_size 4", "[]")),
        ([4.0], {}, ("8 GPUs", "cluster has 4", "--actor.num_gpus_per_node")),
        ([4.0, 3.0], {}, ("8 GPUs", "cluster has 7")),
        ([4.0], {"vllm__num_engines": 2, "train__colocate_all": True}, ("8 GPUs", "has 4")),
        # Enough of them, but the second engine would be on two nodes.
        ([6.0, 3.0, 3.0], {"vllm__num_engines": 2}, ("[6, 3, 3]", "room for 1", "--vllm.num_eng")),
        ([4.0, 4.0], {}, ()),
        ([6.0, 6.0, 0.0], {"vllm__num_engines": 2}, ()),
        ([4.0], {"train__colocate_all": True}, ()),
    ],
)
def test_gpus_of_the_cluster(
    gpus: list[float], changed: dict[str, Any], parts: tuple[str, ...]
) -> None:
    given = vars(arguments(**changed))
    if not parts:
        options.check_gpus(given, gpus)
        return
    with pytest.raises(ValueError) as error:
        options.check_gpus(given, gpus)
    for part in parts:
        assert part in str(error.value)


def test_what_has_to_be_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=r"OpenRLHF is not installed.*openrlhf==0\.11\.2"):
        options.check_installed()
    monkeypatch.setattr(options, "find_spec", lambda package: package == "openrlhf" or None)
    with pytest.raises(ValueError, match=r"vLLM is not installed.*pat-vllm\[cuda,openrlhf\]"):
        options.check_installed()

    monkeypatch.setattr(options, "check_vllm_version", lambda: None)
    monkeypatch.setattr(metadata, "version", lambda package: "0.11.2")
    options.check_versions()
    monkeypatch.setattr(metadata, "version", lambda package: "0.9.0")
    with pytest.raises(ValueError, match=r"0\.11\.2, but 0\.9\.0.*PAT_ALLOW_UNTESTED_OPENRLHF=1"):
        options.check_versions()
    monkeypatch.setenv("PAT_ALLOW_UNTESTED_OPENRLHF", "1")
    options.check_versions()


def parser() -> argparse.ArgumentParser:
    """As much of OpenRLHF's parser as matters here."""
    parser = argparse.ArgumentParser()
    for name, value in ARGUMENTS.items():
        if name not in OURS:
            parser.add_argument(f"--{name}", type=type(value), default=value)
    return parser


def test_the_parser_is_extended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    original = argparse.ArgumentParser.parse_args
    used = []
    monkeypatch.setattr(launch, "use_pat", lambda args: used.append(vars(args)["vllm.engine"]))
    launch.extend_parser()
    # Somebody else's parser comes first.
    assert argparse.ArgumentParser().parse_args([]) == argparse.Namespace()
    assert parser().parse_args(["--vllm_engine", "pat"])
    assert used == ["pat"]
    assert argparse.ArgumentParser.parse_args is original


def test_a_refusal_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    launch.extend_parser()
    with pytest.raises(SystemExit) as exit_status:
        parser().parse_args(["--vllm.engine", "pat", "--vllm.tensor_parallel_size", "1"])
    assert exit_status.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("pat_openrlhf: --vllm_engine pat") and printed.count("\n") == 1
