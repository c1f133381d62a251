"""What vLLM keeps of latent attention's weights a second time, and how that is renewed."""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.layers.attention import MLAAttention


@torch.no_grad()
def renew_absorbed(model: nn.Module) -> None:
    """Have vLLM make `W_UV` and `W_UK_T` anew of weights that have changed, where they lie.

    They are parts of `kv_b_proj`, by which queries and outputs are multiplied in a decode step in
    place of each token's keys and values. Of unquantized weights they are views of it, and nothing
    is to be done. What a switch moves is not among these weights: a layout's heads are a range of
    the base layout's.
    """
    for module in model.modules():
        if isinstance(module, MLAAttention) and not _is_view(module):
            module.process_weights_after_loading(next(module.parameters(recurse=False)).dtype)


def _is_view(module: MLAAttention) -> bool:
    source = module.kv_b_proj.weight.untyped_storage().data_ptr()
    made = module.parameters(recurse=False)
    return all(tensor.untyped_storage().data_ptr() == source for tensor in made)
