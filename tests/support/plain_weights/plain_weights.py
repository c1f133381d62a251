"""Keeps linear weights plain on CPU, as they are on GPUs. Test support only.

vLLM packs them for its CPU kernels and frees the plain ones, so that no trainer could update them.
"""

from __future__ import annotations

from typing import Any

import torch

MODULE = "vllm.model_executor.layers.utils"


def apply() -> None:
    """Have vLLM keep plain weights in this process. To be called before a model is loaded."""
    import vllm.model_executor.layers.utils as utils
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention

    from pat_vllm.patches import delta_net

    patch(utils)
    # vLLM's kernels for CPU take the convolution's weights for packed ones.
    QwenGatedDeltaNetAttention.forward_cpu = delta_net.forward


def patch(utils: Any) -> None:
    """Patch the module `MODULE`."""
    utils.dispatch_cpu_unquantized_gemm = _keep_plain


def _keep_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    layer.cpu_linear = torch.nn.functional.linear
