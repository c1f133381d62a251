"""What is refused before anything starts, and with which words. No verl needed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("pat_verl")

from pat_verl.checks import (
    ALLOW_UNTESTED,
    asks_for_pat,
    check_rollout,
    check_verl_version,
    pat_options,
)


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


def test_a_usual_config_passes() -> None:
    check_rollout(rollout(), {"lora_rank": 0}, gpus_per_node=8, world_size=16)
    policy = {"kind": "schedule", "switch_at": {4: 4}}
    check_rollout(rollout(engine_kwargs__vllm__additional_config={"pat": {"policy": policy}}))
    check_rollout(rollout(checkpoint_engine__backend="nccl"))
    check_rollout(rollout(), {"lora_rank": 8, "lora": {"rank": 0, "merge": True}})
    for drafts in ({"method": "ngram", "num_speculative_tokens": 4}, '{"method": "ngram_gpu"}'):
        check_rollout(rollout(engine_kwargs__vllm__speculative_config=drafts))
    # Heads that are trained, but not used in rollouts.
    check_rollout(rollout(mtp={"enable": True, "enable_rollout": False}))


@pytest.mark.parametrize(
    ("changes", "option", "way_out"),
    [
        ({"data_parallel_size": 2}, "rollout.data_parallel_size=2", "tensor_model_parallel_size"),
        ({"pipeline_model_parallel_size": 2}, "pipeline_model_parallel_size=2", "set 1"),
        ({"expert_parallel_size": 4}, "rollout.expert_parallel_size=4", "set 1"),
        ({"engine_kwargs__vllm__nnodes": 2}, "engine_kwargs.vllm.nnodes=2", "leave it out"),
        (
            {"engine_kwargs__vllm__data_parallel_size": 2},
            "engine_kwargs.vllm.data_parallel_size=2",
            "set 1",
        ),
        (
            {"engine_kwargs__vllm__tensor_parallel_size": 2},
            "engine_kwargs.vllm.tensor_parallel_size=2",
            "leave it out",
        ),
        (
            {"engine_kwargs__vllm__distributed_executor_backend": "mp"},
            "distributed_executor_backend=mp",
            "rollout.name=vllm",
        ),
        (
            {"engine_kwargs__vllm__additional_config": {"pat": {"launcher": "ray"}}},
            "additional_config.pat.launcher=ray",
            "leave it out",
        ),
        ({"disaggregation__enabled": True}, "rollout.disaggregation.enabled=True", "set False"),
        (
            {"checkpoint_engine__backend": "delta_sharded"},
            "rollout.checkpoint_engine.backend=delta_sharded",
            "naive, nccl",
        ),
        ({"quantization": "fp8"}, "rollout.quantization=fp8", "set null"),
        ({"qat__enable": True}, "rollout.qat.enable=True", "set False"),
        (
            {"mtp": {"enable": True, "enable_rollout": True, "method": "mtp"}},
            "rollout.mtp.enable_rollout=True",
            "set False; without weights is +actor_rollout_ref.rollout.engine_kwargs.vllm.spec",
        ),
        (
            {"engine_kwargs__vllm__speculative_config": {"method": "eagle3", "model": "/head"}},
            "rollout.engine_kwargs.vllm.speculative_config.method=eagle3",
            "allowed ngram, ngram_gpu",
        ),
        (
            {"engine_kwargs__vllm__speculative_config": '{"method": "suffix"}'},
            "rollout.engine_kwargs.vllm.speculative_config.method=suffix",
            "allowed ngram, ngram_gpu",
        ),
        (
            {"engine_kwargs__vllm__speculative_config": "ngram"},
            "rollout.engine_kwargs.vllm.speculative_config must be a mapping, got 'ngram'",
            "speculative_config='{method:ngram,num_speculative_tokens:4",
        ),
        (
            {"enable_rollout_routing_replay": True},
            "rollout.enable_rollout_routing_replay=True",
            "set False",
        ),
        ({"full_determinism": True}, "rollout.full_determinism=True", "='{kind:static,tp:N}'"),
    ],
)
def test_refused(changes: dict[str, Any], option: str, way_out: str) -> None:
    with pytest.raises(ValueError) as refusal:
        check_rollout(rollout(**changes))
    assert option in str(refusal.value)
    assert way_out in str(refusal.value)


def test_adapters_are_refused_unless_merged() -> None:
    with pytest.raises(ValueError, match=r"model.lora_rank=8 .*model.lora.merge=true"):
        check_rollout(rollout(), {"lora_rank": 8, "lora": {"rank": 0}})


@pytest.mark.parametrize(
    ("tp", "per_node", "world", "message"),
    [
        (16, 8, 16, "tensor_model_parallel_size=16 on nodes with 8 GPUs .*more PAT engines"),
        (3, 8, 8, r"tensor_model_parallel_size=3 on nodes with 8 GPUs .*allowed \[1, 2, 4, 8\]"),
        (4, None, 6, r"tensor_model_parallel_size=4 on 6 GPUs .*allowed \[1, 2, 3, 6\]"),
        (0, 8, 8, "tensor_model_parallel_size=0 .*at least 1"),
    ],
)
def test_tp_that_does_not_match_the_gpus(
    tp: int, per_node: int | None, world: int, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_rollout(
            rollout(tensor_model_parallel_size=tp), gpus_per_node=per_node, world_size=world
        )


def test_determinism_is_possible_in_one_layout() -> None:
    static = {"pat": {"policy": {"kind": "static", "tp": 4}}}
    check_rollout(rollout(full_determinism=True, engine_kwargs__vllm__additional_config=static))


@pytest.mark.parametrize(
    ("additional", "message"),
    [
        ({"pat": {"polisy": 1}}, "unknown option 'polisy'"),
        ({"pat": {"layouts": [3]}}, "pat.layouts names tp=3"),
        ("pat", "must be a mapping"),
    ],
)
def test_wrong_options_of_pat(additional: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_rollout(rollout(engine_kwargs__vllm__additional_config=additional))


def test_the_error_names_what_was_asked_for() -> None:
    named = rollout(
        name="vllm",
        data_parallel_size=2,
        engine_kwargs__vllm__distributed_executor_backend="pat",
    )
    with pytest.raises(
        ValueError, match=r"^rollout.engine_kwargs.vllm.distributed_executor_backend=pat "
    ):
        check_rollout(named)
    with pytest.raises(ValueError, match=r"^rollout.name=pat "):
        check_rollout(rollout(data_parallel_size=2))


def test_who_asks_for_pat() -> None:
    assert asks_for_pat(rollout())
    assert not asks_for_pat(rollout(name="vllm"))
    assert asks_for_pat(
        rollout(name="vllm", engine_kwargs__vllm__distributed_executor_backend="pat")
    )


def test_options_as_hydra_gives_them() -> None:
    omegaconf = pytest.importorskip("omegaconf")
    config = omegaconf.OmegaConf.create(
        rollout(engine_kwargs__vllm__additional_config={"pat": {"policy": {"kind": "predictor"}}})
    )
    check_rollout(config)
    config.engine_kwargs.vllm.additional_config.pat.policy = {
        "kind": "schedule",
        "switch_at": {4: 2},
    }
    assert pat_options(config).policy.switch_at == {4: 2}  # type: ignore[union-attr]
    config.engine_kwargs.vllm.additional_config.pat.layouts = [1, 2, 4]
    assert pat_options(config).layouts == (1, 2, 4)


def test_versions_of_verl(monkeypatch: pytest.MonkeyPatch) -> None:
    check_verl_version("0.9.1")
    for wrong in ("0.8.0", "0.10.0", "main"):
        with pytest.raises(ValueError, match=f"verl {wrong} is installed.*verl==0.9.1"):
            check_verl_version(wrong)
    monkeypatch.setenv(ALLOW_UNTESTED, "1")
    check_verl_version("0.10.0")
