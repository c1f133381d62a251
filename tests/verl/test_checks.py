"""What is refused before anything starts. No verl needed."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("pat_verl")

from pat_verl.checks import (
    ALLOW_UNTESTED,
    advice_on_width,
    asks_for_pat,
    check_rollout,
    check_verl_version,
    pat_options,
)

VLLM = "engine_kwargs__vllm__"
MTP = {"enable": True, "enable_rollout": True, "method": "mtp", "num_speculative_tokens": 1}


def rollout(**changes: Any) -> dict[str, Any]:
    """A rollout config that is fine, with changes; `__` stands for a dot."""
    config: dict[str, Any] = {
        "name": "pat",
        "tensor_model_parallel_size": 4,
        "data_parallel_size": 1,
        "pipeline_model_parallel_size": 1,
        "expert_parallel_size": 1,
        "engine_kwargs": {"vllm": {}},
        "checkpoint_engine": {"backend": "naive"},
        "disaggregation": {"enabled": False},
        "mtp": None,
        "qat": {"enable": False},
        "quantization": None,
        "full_determinism": False,
    }
    for path, value in changes.items():
        *parents, last = path.split("__")
        inner = config
        for parent in parents:
            inner[parent] = inner.get(parent) or {}
            inner = inner[parent]
        inner[last] = value
    return config


def test_configs_that_pass() -> None:
    check_rollout(rollout(), {"lora_rank": 0}, gpus_per_node=8, world_size=16)
    check_rollout(rollout(), {"lora_rank": 8, "lora": {"rank": 0, "merge": True}})
    for changes in (
        {
            VLLM + "additional_config": {
                "pat": {"policy": {"kind": "schedule", "switch_at": {4: 4}}}
            }
        },
        {"checkpoint_engine__backend": "nccl"},
        {VLLM + "speculative_config": {"method": "ngram", "num_speculative_tokens": 4}},
        {VLLM + "speculative_config": '{"method": "ngram_gpu"}'},
        # Heads that are trained, but not used in rollouts.
        {"mtp": {"enable": True, "enable_rollout": False, "method": "dflash"}},
        {"mtp": MTP},
        {"mtp": MTP | {"method": "deepseek_mtp"}},
        # Another drafter than verl's option would take.
        {
            "mtp": MTP,
            "quantization": "fp8",
            VLLM + "speculative_config": {"method": "eagle3", "model": "HEAD"},
        },
        {VLLM + "speculative_config": {"model": "DRAFTER", "num_speculative_tokens": 2}},
        {"quantization": "fp8"},
        # Its VLLM_BATCH_INVARIANT=1 pins a layout.
        {"full_determinism": True},
    ):
        check_rollout(rollout(**changes))


@pytest.mark.parametrize(
    ("changes", "option", "way_out"),
    [
        ({"data_parallel_size": 2}, "data_parallel_size=2", "tensor_model_parallel_size"),
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size=2", "set 1"),
        ({"expert_parallel_size": 4}, "expert_parallel_size=4", "set 1"),
        ({VLLM + "nnodes": 2}, "engine_kwargs.vllm.nnodes=2", "leave it out"),
        ({VLLM + "data_parallel_size": 2}, "engine_kwargs.vllm.data_parallel_size=2", "set 1"),
        ({VLLM + "tensor_parallel_size": 2}, "vllm.tensor_parallel_size=2", "leave it out"),
        ({VLLM + "distributed_executor_backend": "mp"}, "_backend=mp", "rollout.name=vllm"),
        (
            {VLLM + "additional_config": {"pat": {"enabled": False}}},
            "additional_config.pat.enabled=False",
            "set rollout.name=vllm and the rollout.tensor_model_parallel_size that you want",
        ),
        (
            {VLLM + "additional_config": {"pat": {"launcher": "ray"}}},
            "additional_config.pat.launcher=ray",
            "leave it out",
        ),
        ({VLLM + "additional_config": {"pat": {"polisy": 1}}}, "unknown option 'polisy'", ""),
        ({VLLM + "additional_config": {"pat": {"layouts": [3]}}}, "pat.layouts names tp=3", ""),
        ({VLLM + "additional_config": "pat"}, "must be a mapping", ""),
        ({"disaggregation__enabled": True}, "rollout.disaggregation.enabled=True", "set False"),
        ({"checkpoint_engine__backend": "delta_sharded"}, "backend=delta_sharded", "naive, nccl"),
        ({"quantization": "torchao"}, "rollout.quantization=torchao", "set fp8 or null"),
        ({"quantization": "ascend"}, "rollout.quantization=ascend", "set fp8 or null"),
        ({"qat__enable": True}, "rollout.qat.enable=True", "set False"),
        (
            {"mtp": MTP | {"method": "dflash"}},
            "rollout.mtp.method=dflash",
            "mtp, eagle3, eagle, draft_model; or set rollout.mtp.enable_rollout=False",
        ),
        (
            {"mtp": MTP, "quantization": "fp8"},
            "rollout.quantization=fp8",
            "set null, or rollout.mtp.enable_rollout=False",
        ),
        (
            {VLLM + "speculative_config": '{"method": "suffix"}'},
            "speculative_config.method=suffix",
            "allowed ngram, ngram_gpu, mtp",
        ),
        ({VLLM + "speculative_config": "ngram"}, "must be a mapping, got 'ngram'", "{method:ngram"),
        ({"enable_rollout_routing_replay": True}, "routing_replay=True", "set False"),
    ],
)
def test_refused(changes: dict[str, Any], option: str, way_out: str) -> None:
    with pytest.raises(ValueError) as refusal:
        check_rollout(rollout(**changes))
    assert option in str(refusal.value)
    assert way_out in str(refusal.value)


@pytest.mark.parametrize(
    ("tp", "per_node", "world", "message"),
    [
        (16, 8, 16, "tensor_model_parallel_size=16 on nodes with 8 GPUs .*more PAT engines"),
        (3, 8, 8, r"tensor_model_parallel_size=3 on nodes with 8 GPUs .*allowed \[2, 4, 8\]"),
        (2, 1, 8, "tensor_model_parallel_size=2 on nodes with 1 GPUs .*rollout.name=vllm"),
        (4, None, 6, r"tensor_model_parallel_size=4 on 6 GPUs .*allowed \[2, 3, 6\]"),
        (1, 8, 8, "size=1 .*at least 2.*name all GPUs of a node, or set rollout.name=vllm"),
        (0, 8, 8, "tensor_model_parallel_size=0 .*at least 2"),
    ],
)
def test_tp_that_does_not_match_the_gpus(
    tp: int, per_node: int | None, world: int, message: str
) -> None:
    config = rollout(tensor_model_parallel_size=tp)
    with pytest.raises(ValueError, match=message):
        check_rollout(config, gpus_per_node=per_node, world_size=world)


def test_heads_that_do_not_divide(tmp_path: Path) -> None:
    """Of Qwen2.5-7B; vLLM would refuse them when a trainer has loaded the model."""
    loaded = SimpleNamespace(num_attention_heads=28)
    text = SimpleNamespace(text_config=loaded, num_attention_heads=8)
    (tmp_path / "config.json").write_text('{"num_attention_heads": 28}')
    on_disk = {"path": str(tmp_path), "hf_config_path": None}
    message = r"size=8 with a model of 28 attention heads .*allowed \[2, 4\], best 4"
    for model in ({"hf_config": loaded}, {"hf_config": text}, on_disk):
        with pytest.raises(ValueError, match=message):
            check_rollout(rollout(tensor_model_parallel_size=8), model, gpus_per_node=8)
        with pytest.raises(ValueError, match=r"size=3 on nodes.*allowed \[2, 4\], best 4"):
            check_rollout(rollout(tensor_model_parallel_size=3), model, gpus_per_node=8)
        check_rollout(rollout(tensor_model_parallel_size=4), model, gpus_per_node=8)
    (tmp_path / "config.json").write_text("no JSON")
    for unknown in (on_disk, {"path": "Qwen/Qwen2.5-7B"}, {"hf_config": object()}):
        check_rollout(rollout(tensor_model_parallel_size=8), unknown, gpus_per_node=8)


def test_advice_on_narrow_engines() -> None:
    """As wide as a node, or as the model's heads allow there."""
    heads = {"hf_config": SimpleNamespace(num_attention_heads=28)}
    for tp, model, best in ((8, None, None), (4, heads, None), (2, heads, 4), (4, None, 8)):
        said = advice_on_width(rollout(tensor_model_parallel_size=tp), model, 8)
        assert said is None if best is None else said and f"over {tp} of the 8 GPUs" in said
        assert best is None or str(said).endswith(f"Best is {best}")


