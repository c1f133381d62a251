"""One KV buffer per device, viewed by every layout.

Each layout divides the same bytes into blocks of its own size. Only the active layout's blocks are
in use; a switch copies what they hold to blocks of the next layout.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from vllm.v1.kv_cache_interface import KVCacheConfig, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout


class SharedKVBuffer:
    """The memory behind the KV caches of all layouts.

    vLLM's worker allocates the KV cache of a runner inside a context manager. PAT's worker puts its
    own in the place of that. Inside it, the allocation returns the same buffer each time.
    """

    def __init__(self) -> None:
        self.buffer: torch.Tensor | None = None

    def allocation(self, inner: AbstractContextManager[Any]) -> AbstractContextManager[Any]:
        """Context in which vLLM's KV allocation gets the shared buffer.

        Args:
            inner: vLLM's own context (sleep-mode memory pool), entered for the first allocation.
        """
        return _Allocation(self, inner)

    def views(
        self, kv_cache_config: KVCacheConfig, kv_cache_layout: KVCacheLayout
    ) -> dict[str, torch.Tensor]:
        """Views of the buffer by layer: [blocks, heads, tokens, content] of the cache's dtype.

        Content is what a token has in a head, its key and value, say. Blocks are the scheduler's;
        an attention kernel may use smaller ones.
        """
        assert self.buffer is not None, "no KV cache is allocated yet"
        views: dict[str, torch.Tensor] = {}
        for group in kv_cache_config.kv_cache_groups:
            for tensor in kv_cache_config.kv_cache_tensors:
                if set(tensor.layers) <= set(group.layer_names):
                    layer_views = create_kv_cache_views(
                        self.buffer,
                        group.kv_cache_spec,
                        kv_cache_config.num_blocks,
                        kv_cache_layout,
                        tensor,
                    )
                    views.update(zip(tensor.layers, layer_views, strict=True))
        return views


class _Allocation(TorchFunctionMode):
    """Answers `torch.zeros(n, dtype=int8)`, vLLM's KV allocation, with the shared buffer."""

    def __init__(self, shared: SharedKVBuffer, inner: AbstractContextManager[Any]) -> None:
        super().__init__()
        self._shared = shared
        self._inner = inner

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is not torch.zeros or kwargs.get("dtype") is not torch.int8:
            return func(*args, **kwargs)
        (size,) = args
        if self._shared.buffer is None:
            with self._inner:
                self._shared.buffer = func(*args, **kwargs)
        if self._shared.buffer.numel() != size:
            raise RuntimeError(
                f"a layout needs a KV buffer of {size} bytes, but the shared one has "
                f"{self._shared.buffer.numel()}"
            )
        return self._shared.buffer
