"""vLLM's Triton kernel for experts, on weights that are views of those of all experts whole.

A program, because vLLM looks for Triton's backends when it is imported. With TRITON_INTERPRET=1 it
runs the kernel, else it compiles it for GPUs.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

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
from vllm.model_executor.layers.fused_moe import fused_moe  # noqa: E402

from pat_vllm.layout import Experts, Layout, Place  # noqa: E402
from pat_vllm.weights.row_order import block_of, common_unit  # noqa: E402
from pat_vllm.weights.shards import Cut, EvenPartition, ExpertPartition, pieces_of  # noqa: E402
from tests.vllm.kernels.triton_kernels import compiled_for  # noqa: E402

CONFIGS = (
    {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    | {"num_warps": 4, "num_stages": 4},
    {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8}
    | {"num_warps": 8, "num_stages": 3},
)
"""Like those that vLLM has for few and for many tokens."""
KINDS: tuple[Experts, ...] = ("tp", "ep")


def views(w13: torch.Tensor, w2: torch.Tensor, place: Place) -> Iterator[torch.Tensor]:
    """Where a layout finds its experts among all of them whole, once rows have traded places."""
    experts, _, intermediate = w2.shape
    spread = Cut(ExpertPartition(experts), "ep")
    cut_rows = Cut(EvenPartition((intermediate,) * 2, dim=1), "tp")
    cut_columns = Cut(EvenPartition((intermediate,), dim=2), "tp")
    for weight, cuts in ((w13, (spread, cut_rows)), (w2, (spread, cut_columns))):
        view = weight
        for cut in cuts:
            pieces = pieces_of(cut.shard(place), cut.shard(Place(1, 0)))
            rows = weight.shape[cut.dim]
            block = block_of(pieces, rows, common_unit(rows, [pieces]))
            view = view.narrow(cut.dim, block.start, block.size)
        yield view


def launch(
    weight: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    config: dict[str, int],
    compute_type: Any,
    sorted_ids: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each token's product with each of its experts, `[tokens, experts of a token, rows]`.

    Args:
        x: `[tokens, columns]`.
        ids: `[tokens, experts of a token]`.
        sorted_ids: choices by expert; by default each choice has a block of its own.
    """
    output = torch.zeros((*ids.shape, weight.shape[1]), dtype=x.dtype)
    size = ids.numel() * config["BLOCK_SIZE_M"] if sorted_ids is None else sorted_ids.numel()
    fused_moe.invoke_fused_moe_triton_kernel(
        x,
        weight,
        output,
        None,
        None,
        None,
        sorted_ids,
        ids.flatten(),
        torch.full((1,), size, dtype=torch.int32),
        False,
        ids.shape[1],
        dict(config),
        compute_type=compute_type,
        use_fp8_w8a8=False,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        use_int4_w4a16=False,
        per_channel_quant=False,
    )
    return output


def farthest_from_torch() -> float:
    """How far the kernel's products with views are from torch's, at most."""
    generator = torch.Generator().manual_seed(1)
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


def compile_all(capabilities: list[int]) -> dict[int, list[int]]:
    """Of Qwen3-30B-A3B on up to 8 GPUs: codes for views, those beside copies' codes, spills."""
    experts, hidden, intermediate = 128, 2048, 768
    # Nobody reads or writes them.
    w13 = torch.empty((experts, 2 * intermediate, hidden), dtype=torch.bfloat16)
    w2 = torch.empty((experts, hidden, intermediate), dtype=torch.bfloat16)
    layouts = [Layout.of(tp, 8) for tp in (2, 4, 8)]
    places = {
        layout.place_of(rank, kind) for layout in layouts for kind in KINDS for rank in range(8)
    }
    counts = {}
    for capability in capabilities:
        codes: list[set[str]] = []
        spills = 0
        for copy in (False, True):
            with compiled_for(capability) as code:
                for view in itertools.chain(*(views(w13, w2, place) for place in places)):
                    _compile(torch.empty(view.shape, dtype=view.dtype) if copy else view)
            codes.append(set(code))
            spills += sum(kernel.spills for kernel in code.values())
        counts[capability] = [len(codes[0]), len(codes[0] - codes[1]), spills]
    return counts


def _compile(weight: torch.Tensor) -> None:
    x = torch.empty((512, weight.shape[2]), dtype=torch.bfloat16)
    ids = torch.empty((512, 8), dtype=torch.int32)
    for config in CONFIGS:
        sorted_ids = torch.empty(8192, dtype=torch.int32)
        launch(weight, x, ids, config, tl.bfloat16, sorted_ids)


if __name__ == "__main__":
    if os.environ.get("TRITON_INTERPRET") == "1":
        print(farthest_from_torch())
    else:
        print(json.dumps(compile_all(json.loads(os.environ["CAPABILITIES"]))))
