"""vLLM's Triton kernels, on weights that are views of a base layout's: experts, also in fp8, and
fp8 matrices with scales for blocks.

A program, because vLLM looks for Triton's backends when it is imported. With TRITON_INTERPRET=1 it
runs the kernels, else it compiles them for GPUs.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Literal, TypeAlias

import torch
import triton.backends

triton.backends.backends.setdefault(
    "cpu",
    SimpleNamespace(
        driver=SimpleNamespace(is_active=lambda: True),
        compiler=SimpleNamespace(supports_target=lambda target: False),
    ),
)

import triton.language as tl  # noqa: E402
from torch import nn  # noqa: E402
from vllm.model_executor.kernels.linear.scaled_mm import triton as scaled_mm  # noqa: E402, F401
from vllm.model_executor.layers.fused_moe import fused_moe  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from pat_vllm.layout import Experts, Layout, Place  # noqa: E402
from pat_vllm.weights.row_order import block_of, common_unit  # noqa: E402
from pat_vllm.weights.shards import Cut, EvenPartition, ExpertPartition, pieces_of  # noqa: E402
from pat_vllm.weights.weight import Weight, derive, shape_in  # noqa: E402
from tests.gpuless.replaced import replace  # noqa: E402
from tests.support.fp8_on_cpu import in_full  # noqa: E402
from tests.vllm.kernels.triton_kernels import compiled_for  # noqa: E402

CONFIGS = (
    {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    | {"num_warps": 4, "num_stages": 4},
    {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8}
    | {"num_warps": 8, "num_stages": 3},
)
"""Like those that vLLM has for few and for many tokens."""
KINDS: tuple[Experts, ...] = ("tp", "ep")
FP8 = torch.float8_e4m3fn
BLOCK = 128
WHOLE = Place(1, 0)
Scaling: TypeAlias = Literal["tensor", "row", "block"]
"""What an fp8 matrix has scales for: all of it, its rows, or blocks of it."""
_DIMS: dict[Scaling, int] = {"tensor": 1, "row": 2, "block": 3}
"""How many dimensions of experts' weights their scales tell apart."""


def cuts_of_experts(experts: int, intermediate: int) -> tuple[tuple[Cut, ...], tuple[Cut, ...]]:
    """Of w13 and of w2."""
    spread = Cut(ExpertPartition(experts), "ep")
    cut_rows = Cut(EvenPartition((intermediate,) * 2, dim=1), "tp")
    cut_columns = Cut(EvenPartition((intermediate,), dim=2), "tp")
    return (spread, cut_rows), (spread, cut_columns)


def view_of(weight: torch.Tensor, cuts: Sequence[Cut], place: Place) -> torch.Tensor:
    """Where a layout finds its part of a whole weight, once rows have traded places."""
    for cut in cuts:
        pieces = pieces_of(cut.shard(place), cut.shard(WHOLE))
        rows = weight.shape[cut.dim]
        block = block_of(pieces, rows, common_unit(rows, [pieces]))
        weight = weight.narrow(cut.dim, block.start, block.size)
    return weight


def views(w13: torch.Tensor, w2: torch.Tensor, place: Place) -> Iterator[torch.Tensor]:
    """Where a layout finds its experts among all of them whole."""
    experts, _, intermediate = w2.shape
    for weight, cuts in zip((w13, w2), cuts_of_experts(experts, intermediate), strict=True):
        yield view_of(weight, cuts, place)


def launch(
    weight: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    config: dict[str, int],
    compute_type: Any,
    sorted_ids: torch.Tensor | None = None,
    scales: tuple[torch.Tensor, torch.Tensor] | None = None,
    block: int | None = None,
) -> torch.Tensor:
    """Each token's product with each of its experts, `[tokens, experts of a token, rows]`.

    Args:
        x: `[tokens, columns]`.
        ids: `[tokens, experts of a token]`.
        sorted_ids: choices by expert; by default each choice has a block of its own.
        scales: of `x` and of `weight`, if these are fp8.
        block: columns of `x`, and rows and columns of `weight`, that share a scale.
    """
    dtype = x.dtype if scales is None else torch.float32
    output = torch.zeros((*ids.shape, weight.shape[1]), dtype=dtype)
    size = ids.numel() * config["BLOCK_SIZE_M"] if sorted_ids is None else sorted_ids.numel()
    x_scale, scale = scales or (None, None)
    fused_moe.invoke_fused_moe_triton_kernel(
        x,
        weight,
        output,
        x_scale,
        scale,
        None,
        sorted_ids,
        ids.flatten(),
        torch.full((1,), size, dtype=torch.int32),
        False,
        ids.shape[1],
        dict(config),
        compute_type=compute_type,
        use_fp8_w8a8=scales is not None,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        use_int4_w4a16=False,
        per_channel_quant=scale is not None and scale.dim() == 3 and block is None,
        block_shape=[block, block] if block else None,
    )
    return output


