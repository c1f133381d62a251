"""Engines on GPUs as users start them: compiled, with CUDA graphs, in 16 bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

RANKS = int(os.environ.get("RANKS", "2"))
MODELS = {
    "dense": "wide",
    "mixture": "moe",
    "spread mixture": "moe",
    "linear": "linear",
    "latent": "latent",
    "window": "window",
    "sinks": "sinks",
}
"""By what their tests are called, models of `tests/support/models.py`."""
EXPERTS = ("mixture", "spread mixture", "linear", "latent", "sinks")
DENSE_ONLY: dict[str, Any] = {
    "enable_sleep_mode": True,
    "weight_transfer_config": {"backend": "ipc"},
    "speculative_config": {
        "method": "ngram_gpu",
        "num_speculative_tokens": 4,
        "num_speculative_tokens_per_batch_size": [(1, 512, 0)],
        "prompt_lookup_min": 2,
        "prompt_lookup_max": 4,
    },
}
"""An engine that drafts when told to, sleeps, and takes new weights."""


@pytest.fixture(scope="session")
def devices() -> int:
    """The number of CUDA devices, as vLLM sees them, of which one may serve several ranks
    (`benchmarks/gpu/bare/one_gpu.py`); without as many as ranks, tests are skipped."""
    torch = pytest.importorskip("torch")
    count = 0
    if torch.cuda.is_available():
        from vllm.platforms import current_platform

        count = current_platform.device_count()
    if count < RANKS:
        pytest.skip(f"needs {RANKS} CUDA devices; this machine has {count}")
    return count


@pytest.fixture(scope="session")
def llm(devices: int, request: pytest.FixtureRequest) -> Iterator[Any]:
    """An engine with one of `MODELS`, whose core is in this process. Its workers end well."""
    import torch

    from tests.support.engines import engine

    if request.param in EXPERTS:
        pytest.importorskip("vllm._moe_C_stable_libtorch")
    is_dense = request.param == "dense"
    # Of ranks that share a GPU, each counts what the others hold as its own.
    share = 0.2 if torch.cuda.device_count() >= RANKS else 0.4 / RANKS
    with pytest.MonkeyPatch.context() as patch:
        # For the CPU build's tests, these are set.
        for name in ("TORCHDYNAMO_DISABLE", "VLLM_CPU_OMP_THREADS_BIND"):
            patch.delenv(name, raising=False)
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        with engine(
            MODELS[request.param],
            RANKS,
            {"kv_transfer": "migrate", "experts": "ep" if "spread" in request.param else "auto"},
            from_server=False,
            dtype="bfloat16",
            enforce_eager=False,
            gpu_memory_utilization=share,
            # What vLLM measures, others in the GPU's memory may spoil.
            kv_cache_memory_bytes=None if is_dense else 512 << 20,
            max_num_seqs=32,
            max_logprobs=4,
            **(DENSE_ONLY if is_dense else {}),
        ) as llm:
            workers = [worker.proc for worker in executor_of(llm).workers]
            yield llm
    assert [worker.exitcode for worker in workers] == [0] * RANKS


def executor_of(llm: Any) -> Any:
    return llm.llm_engine.engine_core.engine_core.model_executor
