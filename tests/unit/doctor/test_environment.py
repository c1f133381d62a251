"""What the doctor says of a machine, of packages in vLLM's way, and of a model's memory."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

import pytest

from pat_vllm.config import PATConfig
from pat_vllm.doctor import environment
from pat_vllm.doctor.arithmetic import check_memory, engine_shape
from pat_vllm.doctor.environment import (
    EnvironmentFacts,
    FoundDevice,
    environment_checks,
    incompatible_packages,
)
from pat_vllm.doctor.report import Check
from pat_vllm.start.gpus import GPUS

LLAMA_70B = {
    **{"model_type": "llama", "hidden_size": 8192, "num_hidden_layers": 80},
    **{"num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 28672},
    **{"vocab_size": 128256, "max_position_embeddings": 131072},
}
GPU = FoundDevice(80 << 30, "9.0", name="H100", free=79 << 30)
ON_CPU = EnvironmentFacts(
    {"vllm": "0.32.0"},
    "cpu",
    "a CPU, 1 NUMA node(s)",
    24 << 30,
    20 << 30,
    graphs={"piecewise": "NONE", "full": "NONE"},
)
ON_GPUS = dataclasses.replace(
    ON_CPU,
    platform="cuda",
    graphs={"piecewise": "PIECEWISE", "full": "FULL"},
    devices=(GPU, GPU),
    peers=((True, True), (True, True)),
    attention="FLASH_ATTN",
    runner="V2",
    config=LLAMA_70B,
)


def problems(facts: EnvironmentFacts, ranks: int = 2, machine: bool = True) -> dict[str, str]:
    checks = environment_checks(facts, ranks, machine)
    return {check.name: check.problem for check in checks if check.problem is not None}


def test_a_machine_with_what_the_ranks_need() -> None:
    assert not problems(ON_CPU) and not problems(ON_GPUS)
    poor = dataclasses.replace(ON_CPU, free=1 << 30)
    assert "too little memory: 2 ranks on CPU need about" in problems(poor)["host memory"]
    assert "--ranks 4 needs as many GPUs, 2 are here" in problems(ON_GPUS, ranks=4)["GPUs"]
    # To compute for another machine, this one needs nothing.
    for facts in (poor, ON_GPUS):
        assert not problems(facts, ranks=4, machine=False)


def test_a_link_must_work_both_ways() -> None:
    apart = dataclasses.replace(ON_GPUS, peers=((True, False), (True, True)))
    (links,) = (check for check in environment_checks(apart, 2, True) if check.name == "links")
    assert links.problem is None and "no peer access between 0-1" in links.found
    joined = dataclasses.replace(ON_GPUS, devices=(dataclasses.replace(GPU, link="pcie"),) * 2)
    (links,) = (check for check in environment_checks(joined, 2, True) if check.name == "links")
    assert "every GPU reaches every other's memory, over PCIe" in links.found


def test_a_package_that_cannot_be_imported_is_named_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails = "raise RuntimeError('operator nms\\ndoes not exist')"
    (tmp_path / "pat_test_vision.py").write_text(fails)
    (tmp_path / "pat_test_audio.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    names = ("pat_test_vision", "pat_test_audio", "pat_test_absent")
    with monkeypatch.context() as these:
        these.setattr(environment, "PACKAGES", names)
        broken = incompatible_packages()
    assert broken == {"pat_test_vision": "RuntimeError: operator nms"}

    monkeypatch.setitem(sys.modules, "vllm", None)
    monkeypatch.setattr(environment, "incompatible_packages", lambda: broken)
    words = r"do not fit torch 2.13.0\+cpu .*pat_test_vision of an"
    with pytest.raises(ImportError, match=words) as info:
        environment._import_vllm("2.13.0+cpu")
    assert "pip uninstall torchvision torchaudio torchcodec" in str(info.value)
    # What has nothing to do with them is told as it is.
    monkeypatch.setattr(environment, "incompatible_packages", dict)
    with pytest.raises(ImportError):
        environment._import_vllm("2.13.0+cpu")


def memory_of(base_tp: int, **config: Any) -> Check:
    model = {**LLAMA_70B, **config}
    device, given = GPUS["H100"].device, {"max_num_seqs": 128, "seed": 1}
    shape, choice = engine_shape(model, PATConfig(base_tp=base_tp), 8, given, device)
    assert shape.max_num_seqs == 128 and shape.max_model_len == model["max_position_embeddings"]
    assert shape.layouts == choice.layouts and shape.layouts[0].tp == base_tp
    return check_memory(model, device, shape)


def test_a_model_that_has_no_room_is_told_with_the_way_out() -> None:
    problem = memory_of(1).problem or ""
    assert "too little memory: at base layout tp1dp8 weights take 131." in problem
    assert "base_tp=4 has room for" in problem
    fits = memory_of(4)
    assert fits.problem is None and fits.values["kv_tokens_per_replica"] > 400_000
    unknown = memory_of(1, model_type="mamba")
    assert unknown.problem is None and "not computed" in unknown.found
