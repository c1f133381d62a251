"""Slots of linear attention, cut in segments: every byte of the target's states, once, as it was.

What a rank holds of a state is put together here from vLLM's own shapes, without PAT's segments.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm.model_executor.layers.mamba.mamba_utils import MambaStateShapeCalculator
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.kv_cache_interface import FullAttentionSpec, MambaSpec

from pat_vllm.kv_transfer.plan import RequestBlocks, plan_moves
from pat_vllm.layout import Layout
from pat_vllm.models.kinds import FullAttention, LinearAttention, class_of
from pat_vllm.worker.layout_config import block_ratio

KEYS, EACH, WIDTH, KEY, ROWS = 8, 2, 8, 24, 3
"""Key heads, value heads of each, elements of a value head and a key head, rows of the convolution.
"""
BLOCK = 16
DELTA_NET, MAMBA2 = MambaAttentionBackendEnum.GDN_ATTN, MambaAttentionBackendEnum.MAMBA2


def spec(tp: int, page: int = 0, kind: Any = DELTA_NET, drafts: int = 0, **other: Any) -> MambaSpec:
    """vLLM's, of a rank of a layout."""
    shapes = MambaStateShapeCalculator.gated_delta_net_state_shape(
        tp, KEYS, KEYS * EACH, KEY, WIDTH, ROWS + 1, drafts
    )
    if kind is MAMBA2:
        shapes = MambaStateShapeCalculator.mamba2_state_shape(
            tp, KEYS * EACH * WIDTH, KEYS, KEYS * EACH, WIDTH, KEY, ROWS + 1, drafts
        )
    given = {"mamba_type": kind, "mamba_cache_mode": "align"} | other
    given |= {"num_speculative_blocks": drafts}
    return MambaSpec(
        block_size=BLOCK,
        shapes=shapes,
        dtypes=(torch.bfloat16, torch.float32),
        page_size_padded=page or None,
        **given,
    )


