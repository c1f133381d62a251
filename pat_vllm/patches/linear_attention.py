"""What PAT does to linear attention of vLLM's models, in the workers."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention


def keep_plain_linear_attention(layer: QwenGatedDeltaNetAttention) -> None:
    """Have vLLM run a layer of Gated DeltaNet on CPU with its weights as they were loaded.

    Without it: vLLM's kernels for CPU take the convolution's weights for packed ones. Missing seam:
    an option of the CPU platform.
    """
    from pat_vllm.patches import delta_net

    layer._forward_method = MethodType(delta_net.forward, layer)
