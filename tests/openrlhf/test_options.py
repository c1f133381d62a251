"""What `python -m pat_openrlhf` refuses, and how it says so. Starts nothing."""

from __future__ import annotations

import argparse
import json
from importlib import metadata
from typing import Any

import pytest
from pat_openrlhf import launch, options

ARGUMENTS: dict[str, Any] = {
    "vllm.engine": "pat",
    "vllm.pat": None,
    "vllm.speculative_config": None,
    "vllm.num_engines": 1,
    "vllm.tensor_parallel_size": 4,
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


def refused(*said: str, **changed: Any) -> None:
    with pytest.raises(ValueError) as raised:
        options.take_options(arguments(**changed))
    for part in said:
        assert part in str(raised.value)


def test_pat_needs_no_options():
    assert options.take_options(arguments()) == options.EngineOptions({})


def taken(**changed: Any) -> dict[str, Any]:
    """PAT's options."""
    found = options.take_options(arguments(**changed))
    assert found is not None
    return found.pat


def test_options_are_checked_and_passed_on():
    given = {"layouts": [1, 4], "policy": {"kind": "schedule", "switch_at": {"8": 4}}}
    assert taken(vllm__pat=json.dumps(given)) == given


def test_speculative_decoding():
    given = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    found = options.take_options(arguments(vllm__speculative_config=json.dumps(given)))
    assert found == options.EngineOptions({}, given)
    assert options.take_options(arguments(vllm__num_engines=2)) == options.EngineOptions(
        {}, None, 2
    )


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("ngram", ("is not JSON", '--vllm.speculative_config \'{"method": "ngram",')),
        ("4", ("must be a JSON object", "num_speculative_tokens")),
        ('{"method": "eagle3", "model": "/head"}', ("'eagle3'", "allowed: ngram, ngram_gpu")),
        ('{"num_speculative_tokens": 4}', ("method None", "allowed: ngram, ngram_gpu")),
    ],
)
def test_speculative_decoding_that_is_not_served(text, said):
    refused(f"--vllm.speculative_config {text!r}", *said, vllm__speculative_config=text)


def test_files_are_those_of_the_users_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    policy = {"kind": "predictor", "lengths_file": "lengths.json", "profile": "/profile.json"}
    assert taken(vllm__pat=json.dumps({"base_tp": 2, "policy": policy})) == {
        "base_tp": 2,
        "policy": {**policy, "lengths_file": str(tmp_path / "lengths.json")},
    }


def test_vllm_leaves_openrlhf_as_it_is():
    args = arguments(vllm__engine="vllm", vllm__tensor_parallel_size=1, vllm__num_engines=None)
    assert options.take_options(args) is None
    assert vars(args).keys() == ARGUMENTS.keys() - OURS


@pytest.mark.parametrize("name", ["vllm.pat", "vllm.speculative_config"])
def test_options_for_another_engine(name):
    given = {name.replace(".", "__"): "{}"}
    refused(f"--{name} '{{}}'", "--vllm_engine pat", vllm__engine="vllm", **given)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{layouts: 1}", ("is not JSON", "--vllm.pat '{\"layouts\": [1, 4]}'")),
        ("[1, 4]", ("must be a JSON object", "layouts, base_tp")),
        ('{"layout": [1]}', ("unknown option 'layout'", "allowed: layouts")),
        ('{"layouts": [3]}', ("tp=3, which does not divide", "allowed: [1, 2, 4]")),
        ('{"policy": {"kind": "static", "tp": 3}}', ("tp=3", "layouts tp1dp4, tp2dp2, tp4dp1")),
        ('{"launcher": "slurm"}', ("launcher", "'slurm'", "'ray'")),
    ],
)
def test_wrong_options(text, said):
    refused(f"--vllm.pat {text!r}", *said, vllm__pat=text)


def test_rays_collectives_need_rays_workers():
    text = '{"launcher": "mp"}'
    said = "--vllm.sync_with_ray", f"--vllm.pat {text!r}"
    refused(*said, vllm__pat=text, vllm__sync_with_ray=True)
    assert taken(vllm__sync_with_ray=True) == {}
    assert taken(vllm__pat=text) == {"launcher": "mp"}


@pytest.mark.parametrize("engines", [None, 0])
def test_no_engine(engines):
    refused(f"--vllm.num_engines is {engines}", "--vllm.num_engines 1", vllm__num_engines=engines)


