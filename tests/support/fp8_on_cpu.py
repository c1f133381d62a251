"""fp8 weights on CPU, where vLLM has kernels for some of them only. Test support only.

What is replaced, and by what:
* `ops.scaled_fp8_quant`, a stub on CPU, and `torch._scaled_mm`, which takes a second for 100
  million products: a product in 32 bits;
* activations of 32 bits are let through, in which layouts differ by rounding alone;
* matrices with scales for blocks: a kernel that takes them apart and multiplies in 32 bits;
* experts: torch, by the same. They are chosen in the name of vLLM's backend Triton, whose form of
  weights they have.

vLLM's kernels for CPUs with AMX pack weights, as none on a GPU in their place does: they are off.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch

_FP8 = torch.float8_e4m3fn
PACKING = (
    "CPUFP8W8A8ScaledMMLinearKernel",
    "CPUFp8PerTensorScaledMMLinearKernel",
    "CPUFp8W8A8BlockScaledMMKernel",
    "CPUFp8BlockScaledMMKernel",
)


def apply(patch: pytest.MonkeyPatch) -> None:
    """Replace it all in this process. To be called before a model is made."""
    from vllm import _custom_ops as ops

    patch.setenv("VLLM_DISABLED_KERNELS", ",".join(PACKING))
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    patch.setattr(ops, "scaled_fp8_quant", scaled_fp8_quant)
    patch.setattr(torch, "_scaled_mm", scaled_mm)
    supported = [torch.float32, torch.bfloat16, torch.float16]
    patch.setattr(Fp8Config, "get_supported_act_dtypes", classmethod(lambda cls: supported))
    _run_blocks(patch)
    _run_experts(patch)


def has_fp8_kv() -> bool:
    """Whether vLLM's attention on this CPU has KV in fp8."""
    return torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()


@contextmanager
def applied() -> Iterator[None]:
    """Inside, it is replaced."""
    with pytest.MonkeyPatch.context() as patch:
        apply(patch)
        yield


def scaled_fp8_quant(
    input: torch.Tensor,
    scale: torch.Tensor | None = None,
    num_token_padding: int | None = None,
    scale_ub: torch.Tensor | None = None,
    use_per_token_if_dynamic: bool = False,
    output: torch.Tensor | None = None,
    group_shape: tuple[int, int] | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What vLLM's operation does, as far as weights need it."""
    most = torch.finfo(_FP8).max
    if scale is None:
        amax = input.abs().float()
        amax = amax.amax(-1, keepdim=True) if use_per_token_if_dynamic else amax.amax().reshape(1)
        scale = (amax / most).clamp_min(1.0 / (most * 512))
    quantized = (input.float() / scale).clamp(-most, most).to(_FP8)
    if output is None:
        return quantized, scale
    return output.copy_(quantized), scale


def scaled_mm(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """What torch's operation gives, in whatever order it adds: one order, whatever the strides."""
    result = torch.nn.functional.linear(a.float(), b.t().contiguous().float()) * scale_a * scale_b
    if bias is not None:
        result = result + bias
    return result.to(out_dtype)


def in_full(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Weights of `[..., rows, columns]` in 32 bits, from fp8 and its scales.

    Args:
        scale: for all of a matrix `[...]`, for its rows `[..., rows, 1]`, or for square blocks.
    """
    rows, columns = weight.shape[-2:]
    if scale.dim() < weight.dim():
        scale = scale.reshape(*scale.shape, 1, 1)
    for dim, size in ((-2, rows), (-1, columns)):
        if 1 < scale.shape[dim] < size:
            block = -(-size // scale.shape[dim])
            scale = scale.repeat_interleave(block, dim=dim).narrow(dim, 0, size)
    return weight.float() * scale.float()


def _run_blocks(patch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
        Fp8BlockScaledMMLinearKernel,
    )
    from vllm.platforms import PlatformEnum

    from pat_vllm.weights.fp8 import KERNELS, Kernel

    class DequantizingKernel(Fp8BlockScaledMMLinearKernel):
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(
            self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
        ) -> torch.Tensor:
            assert B.is_contiguous(), "the kernel in its place would compute something else"
            return torch.nn.functional.linear(A.float(), in_full(B, Bs)).to(A.dtype)

    patch.setitem(KERNELS, DequantizingKernel.__name__, Kernel())
    patch.setitem(linear._POSSIBLE_FP8_BLOCK_KERNELS, PlatformEnum.CPU, [DequantizingKernel])


def _run_experts(patch: pytest.MonkeyPatch) -> None:
    import vllm.model_executor.layers.fused_moe.oracle.fp8 as oracle
    from torch.nn.functional import linear
    from vllm.model_executor.layers.activation import SiluAndMul
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.quantization import fp8
    from vllm.model_executor.layers.quantization.online import fp8 as online

    import pat_vllm.weights.fp8 as ours

    def select(*args: Any, **kwargs: Any) -> tuple[Fp8MoeBackend, type]:
        return Fp8MoeBackend.TRITON, Experts

    class Experts:
        """In a kernel's place: gives what this rank's experts, or its parts, add."""

        is_monolithic = can_overlap_shared_experts = False
        fused_experts = SimpleNamespace(consumes_expert_mask=False)
        prepare_finalize = SimpleNamespace(topk_indices_dtype=lambda: None)

        def __init__(self, moe_quant_config: Any, **kwargs: Any) -> None:
            self._scales = moe_quant_config.w1_scale, moe_quant_config.w2_scale

        def output_is_reduced(self) -> bool:
            return False

        def apply(
            self,
            x: torch.Tensor,
            w13: torch.Tensor,
            w2: torch.Tensor,
            topk_weights: torch.Tensor,
            topk_ids: torch.Tensor,
            expert_map: torch.Tensor | None = None,
            **kwargs: Any,
        ) -> torch.Tensor:
            local = topk_ids.long()
            if expert_map is not None:
                local = expert_map[local].long()
            output = torch.zeros_like(x, dtype=torch.float32)
            for expert in local.unique().tolist():
                if expert < 0:  # another rank's
                    continue
                tokens, choices = (local == expert).nonzero(as_tuple=True)
                up, down = (
                    in_full(weight[expert], scale[expert])
                    for weight, scale in zip((w13, w2), self._scales, strict=True)
                )
                added = linear(SiluAndMul.forward_native(linear(x[tokens].float(), up)), down)
                weights = topk_weights[tokens, choices].float().unsqueeze(-1)
                output.index_add_(0, tokens, added * weights)
            return output.to(x.dtype)

    for module in (oracle, fp8, online):
        patch.setattr(module, "select_fp8_moe_backend", select)
    for module in (oracle, fp8, ours):
        patch.setattr(module, "make_fp8_moe_kernel", Experts)
