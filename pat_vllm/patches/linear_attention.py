"""What PAT does to linear attention of vLLM's models, in the workers."""

from __future__ import annotations

from types import MethodType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn


def end_prompts_parts_with_blocks(model: nn.Module) -> None:
    """Have vLLM compute prompts of a model with Mamba2 as it does those with Gated DeltaNet.

    Without it: a step keeps a state from within a part of a prompt, too, in one more block of the
    request. vLLM's kernels for CPU do not have that state. Missing seam: an option.
    """
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    for layer in model.modules():
        if isinstance(layer, MambaMixer2):
            plain = MethodType(MambaBase.get_kv_cache_spec, layer)
            layer.get_kv_cache_spec = plain  # type: ignore[method-assign]
