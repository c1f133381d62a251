"""What vLLM keeps of latent attention's weights a second time, and how that is renewed."""

from __future__ import annotations

import torch
from torch import nn
from vllm.model_executor.layers.attention import MLAAttention


def is_absorbed(module: nn.Module) -> bool:
    """Whether vLLM makes the parameters of this module of another's, when weights are loaded.

    Of latent attention that are `W_UV` and `W_UK_T`, by which queries and outputs are multiplied in
    a decode step in place of each token's keys and values. They are parts of `kv_b_proj`.
    """
    return isinstance(module, MLAAttention)


@torch.no_grad()
def renew_absorbed(model: nn.Module) -> None:
    """Make them anew of weights that have changed, where they are no views of these.

    Of unquantized weights they are views. What a switch moves is not among these weights: a
    layout's heads are a range of the base layout's. Copies keep their addresses, for compiled code.
    """
    for module in model.modules():
        if isinstance(module, MLAAttention) and not _is_view(module):
            kept = dict(module.named_parameters(recurse=False))
            module.process_weights_after_loading(next(iter(kept.values())).dtype)
            for name, parameter in kept.items():
                new = getattr(module, name)
                if new is not parameter:
                    parameter.data.copy_(new)
                    setattr(module, name, parameter)


def _is_view(module: MLAAttention) -> bool:
    source = module.kv_b_proj.weight.untyped_storage().data_ptr()
    made = module.parameters(recurse=False)
    return all(tensor.untyped_storage().data_ptr() == source for tensor in made)