def on_capability(capability: int) -> None:
    """Have vLLM choose what it does on a GPU of this compute capability, times ten."""
    replace(
        current_platform, "is_device_capability", lambda asked, device_id=0: asked == capability
    )
    fused_moe.enable_swap_ab.cache_clear()


# -------------------------------------------------------------------- run


def farthest_from_torch(generator: torch.Generator) -> float:
    """How far the products of experts that are views are from torch's, at most."""
    experts, hidden, intermediate, tokens = 8, 32, 64, 5
    config = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1}
    worst = 0.0
    for place in (Layout.of(2, 4).place_of(1), Layout.of(4, 4).place_of(1, "ep")):
        w13 = torch.randn((experts, 2 * intermediate, hidden), generator=generator)
        w2 = torch.randn((experts, hidden, intermediate), generator=generator)
        for view in views(w13, w2, place):
            ids = torch.arange(2 * tokens, dtype=torch.int32).view(tokens, 2) % len(view)
            x = torch.randn((tokens, view.shape[2]), generator=generator)
            output = launch(view, x, ids, config, tl.float32)
            wanted = torch.einsum("th,tcnh->tcn", x, view[ids.long()])
            worst = max(worst, float((output - wanted).abs().max()))
    return worst


def farthest_fp8_from_torch(generator: torch.Generator) -> float:
    """How far the products of fp8 experts that are views are from torch's, at most.

    Those of copies are the same. Blocks of 128 become such of 64 and 32 where shards are narrower.
    """
    experts, hidden, intermediate, tokens = 4, 128, 128, 2
    few, _ = CONFIGS
    worst = 0.0
    w13_cuts, w2_cuts = cuts_of_experts(experts, intermediate)
    weights = (
        (_random_fp8((experts, 2 * intermediate, hidden), generator), w13_cuts),
        (_random_fp8((experts, hidden, intermediate), generator), w2_cuts),
    )
    places = (Place(2, 1), Place(4, 2), Place(4, 2, "ep"))
    for (weight, cuts), scaling, place in itertools.product(weights, _DIMS, places):
        view = view_of(weight, cuts, place)
        block = BLOCK if place.experts == "ep" else intermediate // place.tp
        whole = _random_scale(_shape_of_scale(weight, scaling, BLOCK), generator)
        own = [cut for cut in cuts if cut.dim < _DIMS[scaling]]
        scale = _cut_scale(whole, own, place, BLOCK if scaling == "block" else 1, block)
        x = _random_fp8((tokens, view.shape[2]), generator)
        x_scale = _random_scale(_shape_of_token_scale(x, scaling, block), generator)
        options: dict[str, Any] = {"scales": (x_scale, scale)}
        options["block"] = block if scaling == "block" else None
        ids = torch.arange(2 * tokens, dtype=torch.int32).view(tokens, 2) % len(view)
        in_32_bits = in_full(view, scale)[ids.long()]
        wanted = torch.einsum("th,tcnh->tcn", _tokens_in_full(x, x_scale), in_32_bits)
        for capability in (90, 100):  # for few tokens, operands trade places on the former
            on_capability(capability)
            output, again = (
                launch(either, x, ids, few, tl.float32, **options)
                for either in (view, view.contiguous())
            )
            assert torch.equal(output, again), (scaling, place, capability)
            worst = max(worst, float((output - wanted).abs().max()))
    return worst


def farthest_blocks_from_torch(generator: torch.Generator) -> float:
    """How far products with columns of a wider fp8 matrix are from torch's, at most.

    Those with copies are the same.
    """
    rows, columns = 256, 1024
    cut = Cut(EvenPartition((columns,), dim=1))
    weight = _random_fp8((rows, columns), generator)
    whole = _random_scale(_shape_of_scale(weight, "block", BLOCK), generator)
    worst = 0.0
    for place, tokens in itertools.product((Place(2, 1), Place(4, 0), Place(4, 2)), (3, 100)):
        view = view_of(weight, [cut], place)
        assert not view.is_contiguous()
        scale = _cut_scale(whole, [cut], place, BLOCK, BLOCK)
        x = _random_fp8((tokens, view.shape[1]), generator)
        x_scale = _random_scale(_shape_of_token_scale(x, "block", BLOCK), generator)
        output, again = (
            torch.ops.vllm.w8a8_triton_block_scaled_mm_func(
                x, either, x_scale, scale, [BLOCK, BLOCK], torch.float32
            )
            for either in (view, view.contiguous())
        )
        assert torch.equal(output, again), (place, tokens)
        wanted = _tokens_in_full(x, x_scale) @ in_full(view, scale).t()
        worst = max(worst, float((output - wanted).abs().max()))
    return worst


def _random_fp8(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator).to(FP8)