@dataclass
class Rank:
    """A layer's memory on a rank: `blocks` pages, and its slots as vLLM sees them."""

    tp: int
    tp_rank: int
    memory: torch.Tensor
    spec: MambaSpec

    @property
    def view(self) -> torch.Tensor:
        """As vLLM makes it: [blocks, 1, 1, bytes that a slot fills]."""
        page, fills = self.spec.page_size_bytes, self.spec.state_content_size_bytes
        return self.memory.as_strided(
            (len(self.memory) // page, 1, 1, fills), (page, fills, fills, 1)
        )

    def state(self, block: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The convolution's and the matrices', as a layer binds them."""
        page = self.view[block].flatten()
        tensors, start = [], 0
        for shape, dtype in zip(self.spec.shapes, self.spec.dtypes, strict=True):
            size = torch.Size(shape).numel() * dtype.itemsize
            tensors.append(page[start : start + size].view(dtype).view(shape))
            start += size
        return tensors[0], tensors[1]


def whole(ranks: list[Rank], block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A state of all heads, from the ranks of a replica in their order."""
    convs, matrices = zip(*(rank.state(block) for rank in ranks), strict=True)
    keys, values = KEYS * KEY // len(ranks), KEYS * EACH * WIDTH // len(ranks)
    is_mamba = ranks[0].spec.mamba_type is MAMBA2
    sizes = [values, keys, keys] if is_mamba else [keys, keys, values]
    parts = zip(*(conv.split(sizes, dim=1) for conv in convs), strict=True)
    conv = torch.cat([part for parts_of_one in parts for part in parts_of_one], dim=1)
    return conv, torch.cat(matrices)


def filled(layout: Layout, base: Layout, of_base: MambaSpec, blocks: int, seed: int) -> list[Rank]:
    """Ranks of a layout over pages of the base layout, with bytes that differ everywhere."""
    generator = torch.Generator().manual_seed(seed)
    ratio = base_ratio(layout, base)
    narrowed = LinearAttention(KEYS, BLOCK).narrow(of_base, layout, ratio)
    drafts = of_base.num_speculative_blocks
    own = spec(layout.tp, narrowed.page_size_padded or 0, of_base.mamba_type, drafts)
    assert narrowed == own, "as vLLM has it"
    size = of_base.page_size_bytes * blocks
    return [
        Rank(layout.tp, layout.tp_rank_of(rank),
             torch.randint(-128, 128, (size,), dtype=torch.int8, generator=generator), narrowed)
        for rank in range(layout.world_size)
    ]  # fmt: skip


def base_ratio(layout: Layout, base: Layout) -> int:
    """With two KV heads: blocks become no smaller beyond tp=2."""
    return block_ratio(layout, base, (FullAttention(2, BLOCK), LinearAttention(KEYS, BLOCK)))


@given(
    st.sampled_from([(a, b) for a in (1, 2, 4, 8) for b in (1, 2, 4, 8)]),
    st.sampled_from([0, 1024]),
    st.sampled_from([(DELTA_NET, 0), (DELTA_NET, 2), (MAMBA2, 0), (MAMBA2, 2)]),
    st.integers(0, 1 << 16),
)
def test_states_move_whole_and_nothing_else_is_written(
    tps: tuple[int, int], padding: int, of_kind: tuple[Any, int], seed: int
) -> None:
    source, target = (Layout.of(tp, 8) for tp in tps)
    base, rng = Layout.of(1, 8), random.Random(seed)
    slot_bytes = spec(1, 0, *of_kind).page_size_bytes
    of_base = spec(1, slot_bytes + padding, *of_kind)
    before = filled(source, base, of_base, 6, seed)
    after = filled(target, base, of_base, 6, seed + 1)
    kind, untouched = LinearAttention(KEYS, BLOCK), [rank.memory.clone() for rank in after]
    pools = [
        [iter(rng.sample(range(1, 6), 5)) for _ in range(layout.replicas)]
        for layout in (source, target)
    ]
    requests = []
    for i in range(3):
        a, b = i % source.replicas, (i + 1) % target.replicas
        requests.append(RequestBlocks(f"{i}", a, (next(pools[0][a]),), b, (next(pools[1][b]),)))
    written = [torch.zeros_like(rank.memory) for rank in after]
    num_bytes = 0
    for move in plan_moves(source, target, (kind,), requests):
        sender, receiver = before[move.route.source_rank], after[move.route.target_rank]
        counts = Rank(target.tp, 0, written[move.route.target_rank], receiver.spec)
        of_both = (kind.segments(rank.spec, rank.view) for rank in (sender, receiver, counts))
        for old, new, count in zip(*of_both, strict=True):
            for x, y in zip(move.source_blocks, move.target_blocks, strict=True):
                for h, j in zip(move.route.source_heads, move.route.target_heads, strict=True):
                    assert old.view(torch.int64).shape[1:] and old[x, h].shape == new[y, j].shape
                    new[y, j], num_bytes = old[x, h], num_bytes + old[x, h].numel()
                    count[y, j] += 1
    for request in requests:
        (old_block,), (new_block,) = request.source_blocks, request.target_blocks
        given = whole([before[r] for r in source.ranks_of(request.source_replica)], old_block)
        arrived = whole([after[r] for r in target.ranks_of(request.target_replica)], new_block)
        for state, other in zip(given, arrived, strict=True):
            assert torch.equal(state.view(torch.int8), other.view(torch.int8))
    (slot,) = {kind.of(rank.spec, KEYS, 1).bytes_held(7) for rank in (*before, *after)}
    assert num_bytes == 3 * slot == 3 * slot_bytes
    for rank, count, old in zip(after, written, untouched, strict=True):
        assert count.max() <= 1, "nothing is written twice"
        assert torch.equal(rank.memory[count == 0], old[count == 0])


def test_what_is_served() -> None:
    """The kind of each form of state that vLLM has for Gated DeltaNet and Mamba2, or none."""
    for kind in (DELTA_NET, MAMBA2):
        served: list[dict[str, Any]] = [{}, {"mamba_cache_mode": "none"}, {"drafts": 2}]
        assert {class_of(spec(2, kind=kind, **options)) for options in served} == {LinearAttention}
        others: list[dict[str, Any]] = [
            {"mamba_cache_mode": "all"},
            {"num_prefill_checkpoint_blocks": 1},
            {"tp_replicated": True},
        ]
        for other in others:
            assert class_of(spec(2, kind=kind, **other)) is None
        assert LinearAttention.heads_in(spec(2, kind=kind), 4, tp=2) == KEYS
    assert class_of(spec(2, kind=MambaAttentionBackendEnum.MAMBA1)) is None
    assert LinearAttention.of(spec(2, drafts=2), KEYS, 1).drafts == 2
    attention = FullAttentionSpec(
        block_size=BLOCK, num_kv_heads=2, head_size=8, dtype=torch.bfloat16
    )
    assert class_of(attention) is FullAttention


def test_blocks_are_as_small_as_all_groups_allow() -> None:
    """A slot is padded where KV heads are copied; a part that does not fit is an error."""
    base = Layout.of(1, 8)
    assert [base_ratio(Layout.of(tp, 8), base) for tp in (1, 2, 4, 8)] == [1, 2, 2, 2]
    with pytest.raises(ValueError, match="cannot be split over tp=8"):
        block_ratio(Layout.of(8, 8), base, (FullAttention(8, BLOCK), LinearAttention(4, BLOCK)))
