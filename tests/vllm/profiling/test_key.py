"""For which engines a profile holds: its key tells apart whatever changes how long steps take."""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.engine.arg_utils import EngineArgs

from pat_vllm.executor.messages import ResolvedKernels
from pat_vllm.profile import ProfileError
from pat_vllm.profiling.key import kernel_environment, profile_key, title
from pat_vllm.profiling.load import _draft_lengths
from pat_vllm.start.setup import Setup
from tests.support.models import random_model
from tests.unit.test_profile import profile

RESOLVED = ResolvedKernels(("CPU_ATTN",), "materialized")
DRAFTS = {
    "method": "ngram",
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
    "num_speculative_tokens": 4,
    "num_speculative_tokens_per_batch_size": [(1, 8, 4), (9, 16, 2)],
}


def engine_config(**options: Any) -> Any:
    model = str(random_model("qwen3"))
    options = {"model": model, "enforce_eager": True, "max_model_len": 64, **options}
    return EngineArgs(**options).create_engine_config()


def key_of(config: Any, resolved: ResolvedKernels) -> dict[str, Any]:
    return profile_key(config, Setup.of(config), resolved)


@pytest.fixture(scope="module")
def usual() -> dict[str, Any]:
    return key_of(engine_config(), RESOLVED)


@pytest.mark.parametrize(
    "change",
    [
        ("kernel_config", "linear_backend", "triton"),
        ("kernel_config", "linear_backend_per_quant", {"mxfp4": "triton"}),
        ("kernel_config", "moe_backend", "triton"),
        ("attention_config", "flash_attn_version", 2),
        ("model_config", "quantization", "fp8"),
        ("parallel_config", "disable_custom_all_reduce", "the opposite"),
        ("resolved", "attention", ("CPU_ATTN", "TRITON_ATTN")),
        ("resolved", "weights", "inplace"),
        ("environment", "VLLM_KV_CACHE_LAYOUT", "HND"),
        ("environment", "VLLM_DISABLED_KERNELS", "MarlinLinearKernel"),
        ("environment", "NCCL_P2P_DISABLE", "1"),
    ],
    ids=lambda change: change[1],
)
def test_key_tells_engines_with_other_kernels_apart(
    monkeypatch: pytest.MonkeyPatch, change: tuple[str, str, Any], usual: dict[str, Any]
) -> None:
    owner, name, value = change
    config, resolved = engine_config(), RESOLVED
    if owner == "environment":
        monkeypatch.setenv(name, value)
    elif owner == "resolved":
        resolved = replace(resolved, **{name: value})
    else:
        part = getattr(config, owner)
        setattr(part, name, not getattr(part, name) if value == "the opposite" else value)
    other = key_of(config, resolved)
    with pytest.raises(ProfileError, match="another engine"):
        profile(usual).check(other, "p.json")
    assert json.loads(json.dumps(other)) == other


def test_key_has_no_paths_and_names(usual: dict[str, Any]) -> None:
    """Nor whether an engine's core has a process of its own."""
    for variable in (
        "VLLM_ENABLE_V1_MULTIPROCESSING",
        "VLLM_LOGGING_LEVEL",
        "VLLM_PORT",
        "VLLM_CACHE_ROOT",
        "VLLM_NCCL_SO_PATH",
        "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR",
        "NCCL_SOCKET_IFNAME",
    ):
        assert kernel_environment({variable: "here"}) == {}, variable
    assert str(random_model("qwen3")) not in json.dumps(usual)


def test_key_tells_engines_with_other_drafters_apart(usual: dict[str, Any]) -> None:
    def key(**changed: Any) -> dict[str, Any]:
        return key_of(engine_config(speculative_config=DRAFTS | changed), RESOLVED)

    speculating = key()
    for changed in (
        {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": None},
        {"num_speculative_tokens_per_batch_size": [(1, 8, 4), (9, 16, 3)]},
        {"prompt_lookup_min": 1},
        {"prompt_lookup_max": 3},
    ):
        assert key(**changed) != speculating, changed
    # What is verified when does not change how long it takes.
    assert key(num_speculative_tokens_per_batch_size=[(1, 8, 4), (9, 16, 0)]) == speculating
    assert title(speculating).endswith("; ngram drafts")
    assert "speculation" not in usual and "drafts" not in title(usual)


def test_draft_lengths_that_can_be_measured() -> None:
    def lengths(method: str, use_v2: bool) -> tuple[int, ...]:
        speculative = SimpleNamespace(method=method)
        config: Any = SimpleNamespace(speculative_config=speculative, use_v2_model_runner=use_v2)
        return _draft_lengths(config, (0, 1, 2, 4, 7))

    assert lengths("ngram", use_v2=False) == lengths("ngram_gpu", use_v2=True) == (1, 2, 4, 7)
    assert lengths("mtp", use_v2=True) == lengths("mtp", use_v2=False) == (1, 2, 4, 7)
    assert lengths("ngram_gpu", use_v2=False) == ()
    without: Any = SimpleNamespace(speculative_config=None)
    assert _draft_lengths(without, ()) == ()
