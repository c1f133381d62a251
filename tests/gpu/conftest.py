"""An engine on GPUs as users start it: compiled, with CUDA graphs, in 16 bits."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

RANKS = 2


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
def llm(devices: int) -> Iterator[Any]:
    """An engine of two ranks that drafts when told to. Its core is in this process."""
    from tests.support.engines import engine

    with pytest.MonkeyPatch.context() as patch:
        # For the CPU build's tests, these are set.
        for name in ("TORCHDYNAMO_DISABLE", "VLLM_CPU_OMP_THREADS_BIND"):
            patch.delenv(name, raising=False)
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        with engine(
            "wide",
            RANKS,
            {"kv_transfer": "migrate"},
            from_server=False,
            dtype="bfloat16",
            enforce_eager=False,
            gpu_memory_utilization=0.2,
            kv_cache_memory_bytes=None,
            max_num_seqs=32,
            enable_sleep_mode=True,
            max_logprobs=4,
            speculative_config={
                "method": "ngram_gpu",
                "num_speculative_tokens": 4,
                "num_speculative_tokens_per_batch_size": [(1, 512, 0)],
                "prompt_lookup_min": 2,
                "prompt_lookup_max": 4,
            },
        ) as llm:
            yield llm
