from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.kv_transfer.placement import RequestPlacement, place_requests
from pat_vllm.layout import Layout


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[RequestPlacement], Layout, Layout]:
    ranks = draw(st.sampled_from([2, 4, 6, 8]))
    divisors = [tp for tp in range(1, ranks + 1) if ranks % tp == 0]
    source, target = (Layout.of(tp, ranks) for tp in draw(st.permutations(divisors))[:2])
    requests = [
        RequestPlacement(
            f"r{i}", draw(st.integers(0, source.replicas - 1)), draw(st.integers(0, 5000))
        )
        for i in range(draw(st.integers(0, 30)))
    ]
    return requests, source, target


@given(batches())
def test_placement_is_balanced_and_keeps_requests_where_it_can(
    case: tuple[list[RequestPlacement], Layout, Layout],
) -> None:
    requests, source, target = case
    placement = place_requests(requests, source, target)
    assert set(placement) == {request.request_id for request in requests}
    counts = Counter(placement.values())
    assert set(counts) <= set(range(target.replicas))
    assert not counts or max(counts.values()) <= -(-len(requests) // target.replicas)
    if target.tp % source.tp == 0:
        even = [RequestPlacement(f"r{i}", i, 10) for i in range(source.replicas)]
        for i, replica in enumerate(place_requests(even, source, target).values()):
            assert replica == target.replica_of(source.leader_of(i))


def test_the_longest_request_has_its_choice_and_contexts_are_balanced() -> None:
    """Three requests of one replica, of which two may stay on its ranks."""
    source, target = Layout(2, 2), Layout(1, 4)
    requests = [
        RequestPlacement("a", 0, 10),
        RequestPlacement("b", 0, 30),
        RequestPlacement("c", 0, 20),
    ]
    near = {target.replica_of(rank) for rank in source.ranks_of(0)}
    placement = place_requests(requests, source, target)
    assert {placement["b"], placement["c"]} == near and placement["a"] not in near
    requests = [
        RequestPlacement(f"r{i}", 0, context) for i, context in enumerate((100, 90, 20, 10))
    ]
    placement = place_requests(requests, Layout(4, 1), Layout(2, 2))
    assert placement == {"r0": 0, "r1": 1, "r2": 1, "r3": 0}
