"""The block that stands for none in a request's table. Kernels may read it where they mask."""

from __future__ import annotations

from typing import Any


def fill_null_block(worker: Any) -> None:
    """Runs in a worker: fills the null block of its layout, in all layers, with NaN."""
    import torch

    runtime = worker._active
    layout = runtime.config.cache_config.get_resolved_kv_cache_layout()
    for view in worker._buffer.views(runtime.kv_cache_config, layout).values():
        # 16-bit and 32-bit floats of these bytes are NaN.
        view[0].view(torch.uint8).fill_(0xFF)
