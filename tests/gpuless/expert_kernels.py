"""vLLM's Triton kernel for experts, on weights that are views of those of all experts whole.

A program, because vLLM looks for Triton's backends when it is imported. With TRITON_INTERPRET=1 it
runs the kernel, else it compiles it for GPUs.
"""

from __future__ import annotations

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

from pat_vllm.kernels.swap import RowSwap, prepare  # noqa: E402
from pat_vllm.layout import Layout, Place  # noqa: E402
from pat_vllm.weights.row_order import RowOrder, block_of, common_unit, rounds  # noqa: E402
from pat_vllm.weights.shards import Cut, EvenPartition, ExpertPartition, pieces_of  # noqa: E402
from tests.vllm.kernels.triton_kernels import CAPABILITIES, compiled_for  # noqa: E402

CONFIGS = (
    {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 64, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 1}
    | {"num_warps": 4, "num_stages": 4},
    {"BLOCK_SIZE_M": 64, "BLOCK_SIZE_N": 128, "BLOCK_SIZE_K": 64, "GROUP_SIZE_M": 8}
    | {"num_warps": 8, "num_stages": 3},
)
"""Like those that vLLM has for few and for many tokens."""


def views(
    w13: torch.Tensor, w2: torch.Tensor, place: Place, arrange: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Where a layout finds its experts among all of them whole.

    Args:
        arrange: whether rows that are not there change places with others.
    """
    experts, _, intermediate = w2.shape
    whole = Cut(ExpertPartition(experts), "ep")
    cuts_of = (
        (w13, (whole, Cut(EvenPartition((intermediate,) * 2, dim=1), "tp"))),
        (w2, (whole, Cut(EvenPartition((intermediate,), dim=2), "tp"))),
    )
    made = []
    for weight, cuts in cuts_of:
        view = weight
        for cut in cuts:
            pieces = pieces_of(cut.shard(place), cut.shard(Place(1, 0)))
            rows = weight.shape[cut.dim]
            block = block_of(pieces, rows, common_unit(rows, [pieces]))
            if arrange:
                original = RowOrder.original(rows, block.unit)
                swaps = rounds(original.swaps_to(original.bring(block)))
                prepare(
                    [RowSwap(weight, one.a, one.b, one.length, cut.dim) for one in together]
                    for together in swaps
                ).run()
            view = view.narrow(cut.dim, block.start, block.size)
        made.append(view)
    return made[0], made[1]


def launch(
    weight: torch.Tensor,
    x: torch.Tensor,
    ids: torch.Tensor,
    config: dict[str, int],
    compute_type: Any,
    sorted_ids: torch.Tensor | None = None,
    expert_ids: torch.Tensor | None = None,
    routed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Each token's product with each of its experts, `[tokens, experts of a token, rows]`.

    Args:
        x: `[tokens, columns]`, or a row for each expert of each token.
        ids: `[tokens, experts of a token]`.
        sorted_ids, expert_ids: see `aligned`; by default each choice has a block of its own.
        routed: routers' weights, by which to multiply.
    """
    made = torch.zeros((*ids.shape, weight.shape[1]), dtype=x.dtype)
    size = ids.numel() * config["BLOCK_SIZE_M"] if sorted_ids is None else sorted_ids.numel()
    padded = torch.full((1,), size, dtype=torch.int32)
    fused_moe.invoke_fused_moe_triton_kernel(
        x,
        weight,
        made,
        None,
        None,
        routed,
        sorted_ids,
        ids.flatten() if expert_ids is None else expert_ids,
        padded,
        routed is not None,
        ids.numel() // len(x),
        dict(config),
        compute_type=compute_type,
        use_fp8_w8a8=False,
        use_int8_w8a8=False,
        use_int8_w8a16=False,
        use_int4_w4a16=False,
        per_channel_quant=False,
    )
    return made


def aligned(
    ids: torch.Tensor, placed: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choices by expert in blocks of `size`, as vLLM's `moe_align_block_size` sorts them.

    Args:
        placed: where this rank has an expert; -1: another rank has it.

    Returns:
        The sorted choices, each expert's filled up with an index beyond all; the expert of a block.
    """
    choices, blocks = [], []
    for expert in ids.unique().tolist():
        own = (ids.flatten() == expert).nonzero().flatten().tolist()
        own += [ids.numel()] * (-len(own) % size)
        choices += own
        blocks += [int(placed[expert])] * (len(own) // size)
    return torch.tensor(choices, dtype=torch.int32), torch.tensor(blocks, dtype=torch.int32)


def of_rank(
    experts: tuple[torch.Tensor, torch.Tensor],
    x: torch.Tensor,
    ids: torch.Tensor,
    routed: torch.Tensor,
    placed: torch.Tensor,
    config: dict[str, int],
) -> torch.Tensor:
    """What a rank's part of a layer's experts adds to each token's output."""
    w13, w2 = experts
    order = aligned(ids, placed, config["BLOCK_SIZE_M"])
    gate, up = launch(w13, x, ids, config, tl.float32, *order).chunk(2, dim=-1)
    inside = (torch.nn.functional.silu(gate) * up).flatten(0, 1)
    return launch(w2, inside, ids, config, tl.float32, *order, routed).sum(dim=1)


def of_all(
    w13: torch.Tensor, w2: torch.Tensor, x: torch.Tensor, ids: torch.Tensor, routed: torch.Tensor
) -> torch.Tensor:
    """The same of all experts, by torch."""
    chosen = ids.long()
    gate, up = torch.einsum("th,tcnh->tcn", x, w13[chosen]).chunk(2, dim=-1)
    inside = torch.nn.functional.silu(gate) * up
    return torch.einsum("tcn,tchn,tc->th", inside, w2[chosen], routed)


def groups() -> float:
    """How far the sum over the ranks of a group is from the layer, at worst, in every layout.

    Each rank has all experts whole, and its rows trade places.
    """
    generator = torch.Generator().manual_seed(1)
    experts, hidden, intermediate, tokens = 8, 32, 64, 20
    w13 = torch.randn((experts, 2 * intermediate, hidden), generator=generator) / 4
    w2 = torch.randn((experts, hidden, intermediate), generator=generator) / 4
    x = torch.randn((tokens, hidden), generator=generator)
    ids = torch.stack([torch.randperm(experts, generator=generator)[:2] for _ in x])
    ids = ids.to(torch.int32)
    routed = torch.rand((tokens, 2), generator=generator)
    config = {"BLOCK_SIZE_M": 16, "BLOCK_SIZE_N": 32, "BLOCK_SIZE_K": 32, "GROUP_SIZE_M": 1}
    expected, worst = of_all(w13, w2, x, ids, routed), 0.0
    for layout in (Layout.of(2, 4), Layout.of(2, 4, "ep"), Layout.of(4, 4), Layout.of(4, 4, "ep")):
        made = torch.zeros_like(expected)
        for rank in layout.ranks_of(0):
            place = layout.place_of(rank)
            placed = torch.arange(experts)
            if place.experts == "ep":
                each = experts // place.tp
                placed = placed - each * place.tp_rank
                placed[(placed < 0) | (placed >= each)] = -1
            own = views(w13.clone(), w2.clone(), place, arrange=True)
            made += of_rank(own, x, ids, routed, placed, config)
        worst = max(worst, float((made - expected).abs().max()))
    return worst


def places(ranks: int) -> Iterator[Place]:
    """Every place in every layout but the narrowest."""
    for tp in (2, 4, 8):
        for kind in ("tp", "ep"):
            if tp <= ranks:
                layout = Layout.of(tp, ranks, "tp" if kind == "tp" else "ep")
                yield from {layout.place_of(rank) for rank in range(ranks)}


def compile_all() -> dict[str, Any]:
    """Of Qwen3-30B-A3B on up to 8 GPUs: the code for views, and what copies have beside it."""
    experts, hidden, intermediate = 128, 2048, 768
    # Nobody reads or writes them.
    w13 = torch.empty((experts, 2 * intermediate, hidden), dtype=torch.bfloat16)
    w2 = torch.empty((experts, hidden, intermediate), dtype=torch.bfloat16)
    found: dict[str, Any] = {}
    for capability in CAPABILITIES:
        codes: list[set[str]] = []
        spills = 0
        for copy in (False, True):
            with compiled_for(capability) as code:
                for place in places(8):
                    for view in views(w13, w2, place):
                        _compile(torch.empty(view.shape, dtype=view.dtype) if copy else view)
            codes.append(set(code))
            spills += sum(one.spills for one in code.values())
        found[str(capability)] = {
            "codes": len(codes[0]),
            "of views only": len(codes[0] - codes[1]),
            "spills": spills,
        }
    return found


def _compile(weight: torch.Tensor) -> None:
    x = torch.empty((512, weight.shape[2]), dtype=torch.bfloat16)
    ids = torch.empty((512, 8), dtype=torch.int32)
    for config in CONFIGS:
        sorted_ids = torch.empty(8192, dtype=torch.int32)
        launch(weight, x, ids, config, tl.bfloat16, sorted_ids)


if __name__ == "__main__":
    print(json.dumps(groups() if os.environ.get("TRITON_INTERPRET") == "1" else compile_all()))
