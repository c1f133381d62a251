"""Routing of new requests and placement of carried ones."""

from collections import Counter
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from pat_vllm.layout import Layout
from pat_vllm.routing import AFFINITY_SLACK, Placed, Router, spread


def test_equal_prompts_meet_and_others_spread():
    router = Router()
    loads = [0, 0, 0, 0]
    for _ in range(4):
        for prompt in "abcd":
            chosen = router.route([prompt], loads)
            loads[chosen] += 1
    assert loads == [4, 4, 4, 4]
    assert [router.route([p], loads) for p in "abcd"] == [0, 1, 2, 3]


def test_load_overrules_affinity_beyond_the_slack():
    router = Router()
    loads = [0, 0]
    for _ in range(AFFINITY_SLACK + 1):
        assert router.route(["p"], loads) == 0
        loads[0] += 1
    assert router.route(["p"], loads) == 1


def test_the_longest_known_prefix_decides():
    router = Router()
    assert router.route(["ab", "a"], [0, 1]) == 0
    assert router.route(["xy", "x"], [1, 0]) == 1
    assert router.route(["abc", "ab", "a"], [2, 0]) == 0
    router.forget()
    assert router.route(["abc", "ab", "a"], [2, 0]) == 1


@st.composite
def batches(draw):
    world_size = draw(st.sampled_from([1, 2, 4, 6, 8]))
    divisors = [t for t in range(1, world_size + 1) if world_size % t == 0]
    source = Layout.of(draw(st.sampled_from(divisors)), world_size)
    target = Layout.of(draw(st.sampled_from(divisors)), world_size)
    requests = [
        Placed(f"r{i}", draw(st.integers(0, source.replicas - 1)), draw(st.integers(0, 5000)))
        for i in range(draw(st.integers(0, 30)))
    ]
    return requests, source, target


@given(batches())
def test_spread_places_every_request_and_balances(case):
    requests, source, target = case
    if source == target:
        return
    placement = spread(requests, source, target)
    assert set(placement) == {r.request_id for r in requests}
    counts = Counter(placement.values())
    assert set(counts) <= set(range(target.replicas))
    assert not counts or max(counts.values()) <= -(-len(requests) // target.replicas)


@given(batches())
def test_all_stay_where_experts_alone_lie_otherwise(case):
    requests, source, _ = case
    if source.tp > 1:
        spread_out = replace(source, experts="ep")
        for ends in ((source, spread_out), (spread_out, source)):
            assert spread(requests, *ends) == {r.request_id: r.replica for r in requests}


@given(batches())
def test_a_balanced_batch_that_merges_stays_on_its_ranks(case):
    _, source, target = case
    if source.tp > target.tp or target.tp % source.tp:
        return
    requests = [Placed(f"r{i}", i, 10) for i in range(source.replicas)]
    placement = spread(requests, source, target)
    for i in range(source.replicas):
        assert placement[f"r{i}"] == target.replica_of(source.leader_of(i))
