"""Lets latent attention prefill in chunks and reuse prefixes on CPU, as on GPUs. Test support only.

vLLM's reference backend for CPU attends to a prompt's earlier tokens, but vLLM keeps it from that
wherever a config is made.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def latent_in_chunks() -> Iterator[None]:
    """Inside, the CPU platform leaves what engines are asked for."""
    from vllm.platforms.cpu import CpuPlatform

    original = CpuPlatform.__dict__["check_and_update_config"]

    def check_and_update_config(cls: Any, vllm_config: Any) -> None:
        scheduler, cache = vllm_config.scheduler_config, vllm_config.cache_config
        asked = [
            (scheduler, "enable_chunked_prefill", scheduler.enable_chunked_prefill),
            (scheduler, "max_num_batched_tokens", scheduler.max_num_batched_tokens),
            (cache, "enable_prefix_caching", cache.enable_prefix_caching),
        ]
        original.__func__(cls, vllm_config)
        for owner, name, value in asked:
            setattr(owner, name, value)

    CpuPlatform.check_and_update_config = classmethod(check_and_update_config)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        CpuPlatform.check_and_update_config = original
