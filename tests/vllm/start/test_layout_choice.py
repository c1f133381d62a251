"""Which layouts a real engine's config gets where its user does not say; the log says which.

GPUs are imitated by what the driver would say of them. Modelled, nothing measured.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from vllm.config import CacheConfig

from pat_vllm.config import PATConfig
from pat_vllm.modelled.gpus import GPUS
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.policy_config import StaticPolicyConfig
from pat_vllm.reporting.history import EngineHistory
from pat_vllm.start import prepare as support
from pat_vllm.start.buffers import EngineShape
from pat_vllm.start.setup import Setup
from pat_vllm.worker.layout_config import layout_config
from tests.support.engine_shapes import engine_shape
from tests.support.models import random_model
from tests.unit.start.test_choice import CHOICES, LONGEST, QWEN3_8B, QWEN3_32B

MODELS: dict[str, Any] = {
    "8B": {**QWEN3_8B, "architectures": ["Qwen3ForCausalLM"]},
    "14B": {**MODEL_SHAPES["qwen3-14b"], "architectures": ["Qwen3ForCausalLM"]},
    "32B": {**QWEN3_32B, "architectures": ["Qwen3ForCausalLM"]},
    "30B-A3B": {**MODEL_SHAPES["qwen3-30b-a3b"], "architectures": ["Qwen3MoeForCausalLM"]},
}


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is logged."""
    logged: list[str] = []
    for level in ("info", "warning"):
        monkeypatch.setattr(support.logger, level, lambda text, *of: logged.append(text % of))
    return logged


def engine_config(model: Path, ranks: int = 8, pat: Any = None, **options: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(model),
        tensor_parallel_size=ranks,
        distributed_executor_backend="pat",
        additional_config={"pat": {"weights": "inplace", **(pat or {})}},
        skip_tokenizer_init=True,
        **{"max_model_len": LONGEST, "dtype": "bfloat16", **options},
    ).create_engine_config()