def _shape_of_scale(weight: torch.Tensor, scaling: Scaling, block: int) -> tuple[int, ...]:
    """`[experts]`, `[experts, rows, 1]`, or `[..., rows and columns of blocks]`."""
    *experts, rows, columns = weight.shape
    sizes = {"tensor": (), "row": (rows, 1), "block": (rows // block, columns // block)}
    return (*experts, *sizes[scaling])


def _shape_of_token_scale(x: torch.Tensor, scaling: Scaling, block: int) -> tuple[int, ...]:
    """`[1]`, `[tokens, 1]`, or `[tokens, blocks]`."""
    tokens, columns = x.shape
    sizes = {"tensor": (1,), "row": (tokens, 1), "block": (tokens, columns // block)}
    return sizes[scaling]


def _random_scale(shape: Sequence[int], generator: torch.Generator) -> torch.Tensor:
    return torch.rand(shape, generator=generator) + 0.5


def _tokens_in_full(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    if scale.dim() == 2:
        scale = scale.repeat_interleave(x.shape[1] // scale.shape[1], dim=1)
    return x.float() * scale


def _cut_scale(
    whole: torch.Tensor, cuts: Sequence[Cut], place: Place, unit: int, unit_here: int
) -> torch.Tensor:
    """A layout's copy of its part of scales, as PAT makes it.

    Args:
        unit, unit_here: rows and columns of a block, and of a layout's; 1: not of blocks.
    """
    own, module = unit_here if unit > 1 else 1, nn.Module()
    base = Weight("whole", whole, tuple(cuts), WHOLE, module, "", "copy", unit=unit)
    tensor = torch.empty(shape_in(base, place, own))
    derive(Weight("own", tensor, tuple(cuts), place, module, "", "copy", unit=own), base)
    return tensor


# -------------------------------------------------------------------- compiled


def compile_all(capabilities: list[int]) -> dict[int, list[int]]:
    """Of Qwen3-30B-A3B on up to 8 GPUs: codes for views, those beside copies' codes, spills.

    On Hopper, for which vLLM has the most forms, also of those in fp8, and of a matrix of Qwen3-8B.
    """
    counts = {}
    for capability in capabilities:
        on_capability(capability)
        codes: list[set[str]] = []
        spills = 0
        for copy in (False, True):
            with compiled_for(capability) as code:
                _compile_experts(torch.bfloat16, copy)
                if capability == 90:
                    _compile_experts(FP8, copy)
                    _compile_blocks(copy)
            codes.append(set(code))
            spills += sum(kernel.spills for kernel in code.values())
        counts[capability] = [len(codes[0]), len(codes[0] - codes[1]), spills]
    return counts


def _compile_experts(dtype: torch.dtype, copy: bool) -> None:
    experts, hidden, intermediate = 128, 2048, 768
    # Nobody reads or writes them.
    w13 = torch.empty((experts, 2 * intermediate, hidden), dtype=dtype)
    w2 = torch.empty((experts, hidden, intermediate), dtype=dtype)
    layouts = [Layout.of(tp, 8) for tp in (2, 4, 8)]
    places = {
        layout.place_of(rank, kind) for layout in layouts for kind in KINDS for rank in range(8)
    }
    if dtype == FP8:  # 192 columns of 768, in blocks of 64
        places = {Place(4, 1)}
    for view in itertools.chain(*(views(w13, w2, place) for place in places)):
        weight = torch.empty(view.shape, dtype=dtype) if copy else view
        for scaling in _DIMS if dtype == FP8 else (None,):
            _compile(weight, scaling)


def _compile(weight: torch.Tensor, scaling: Scaling | None) -> None:
    x = torch.empty((512, weight.shape[2]), dtype=weight.dtype)
    ids = torch.empty((512, 8), dtype=torch.int32)
    options: dict[str, Any] = {}
    if scaling:
        block = BLOCK // 2
        shapes = _shape_of_token_scale(x, scaling, block), _shape_of_scale(weight, scaling, block)
        options = {
            "scales": tuple(map(torch.empty, shapes)),
            "block": block if scaling == "block" else None,
        }
    for config in CONFIGS:
        sorted_ids = torch.empty(8192, dtype=torch.int32)
        launch(weight, x, ids, config, tl.bfloat16, sorted_ids, **options)


def _compile_blocks(copy: bool) -> None:
    rows, columns, most_tokens = 4096, 12288, 512
    cut = Cut(EvenPartition((columns,), dim=1))
    whole = torch.empty((rows, columns), dtype=FP8)
    for tp in (2, 4, 8):
        view = view_of(whole, [cut], Place(tp, 1))
        weight = torch.empty(view.shape, dtype=FP8) if copy else view
        x = torch.empty((most_tokens, columns // tp), dtype=FP8)
        x_scale = torch.empty(_shape_of_token_scale(x, "block", BLOCK))
        scale = torch.empty(_shape_of_scale(weight, "block", BLOCK))
        torch.ops.vllm.w8a8_triton_block_scaled_mm_func(
            x, weight, x_scale, scale, [BLOCK, BLOCK], torch.bfloat16
        )


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        generator = torch.Generator().manual_seed(1)
        runs = farthest_from_torch, farthest_fp8_from_torch, farthest_blocks_from_torch
        print(json.dumps({run.__name__: run(generator) for run in runs}))
    else:
        print(json.dumps(compile_all(json.loads(os.environ["CAPABILITIES"]))))