def test_adapters_are_refused_unless_merged() -> None:
    with pytest.raises(ValueError, match=r"model.lora_rank=8 .*model.lora.merge=true"):
        check_rollout(rollout(), {"lora_rank": 8, "lora": {"rank": 0}})


def test_all_ways_to_ask_for_pat() -> None:
    """The error names the one that was used. `enabled` is as in an engine: vLLM's classes of verl
    would else run with PAT's executor."""
    backend = {VLLM + "distributed_executor_backend": "pat"}
    enabled, disabled = (
        {VLLM + "additional_config": {"pat": {"enabled": value}}} for value in (True, False)
    )
    kwargs = "rollout.engine_kwargs.vllm"
    for config, option in (
        (rollout(), "rollout.name=pat"),
        (rollout(name="vllm", **backend), f"{kwargs}.distributed_executor_backend=pat"),
        (rollout(name="vllm", **enabled), f"{kwargs}.additional_config.pat.enabled=true"),
    ):
        assert asks_for_pat(config)
        check_rollout(config)
        with pytest.raises(ValueError, match=f"^{option} "):
            check_rollout(config | {"data_parallel_size": 2})
    for changes in ({}, disabled, backend | disabled):
        assert not asks_for_pat(rollout(name="vllm", **changes))
    text = rollout(name="vllm", **{VLLM + "additional_config": '{"pat": {"enabled": true}}'})
    assert asks_for_pat(text)
    with pytest.raises(ValueError, match=r"must be a mapping, got .*enabled"):
        check_rollout(text)


def test_options_as_hydra_gives_them() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    pat = {"policy": {"kind": "schedule", "switch_at": {4: 2}}, "layouts": [1, 2, 4]}
    config = omegaconf.OmegaConf.create(rollout(**{VLLM + "additional_config": {"pat": pat}}))
    check_rollout(config)
    options = pat_options(config)
    assert options.policy.switch_at == {4: 2}  # type: ignore[union-attr]
    assert options.layouts == (1, 2, 4)


def test_versions_of_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    check_verl_version("0.9.1")
    for wrong in ("0.8.0", "0.10.0", "main"):
        with pytest.raises(ValueError, match=f"verl {wrong} is installed.*verl==0.9.1"):
            check_verl_version(wrong)
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    check_verl_version("0.10.0")
