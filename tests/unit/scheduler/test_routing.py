"""Routing of new requests and placement of carried ones."""

from __future__ import annotations

import pytest

from pat_vllm.scheduler import routing
from pat_vllm.scheduler.routing import (
    AFFINITY_SLACK,
    TOKENS_OF_A_REQUEST,
    Router,
)


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
