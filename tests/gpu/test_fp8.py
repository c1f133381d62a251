"""vLLM's fp8 kernels on shards of a matrix as layouts find them, against the same shard by itself.

On a GPU this is to be run first: CUTLASS computes a view with gaps wrong, without an error.
"""

from __future__ import annotations

from typing import Any

import pytest

pytestmark = pytest.mark.gpu

ROWS, COLUMNS, BLOCK = 1024, 4096, 128
SCALES = ["tensor", "channel", "block"]


@pytest.fixture
def torch() -> Any:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device; this machine has none")
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("fp8 products need compute capability 8.9")
    return torch


def kernel_for(torch: Any, scales: str, columns: int) -> Any:
    from vllm.model_executor.kernels.linear import init_fp8_linear_kernel
    from vllm.model_executor.layers.quantization.utils import quant_utils as keys

    weight, activation = {
        "tensor": (keys.kFp8StaticTensorSym, keys.kFp8DynamicTokenSym),
        "channel": (keys.kFp8StaticChannelSym, keys.kFp8DynamicTokenSym),
        "block": (keys.kFp8Static128BlockSym, keys.kFp8Dynamic128Sym),
    }[scales]
    return init_fp8_linear_kernel(
        activation, weight, torch.bfloat16, torch.bfloat16, (ROWS, columns)
    )


def scales_of(torch: Any, scales: str, columns: int) -> Any:
    shape = {"tensor": (1,), "channel": (ROWS, 1)}.get(scales, (ROWS // BLOCK, columns // BLOCK))
    generator = torch.Generator("cuda").manual_seed(columns)
    return torch.rand(shape, generator=generator, device="cuda") / 64


def product(torch: Any, kernel: Any, weight: Any, scale: Any, tokens: Any, scales: str) -> Any:
    from pat_vllm.weights.fp8 import KERNELS

    known = KERNELS[type(kernel).__name__]
    layer: Any = torch.nn.Module()
    layer.weight = torch.nn.Parameter(weight.t() if known.transposed else weight, False)
    name = "weight_scale_inv" if scales == "block" else "weight_scale"
    setattr(layer, name, torch.nn.Parameter(scale, False))
    layer.input_scale = layer.input_scale_ub = None
    known.finish(kernel, layer)
    return kernel.apply_weights(layer, tokens)


@pytest.mark.parametrize("ways", [2, 4, 8])
@pytest.mark.parametrize("scales", SCALES)
def test_a_layouts_shard_gives_what_it_gives_alone(torch: Any, scales: str, ways: int) -> None:
    """Few tokens and many, as vLLM has kernels for each."""
    from vllm.config import VllmConfig, set_current_vllm_config

    from pat_vllm.kernels.column_blocks import ColumnBlock, gather
    from pat_vllm.weights.fp8 import KERNELS

    columns, part = COLUMNS // ways, ways - 1
    whole = torch.randn(ROWS, COLUMNS, device="cuda").to(torch.float8_e4m3fn)
    own = whole[:, part * columns : (part + 1) * columns].contiguous()
    scale = scales_of(torch, scales, columns)
    with set_current_vllm_config(VllmConfig()):
        kernel = kernel_for(torch, scales, columns)
    if type(kernel).__name__ not in KERNELS:
        pytest.skip(f"{type(kernel).__name__} is not served")
    view = whole[:, part * columns : (part + 1) * columns]
    strided = KERNELS[type(kernel).__name__].strided
    for count in (1, 16, 64, 512):
        tokens = torch.randn(count, columns, device="cuda", dtype=torch.bfloat16)
        expected = product(torch, kernel, own, scale, tokens, scales)
        if strided:
            assert torch.equal(product(torch, kernel, view, scale, tokens, scales), expected)
            continue
        block = ColumnBlock(whole.clone(), ways, part)
        gather([block])
        assert torch.equal(product(torch, kernel, block.block, scale, tokens, scales), expected)
