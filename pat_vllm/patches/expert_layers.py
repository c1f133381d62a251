"""What PAT does to the experts of vLLM's models, in the workers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from pat_vllm.patches.replacing import replace

if TYPE_CHECKING:
    import torch
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts


def keep_plain_experts(experts: RoutedExperts) -> None:
    """Have vLLM run a layer's experts as they were loaded.

    Without it: vLLM packs them on CPU, and elsewhere makes a contiguous copy of experts that are
    views of larger ones. Missing seam: an option of the CPU platform; elsewhere
    `weights_already_processed`, which counts for all of a model's layers, for one.
    """
    from vllm.model_executor.utils import weights_already_processed
    from vllm.platforms import current_platform

    method = experts.quant_method
    if current_platform.is_cpu():
        if not isinstance(method, _plain_experts()):
            experts.quant_method = _plain_experts()(experts.moe_config)
        return

    def make_kernel_only(process: Callable[..., None]) -> Callable[..., None]:
        def made(layer: RoutedExperts) -> None:
            if method.moe_kernel is None:
                with weights_already_processed():
                    process(layer)

        return made

    replace(method, "process_weights_after_loading", make_kernel_only)


@functools.cache
def _plain_experts() -> type:
    import torch
    from torch.nn.functional import linear
    from vllm.model_executor.layers.activation import SiluAndMul, SwigluOAIAndMul
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    # What vLLM's kernels for CPU compute, with the same constants. The layer itself can only be
    # made where a config of vLLM's is current.
    given = inspect.signature(SwigluOAIAndMul.__init__).parameters
    constants: Any = SimpleNamespace(alpha=given["alpha"].default, limit=given["limit"].default)
    activations: dict[MoEActivation, Callable[[torch.Tensor], torch.Tensor]] = {
        MoEActivation.SILU: SiluAndMul.forward_native,
        MoEActivation.SWIGLUOAI: functools.partial(SwigluOAIAndMul.forward_native, constants),
    }

    class PlainExperts(UnquantizedFusedMoEMethod):
        """vLLM's method for experts, in torch: for weights in any strides, and spread experts."""

        def process_weights_after_loading(self, layer: Any) -> None:
            if layer.activation not in activations or layer.apply_router_weight_on_input:
                known = " or ".join(activation.value for activation in activations)
                raise ValueError(
                    f"pat.weights='inplace' runs experts on CPU with {known}, and routers' weights "
                    f"on their outputs; this model has {layer.activation.value}, and "
                    f"apply_router_weight_on_input={layer.apply_router_weight_on_input}: set "
                    "pat.weights='materialized'"
                )

        def apply(  # type: ignore[override]  # as that of vLLM's experts
            self,
            layer: Any,
            x: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            shared_experts: SharedExperts | None,
            shared_experts_input: torch.Tensor | None,
        ) -> torch.Tensor:
            """What this rank's experts, or its parts of them, add to each token's output.

            Args:
                x: `[tokens, hidden]`.
                topk_weights, topk_ids: `[tokens, experts of a token]`; ids among all experts.
            """
            local = topk_ids.long()
            if layer.expert_map is not None:
                local = layer.expert_map[local].long()
            act = activations[layer.activation]
            w13, w2 = layer.w13_weight, layer.w2_weight
            biases = (layer.w13_bias, layer.w2_bias) if self.moe.has_bias else None
            output = torch.zeros_like(x)
            for expert in local.unique().tolist():
                if expert < 0:  # another rank's
                    continue
                tokens, choices = (local == expert).nonzero(as_tuple=True)
                b13, b2 = (None, None) if biases is None else (bias[expert] for bias in biases)
                added = linear(act(linear(x[tokens], w13[expert], b13)), w2[expert], b2)
                weights = topk_weights[tokens, choices].to(added.dtype)
                output.index_add_(0, tokens, added * weights.unsqueeze(-1))
            return output

    return PlainExperts
