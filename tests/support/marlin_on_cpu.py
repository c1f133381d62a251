"""fp8 weights in Marlin's tiles on CPU, as vLLM has them on an A100. Test support only.

What is replaced, and by what, beside what `fp8_on_cpu` replaces:
* `ops.gptq_marlin_repack`, an operator of CUDA: what vLLM's tests compare it with, in torch;
* vLLM's choice of kernels, and whether Marlin's class is one for this platform;
* vLLM's question for the GPU's compute capability, by which compressed-tensors chooses: 8.0.
Nothing runs the weights.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from tests.support import fp8_on_cpu


@contextmanager
def applied() -> Iterator[None]:
    """Inside, it is replaced."""
    with pytest.MonkeyPatch.context() as patch:
        fp8_on_cpu.apply(patch)
        _choose_marlin(patch)
        yield


def _choose_marlin(patch: pytest.MonkeyPatch) -> None:
    from vllm import _custom_ops as ops
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.marlin import MarlinFP8ScaledMMLinearKernel
    from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import (
        CompressedTensorsConfig,
    )
    from vllm.platforms import PlatformEnum

    for kernels in (
        linear._POSSIBLE_FP8_KERNELS,
        linear._POSSIBLE_FP8_BLOCK_KERNELS,
        linear._POSSIBLE_WFP8A16_KERNELS,
    ):
        patch.setitem(kernels, PlatformEnum.CPU, [MarlinFP8ScaledMMLinearKernel])
    supported = classmethod(lambda cls, compute_capability=None: (True, None))
    patch.setattr(MarlinFP8ScaledMMLinearKernel, "is_supported", supported)
    patch.setattr(CompressedTensorsConfig, "_check_scheme_supported", staticmethod(_on_an_a100))
    patch.setattr(ops, "gptq_marlin_repack", repack)


def repack(
    b_q_weight: torch.Tensor,
    size_k: int,
    size_n: int,
    num_bits: int,
    perm: torch.Tensor | None = None,
    is_a_8bit: bool = False,
) -> torch.Tensor:
    """What vLLM's operation does, for 8 bits.

    Args:
        b_q_weight: int32 `[K / 4, N]`, each element of four neighbours along K.

    Returns:
        int32 `[K / 16, 4 N]`.
    """
    from vllm.model_executor.layers.quantization.utils.marlin_utils_test import (
        get_weight_perm,
        marlin_weights,
    )

    assert num_bits == 8 and not is_a_8bit and b_q_weight.shape == (size_k // 4, size_n)
    values = torch.stack([(b_q_weight >> 8 * i) & 0xFF for i in range(4)], dim=1)
    in_order = values.reshape(size_k, size_n)
    return marlin_weights(in_order, size_k, size_n, num_bits, get_weight_perm(num_bits))


def _on_an_a100(min_capability: int, error: bool = True, match_exact: bool = False) -> bool:
    return min_capability == 80 if match_exact else min_capability <= 80
