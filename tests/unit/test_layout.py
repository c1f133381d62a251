"""Layouts: their ranks, KV heads, devices and names."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.layout import Layout, device_of

LAYOUTS = st.sampled_from(
    [Layout.of(tp, ranks) for ranks in range(1, 17) for tp in range(1, 17) if ranks % tp == 0]
)


@settings(max_examples=50)
@given(LAYOUTS)
def test_every_rank_has_one_place(layout: Layout) -> None:
    ranks = range(layout.world_size)
    places = {(layout.replica_of(rank), layout.tp_rank_of(rank)): rank for rank in ranks}
    assert len(places) == layout.world_size
    for replica in range(layout.replicas):
        members = [places[replica, tp_rank] for tp_rank in range(layout.tp)]
        assert [*layout.ranks_of(replica)] == members
        assert layout.leader_of(replica) == members[0]


@settings(max_examples=60)
@given(LAYOUTS, st.integers(1, 32))
def test_kv_heads_cover_the_model(layout: Layout, num_kv_heads: int) -> None:
    if num_kv_heads % layout.tp and layout.tp % num_kv_heads:
        with pytest.raises(ValueError, match=f"{num_kv_heads} KV heads .* tp={layout.tp}"):
            layout.kv_heads_per_rank(num_kv_heads)
        return
    held = [head for t in range(layout.tp) for head in layout.kv_heads_of(t, num_kv_heads)]
    assert held == sorted(held), "in the order of the ranks"
    counts = Counter(held)
    assert set(counts) == set(range(num_kv_heads))
    assert set(counts.values()) == {max(1, layout.tp // num_kv_heads)}


@settings(max_examples=50)
@given(LAYOUTS)
def test_devices_of_a_group_are_neighbours(layout: Layout) -> None:
    ranks = layout.world_size
    assert sorted(device_of(rank, ranks) for rank in range(ranks)) == [*range(ranks)]
    assert device_of(0, ranks) == 0
    if layout.tp & (layout.tp - 1):
        return  # an odd factor: not of every layout
    for replica in range(layout.replicas):
        devices = sorted(device_of(rank, ranks) for rank in layout.ranks_of(replica))
        assert devices == [*range(devices[0], devices[0] + layout.tp)]


@given(LAYOUTS)
def test_a_layout_has_one_name(layout: Layout) -> None:
    assert str(layout) == f"tp{layout.tp}dp{layout.replicas}"
    assert Layout.parse(str(layout)) == layout


@pytest.mark.parametrize("name", ["tp1", "tp2dp2xx", "tp0dp4", "tp2dp2ep", "dp4tp1", ""])
def test_what_names_no_layout_is_refused(name: str) -> None:
    with pytest.raises(ValueError):
        Layout.parse(name)
    with pytest.raises(ValueError, match="tp=3 does not divide the 4 ranks"):
        Layout.of(3, 4)
