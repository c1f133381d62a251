"""What PAT does to latent attention of vLLM's models, in the workers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import nn
    from vllm.model_executor.layers.attention import MLAAttention


def renew_absorbed(model: nn.Module) -> None:
    """Have vLLM make `W_UV` and `W_UK_T` anew of weights that have changed, where they lie.

    They are parts of `kv_b_proj`, by which queries and outputs are multiplied in a decode step.
    Without it: where they are no views of it, as they are of unquantized weights, they stay those
    of the old weights; and vLLM would make them elsewhere, where compiled code does not look. What
    a switch moves is not among these weights: a layout's heads are a range of the base layout's.
    Missing seam: vLLM makes them only when it has loaded a model's weights, as new parameters.
    """
    import torch
    from vllm.model_executor.layers.attention import MLAAttention

    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, MLAAttention) and not _is_view(module):
                kept = dict(module.named_parameters(recurse=False))
                module.process_weights_after_loading(next(iter(kept.values())).dtype)
                for name, parameter in kept.items():
                    new = getattr(module, name)
                    if new is not parameter:
                        parameter.copy_(new)
                        setattr(module, name, parameter)


def _is_view(module: MLAAttention) -> bool:
    source = module.kv_b_proj.weight.untyped_storage().data_ptr()
    made = module.parameters(recurse=False)
    return all(tensor.untyped_storage().data_ptr() == source for tensor in made)
