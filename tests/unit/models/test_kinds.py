"""Kinds of state: which blocks are null, what a prefix hit needs, what fits into memory."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.models.kinds import (
    ChunkedAttention,
    FullAttention,
    Kinds,
    LatentAttention,
    LinearAttention,
    SlidingWindow,
    carried_tokens,
    densest,
    longest_context,
    longest_hit,
    num_blocks,
)
from tests.support.kinds import LaterHalf, full

SIZES = st.integers(1, 5)
EVERY = st.one_of(
    st.builds(FullAttention, st.just(8), SIZES, SIZES),
    st.builds(LatentAttention, st.just(1), SIZES, SIZES),
    st.builds(SlidingWindow, st.just(8), SIZES, SIZES, window=st.integers(2, 20)),
    st.builds(
        SlidingWindow, st.just(8), SIZES, SIZES, window=st.integers(2, 20), dropped=st.just(1)
    ),
    st.builds(ChunkedAttention, st.just(8), SIZES, SIZES, chunk=st.integers(1, 20)),
    st.builds(LinearAttention, st.just(8), SIZES, slot_bytes=SIZES),
    st.builds(
        LinearAttention,
        st.just(8),
        SIZES,
        slot_bytes=SIZES,
        dropped=st.just(1),
        drafts=st.integers(0, 3),
    ),
    st.builds(LaterHalf, st.just(8), SIZES, SIZES),
)


@given(EVERY, st.integers(0, 60))
def test_blocks_hold_the_last_tokens_and_none_comes_back(kind: FullAttention, tokens: int) -> None:
    held, later = kind.held(tokens), kind.held(tokens + 1)
    assert held.stop == -(-tokens // kind.block_size)
    assert held.start <= later.start <= later.stop and held.stop <= later.stop
    assert 0 <= kind.bytes_held(tokens) <= len(held) * kind.block_bytes


@given(
    st.lists(EVERY, min_size=1, max_size=3),
    st.lists(st.sets(st.integers(0, 9)), min_size=3, max_size=3),
)
def test_a_hit_has_all_that_it_needs_and_is_the_longest(
    kinds: Kinds, cached: list[set[int]]
) -> None:
    """Of full attention, all before a cached block are cached, too."""
    for kind, places in zip(kinds, cached, strict=False):
        if isinstance(kind, FullAttention):
            places &= {place for place in places if {*range(place)} <= places}

    def whole(blocks: int) -> bool:
        return all(
            {*kind.needed(blocks)} <= places for kind, places in zip(kinds, cached, strict=False)
        )

    hit = longest_hit(kinds, 10, lambda group, place: place in cached[group])
    assert hit == max(blocks for blocks in range(11) if not blocks or whole(blocks))
    for kind, places in zip(kinds, cached, strict=False):
        needed = kind.needed(hit)
        assert not kind.missing(hit, lambda place, places=places: place in places)  # type: ignore[misc]
        assert [*kind.missing(hit, lambda place: False)] == [*needed]


@given(st.lists(EVERY, min_size=1, max_size=3), st.integers(0, 60), st.integers(0, 9))
def test_the_longest_context_always_fits(kinds: Kinds, blocks: int, room: int) -> None:
    most = longest_context(kinds, blocks, 50, room)
    assert most == 50 or num_blocks(kinds, most + 1, room) > blocks
    for tokens in range(1, most + 1):
        computed = max(0, tokens - room)
        needed = [kind.held(tokens).stop - kind.held(computed).start for kind in kinds]
        assert sum(needed) <= num_blocks(kinds, tokens, room) <= blocks


def test_the_block_that_a_hit_drops_is_not_the_windows() -> None:
    """What is left of the hit has the whole window of its next token."""
    kind = SlidingWindow(8, 4, 4, window=9, dropped=1)
    assert [*kind.needed(5)] == [2, 3, 4] and [*kind.held(4 * 4)] == [2, 3]
    assert kind.longest_hit(9, {2, 3, 4, 7, 8}.__contains__) == 5


def test_a_drafter_has_no_state_in_the_block_that_a_hit_drops() -> None:
    kind = LinearAttention(8, 4, slot_bytes=4, dropped=1)
    assert [*kind.needed(5)] == [3] and [*kind.needed(1)] == []
    assert kind.longest_hit(9, {1, 5}.__contains__) == 7 and kind.longest_hit(9, set().__contains__)


def test_figures_of_a_model_with_windows() -> None:
    """Of Gemma 3's pattern: five layers of windows for one of full attention."""
    windows = [SlidingWindow(4, 16, 5, window=1024)] * 5
    kinds = (*windows, *(FullAttention(4, 16, 5),))
    assert densest(kinds) == 5 and densest(full(8)) == 0
    assert num_blocks(kinds, 4096, room=1) == 5 * 65 + 256
    assert num_blocks(kinds, 4096, 4096) == 6 * 256, (
        "a prompt's blocks are given back after its step"
    )
    assert carried_tokens(kinds, 1000) == 1000
    assert carried_tokens(kinds, 4096) == (5 * 1024 + 4096) / 6
    assert carried_tokens(full(8), 77) == 77


def test_a_latent_vector_is_whole_on_every_rank() -> None:
    """Whatever heads the config names: a block takes the same bytes in every layout."""
    heads = LatentAttention.heads_in(None, 16, 4)
    latent, full_ = LatentAttention(heads, 16), FullAttention(16, 16)
    for layout in (Layout.of(tp, 8) for tp in (1, 2, 4, 8)):
        assert [*latent.heads_of(layout, layout.tp - 1)] == [0]
        assert latent.ratio(layout, Layout(1, 8)) == 1
        assert full_.ratio(layout, Layout(1, 8)) == layout.tp


def test_figures_of_a_model_with_linear_attention() -> None:
    """Of Qwen3-Next's pattern: three layers of it for one of full attention."""
    slots = [LinearAttention(16, 1056, slot_bytes=4000)] * 3
    kinds = (FullAttention(2, 1056, 2), *slots)
    assert num_blocks(kinds, 8 * 1056, room=1) == 8 + 3 * 2
    assert num_blocks(kinds, 1000, room=1) == 1 + 3
    # A state moves whole, however long the context is.
    assert carried_tokens(kinds, 1) == 1 + 6000
    assert carried_tokens(kinds, 8000) == 8000 + 6000
    # Without prefix caching a slot is a block for the longest context.
    # With two drafts it has three for each request, wherever it is.
    drafted = LinearAttention(16, 1056, slot_bytes=4000, drafts=2)
    assert num_blocks((drafted,), 8 * 1056, room=1) == 2 + 2 and drafted.bytes_held(8000) == 4000
    (slot,) = {kind.held(5000) for kind in [LinearAttention(16, 1 << 15, slot_bytes=4000)] * 3}
    assert slot == range(1)
    with pytest.raises(ValueError, match="16 key heads of linear attention cannot be split"):
        slots[0].heads_of(Layout.of(32, 32), 0)
