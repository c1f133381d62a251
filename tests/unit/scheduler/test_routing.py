"""Routing of new requests and placement of carried ones."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.scheduler import routing
from pat_vllm.layout import Layout
from pat_vllm.scheduler.routing import AFFINITY_SLACK, TOKENS_OF_A_REQUEST, RequestPlacement, Router, spread


def test_equal_prompts_meet_and_others_spread() -> None:
    router = Router(block_size=16)
    loads = [0, 0, 0, 0]
    for _ in range(4):
        for prompt in "abcd":
            loads[router.route([prompt], loads)] += 1
    assert loads == [4, 4, 4, 4]
    assert [router.route([prompt], loads) for prompt in "abcd"] == [0, 1, 2, 3]


def test_load_overrules_affinity_beyond_the_slack() -> None:
    router = Router(block_size=16)
    loads = [0, 0]
    for _ in range(AFFINITY_SLACK + 1):
        assert router.route(["p"], loads) == 0
        loads[0] += 1
    assert router.route(["p"], loads) == 1


def test_the_longest_known_prefix_decides() -> None:
    router = Router(block_size=16)
    assert router.route(["ab", "a"], [0, 1]) == 0
    assert router.route(["xy", "x"], [1, 0]) == 1
    assert router.route(["abc", "ab", "a"], [2, 0]) == 0
    assert router.route(["xyz", "a"], [0, 1]) == 0
    assert router.route(["xyz", "xy"], [1, 1]) == 0, "though a shorter one is elsewhere"
    router.forget()
    assert router.route(["abc", "ab", "a"], [2, 0]) == 1


def test_caches_know_what_was_generated() -> None:
    """And what a switch brought, after which the router remembers nothing."""
    router = Router(block_size=16)
    assert router.route(["ab", "a"], [0, 1]) == 0
    assert router.knows("ab") and not router.knows("abc")
    assert router.route(["abcd", "abc", "ab", "a"], [0, 0], cached=[2, 3]) == 1
    assert router.route(["ab", "a"], [0, 0], cached=[0, 1]) == 1, "where it was last"
    assert router.route(["abx", "a"], [1, 0], cached=[1, 0]) == 1, "remembered as well as cached"
    router.forget()
    assert router.route(["ab", "a"], [1, 3, 2], cached=[0, 1, 1]) == 2, "the less loaded holder"
    router.forget()
    loads = [0, AFFINITY_SLACK + 1]
    assert router.route(["ab", "a"], loads, cached=[0, 1]) == 0
    assert router.route(["x"], [1, 0], cached=[0, 0]) == 1


def test_what_would_be_computed_again_counts_as_requests() -> None:
    """What the least loaded replica has cached, too, would not."""
    blocks = 3 * TOKENS_OF_A_REQUEST // 16
    for more, elsewhere, chosen in (
        (3, 0, 0),
        (4, 0, 1),
        (3, 1, 1),
        (1, blocks - 1, 1),
        (0, blocks - 1, 0),
    ):
        router = Router(block_size=16)
        loads = [AFFINITY_SLACK + more, 0]
        assert router.route(["ab", "a"], loads, [blocks + 1, elsewhere + 1]) == chosen, more


def test_the_least_recently_used_prefix_is_forgotten_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routing, "REMEMBERED_PREFIXES", 2)
    router = Router(block_size=16)
    assert [router.route([prompt], [0, 1]) for prompt in "abac"] == [0] * 4
    assert [router.route([prompt], [1, 0]) for prompt in "acb"] == [0, 0, 1]


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[RequestPlacement], Layout, Layout]:
    ranks = draw(st.sampled_from([1, 2, 4, 6, 8]))
    divisors = [tp for tp in range(1, ranks + 1) if ranks % tp == 0]
    source, target = (Layout.of(draw(st.sampled_from(divisors)), ranks) for _ in range(2))
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
    stay = {request.request_id: request.replica for request in requests}
    if source.tp > 1:  # experts alone lie otherwise
        experts = replace(source, experts="ep")
        assert spread(requests, source, experts) == spread(requests, experts, source) == stay
    placement = spread(requests, source, target)
    if source == target:
        assert placement == stay
        return
    assert set(placement) == set(stay)
    counts = Counter(placement.values())
    assert set(counts) <= set(range(target.replicas))
    assert not counts or max(counts.values()) <= -(-len(requests) // target.replicas)
    if target.tp % source.tp == 0:
        even = [RequestPlacement(f"r{i}", i, 10) for i in range(source.replicas)]
        for i, replica in enumerate(spread(even, source, target).values()):
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
    placement = spread(requests, source, target)
    assert {placement["b"], placement["c"]} == near and placement["a"] not in near
    requests = [
        RequestPlacement(f"r{i}", 0, context) for i, context in enumerate((100, 90, 20, 10))
    ]
    placement = spread(requests, Layout(4, 1), Layout(2, 2))
    assert placement == {"r0": 0, "r1": 1, "r2": 1, "r3": 0}