def test_one_rank():
    refused(
        "--vllm.tensor_parallel_size is 1",
        "--vllm.num_engines 1 --vllm.tensor_parallel_size 8",
        "--vllm_engine vllm",
        vllm__tensor_parallel_size=1,
        vllm__num_engines=8,
    )


def test_colocated_engines_must_cover_the_actors_gpus():
    refused(
        "--train.colocate_all",
        "--vllm.tensor_parallel_size 4",
        "--actor.num_gpus_per_node 8",
        train__colocate_all=True,
        actor__num_gpus_per_node=8,
    )
    options.take_options(arguments(train__colocate_all=True))
    # In asynchronous training only the training models share GPUs.
    options.take_options(
        arguments(train__colocate_all=True, train__async_enable=True, actor__num_gpus_per_node=8)
    )


def test_engines_do_not_span_nodes():
    refused(
        "does not span nodes",
        "--vllm.tensor_parallel_size is 16",
        train__colocate_all=True,
        vllm__tensor_parallel_size=16,
        actor__num_nodes=2,
        actor__num_gpus_per_node=8,
    )


def test_what_pat_cannot_do():
    refused("--train.full_determinism_enable True", "measured", train__full_determinism_enable=True)
    refused("--data.max_images_per_prompt 2", "text models", data__max_images_per_prompt=2)


@pytest.mark.parametrize(
    ("gpus", "changed", "said"),
    [
        ([2.0, 2.0], {}, ("--vllm.tensor_parallel_size 4", "[2, 2]")),
        ([], {}, ("--vllm.tensor_parallel_size 4", "[]")),
        ([4.0], {}, ("8 GPUs", "cluster has 4", "--actor.num_gpus_per_node")),
        ([4.0, 3.0], {}, ("8 GPUs", "cluster has 7")),
        ([4.0], {"vllm__num_engines": 2, "train__colocate_all": True}, ("8 GPUs", "has 4")),
        # Enough of them, but the second engine would be on two nodes.
        ([6.0, 3.0, 3.0], {"vllm__num_engines": 2}, ("[6, 3, 3]", "room for 1", "--vllm.num_eng")),
    ],
)
def test_too_few_gpus(gpus, changed, said):
    with pytest.raises(ValueError) as raised:
        options.check_gpus(vars(arguments(**changed)), gpus)
    for part in said:
        assert part in str(raised.value)


def test_enough_gpus():
    options.check_gpus(vars(arguments()), [4.0, 4.0])
    options.check_gpus(vars(arguments(vllm__num_engines=2)), [6.0, 6.0, 0.0])
    options.check_gpus(vars(arguments(train__colocate_all=True)), [4.0])


def test_missing_packages(monkeypatch):
    monkeypatch.setattr(options, "find_spec", lambda package: None)
    with pytest.raises(ValueError, match=r"OpenRLHF is not installed.*openrlhf==0\.11\.2"):
        options.check_installed()
    monkeypatch.setattr(options, "find_spec", lambda package: package == "openrlhf" or None)
    with pytest.raises(ValueError, match=r"vLLM is not installed.*pat-vllm\[cuda,openrlhf\]"):
        options.check_installed()


def test_versions(monkeypatch):
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
    made = argparse.ArgumentParser()
    for name, value in ARGUMENTS.items():
        if name not in OURS:
            made.add_argument(f"--{name}", type=type(value), default=value)
    return made


def test_the_parser_is_extended_once(monkeypatch):
    original = argparse.ArgumentParser.parse_args
    used = []
    monkeypatch.setattr(launch, "use_pat", lambda args: used.append(vars(args)["vllm.engine"]))
    launch.extend_parser()
    # Somebody else's parser comes first.
    assert argparse.ArgumentParser().parse_args([]) == argparse.Namespace()
    assert parser().parse_args(["--vllm_engine", "pat"])
    assert used == ["pat"]
    assert argparse.ArgumentParser.parse_args is original


def test_a_refusal_is_one_line(monkeypatch, capsys):
    launch.extend_parser()
    with pytest.raises(SystemExit) as ended:
        parser().parse_args(["--vllm.engine", "pat", "--vllm.tensor_parallel_size", "1"])
    assert ended.value.code == 2
    printed = capsys.readouterr().err
    assert printed.startswith("pat_openrlhf: --vllm_engine pat") and printed.count("\n") == 1