@pytest.mark.parametrize("model", MODELS)
def test_an_engine_agrees_with_the_arithmetic(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: list[str], model: str
) -> None:
    """And with `advise`: tests/unit/start/test_choice.py."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS[model]))
    shape_of = support._engine_shape
    monkeypatch.setattr(
        support,
        "_engine_shape",
        lambda *given: replace(shape_of(*given), runner="V2", attention="FLASH_ATTN"),
    )
    for gpu in ("A100", "L40S", "H100", "B200"):
        device = GPUS[gpu].device
        monkeypatch.setattr(support, "found_device", lambda ranks, of=device: of)
        given = {"max_model_len": LONGEST, "max_num_seqs": 256, "max_num_batched_tokens": 8192}
        config = engine_config(tmp_path, **given)
        shape, _ = engine_shape(MODELS[model], PATConfig(), 8, given, device)
        setup = Setup.of(config)
        assert setup.layouts == shape.layouts
        assert tuple(layout.tp for layout in shape.layouts) == CHOICES[model, gpu]
        stated = f"layouts {', '.join(map(str, shape.layouts))}, by modelled times"
        assert any(stated in line for line in lines[-2:])  # a single layout is warned of, too
        assert stated in setup.chosen["found"]
        assert setup.options.base_tp == shape.layouts[0].tp
        limits = {layout.tp: shape.limits(layout) for layout in shape.layouts}
        # As the engine core has them, and each worker.
        assert setup.limits == limits
        for layout in shape.layouts:
            scheduler = layout_config(config, setup, layout).scheduler_config
            assert scheduler.max_num_batched_tokens == limits[layout.tp].max_num_batched_tokens
        grows = device.link == "nvlink"
        widest = limits[shape.layouts[-1].tp].max_num_batched_tokens
        assert (widest > given["max_num_batched_tokens"]) == grows


def test_defaults_are_those_of_vllm() -> None:
    assert EngineShape(()).gpu_memory_utilization == CacheConfig().gpu_memory_utilization


def test_a_cpu_has_its_own_attention(lines: list[str]) -> None:
    """Whatever is asked for, vLLM takes it there."""
    asked = {"attention_config": {"backend": "FLASHINFER"}}
    config = engine_config(random_model("qwen3"), 2, max_model_len=512, **asked)
    assert support._engine_shape(config, PATConfig()).attention == "CPU_ATTN"


def test_tiny_models_keep_what_tests_rest_on(lines: list[str]) -> None:
    for ranks, expected in ((2, ["tp1dp2", "tp2dp1"]), (4, ["tp1dp4", "tp2dp2", "tp4dp1"])):
        config = engine_config(random_model("qwen3"), ranks, {"weights": "auto"}, max_model_len=512)
        assert [str(layout) for layout in Setup.of(config).layouts] == expected
        assert len(lines) == 1 and "layouts tp1dp" in lines.pop()


def test_it_is_chosen_once(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    config = engine_config(random_model("qwen3"), 2, max_model_len=512)
    before = dict(config.additional_config)
    monkeypatch.setattr(support, "found_device", lambda ranks: 1 / 0)
    support.prepare(config)
    assert config.additional_config == before and len(lines) == 1


@pytest.mark.parametrize(
    "model, pat, expected",
    [
        ("qwen3", {}, "tp4dp1"),  # as vLLM's own engine
        ("qwen3", {"layouts": [1, 2]}, "tp2dp2"),
        ("qwen3", {"policy": {"kind": "static", "tp": 1}}, "tp1dp4"),
        ("qwen3", {"policy": {"kind": "schedule", "switch_at": {4: 4}}}, "tp4dp1"),
        ("qwen3", {"state_dir": "state"}, "tp4dp1"),
        ("qwen3_moe", {"experts": "ep", "weights": "inplace"}, "tp4dp1"),
    ],
    ids=str,
)
def test_batch_invariance_pins_one_layout(
    monkeypatch: pytest.MonkeyPatch,
    lines: list[str],
    model: str,
    pat: dict[str, Any],
    expected: str,
) -> None:
    """No switch, no draft length and no draft depends on time any more; the log, and with it the
    report, says so."""
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    config = engine_config(random_model(model), 4, pat, max_model_len=512)
    setup = Setup.of(config)
    (only,) = setup.layouts
    assert str(only) == expected
    assert isinstance(setup.options.policy, StaticPolicyConfig)
    assert setup.default_layout == only
    assert setup.options.draft_history_bytes == 0
    assert f"VLLM_BATCH_INVARIANT=1 pins tp={only.tp}: " in lines[0]
    assert setup.chosen["found"].startswith("pinned by VLLM_BATCH_INVARIANT=1: ")
    before = dict(config.additional_config)
    support.prepare(config)
    assert config.additional_config == before and len(lines) == 2


def test_what_a_user_names_is_kept_and_warned_of(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, lines: list[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODELS["14B"]))
    monkeypatch.setattr(support, "found_device", lambda ranks: GPUS["A40"].device)
    config = engine_config(tmp_path, pat={"base_tp": 1}, max_num_seqs=256)
    assert Setup.of(config).base.tp == 1
    assert "pat.base_tp=1 leaves" in lines[-1] and "'auto'" in lines[-1]


def test_one_layout_is_a_warning_in_the_log_and_in_the_report(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """And `pat-vllm doctor` says it: tests/unit/doctor/test_stages.py."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["32B"]))
    warnings: list[str] = []
    monkeypatch.setattr(support.logger, "warning", lambda text, *of: warnings.append(text % of))
    small = replace(GPUS["A40"].device, memory=24 << 30)
    monkeypatch.setattr(support, "found_device", lambda ranks: small)
    config = engine_config(tmp_path, max_num_seqs=256)
    setup = Setup.of(config)
    (only,) = setup.layouts
    assert "one layout, tp=8, is kept, and the engine never switches" in warnings[-1]
    report = EngineHistory(setup.chosen["found"]).report(only, (only,))
    assert "the engine never switches" in str(report)


def test_a_driver_that_says_nothing(monkeypatch: pytest.MonkeyPatch, lines: list[str]) -> None:
    from vllm.platforms import current_platform

    def fails(*args: Any) -> int:
        raise RuntimeError("no driver")

    monkeypatch.setattr(type(current_platform), "get_device_total_memory", fails)
    config = engine_config(random_model("qwen3"), 2, max_model_len=512)
    assert [str(layout) for layout in Setup.of(config).layouts] == ["tp1dp2", "tp2dp1"]
    assert "nothing is known of the model's memory" in lines[-1]


def test_the_bytes_of_kv_are_those_of_the_engine(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Half of them, so here a narrower base layout."""
    (tmp_path / "config.json").write_text(json.dumps(MODELS["32B"]))
    monkeypatch.setattr(support, "found_device", lambda ranks: GPUS["H100"].device)
    bases = [
        Setup.of(engine_config(tmp_path, kv_cache_dtype=dtype, max_num_seqs=256)).base.tp
        for dtype in ("auto", "fp8_e5m2")
    ]
    assert bases == [4, 2]
