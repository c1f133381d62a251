"""How many requests and tokens a replica of each layout runs: what the arithmetic promises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pat_vllm import limits as module
from pat_vllm.config import PATConfig
from pat_vllm.layout import Layout
from pat_vllm.limits import (
    MOST_BATCHED_TOKENS,
    MOST_SEQS,
    Limits,
    layout_limits,
    narrower_limit,
)
from tests.support.mutation import mutated

RANKS = 8
LAYOUTS = tuple(Layout.of(tp, RANKS) for tp in (1, 2, 4, 8))
EVERY_LAYOUT = PATConfig()


def entered_with(**live: int) -> PATConfig:
    """A policy that enters layouts with at most so many live requests: `tp4=100`."""
    switch_at = {str(number): int(name.removeprefix("tp")) for name, number in live.items()}
    return PATConfig.parse({"policy": {"kind": "schedule", "switch_at": switch_at}})


@st.composite
def engines(draw: st.DrawFn) -> tuple[Limits, int, PATConfig]:
    """What a user gives (vLLM takes no fewer tokens than requests), draft tokens included."""
    per_seq = draw(st.integers(1, 32))
    seqs = draw(st.integers(1, 3000))
    tokens = draw(st.integers(seqs, 50_000))
    base_tp = draw(st.sampled_from([1, 2, 4]))
    live = st.integers(1, 5000)
    policies: list[dict[str, Any]] = [{"kind": "predictor"}]
    policies.append({"kind": "schedule", "switch_at": {draw(live): 4, draw(live): 8}})
    policy = draw(st.sampled_from(policies))
    return Limits(seqs, tokens), per_seq, PATConfig.parse({"base_tp": base_tp, "policy": policy})


# -------------------------------------------------------------------- checks


def check_an_engine_takes_the_same_number_in_every_layout() -> None:
    """As long as that is no more than vLLM's default on large GPUs."""
    for seqs in (1, 16, 100, MOST_SEQS // RANKS):
        for tokens in (seqs, MOST_BATCHED_TOKENS // RANKS):
            for layout in LAYOUTS:
                found = layout_limits(layout, Limits(seqs, tokens), EVERY_LAYOUT)
                assert found.max_num_seqs * layout.replicas == RANKS * seqs
                assert found.max_num_batched_tokens * layout.replicas == RANKS * tokens


def check_large_limits_stay() -> None:
    """vLLM's defaults on H100, for both kinds of use, and more than those."""
    for default in (Limits(MOST_SEQS, MOST_BATCHED_TOKENS), Limits(2048, 40_000)):
        for layout in LAYOUTS:
            assert layout_limits(layout, default, EVERY_LAYOUT) == default
    grown = [layout_limits(layout, Limits(1024, 8192), EVERY_LAYOUT) for layout in LAYOUTS]
    assert grown == [Limits(1024, 8192)] + [Limits(1024, 16384)] * 3
    grown = [layout_limits(layout, Limits(256, 8192), EVERY_LAYOUT) for layout in LAYOUTS]
    assert [one.max_num_seqs for one in grown] == [256, 512, 1024, 1024]


def check_what_the_policy_enters_a_layout_with() -> None:
    """A layout is not sized for requests that it will not see, but for no fewer than given."""
    policy = entered_with(tp2=150, tp4=40, tp8=4000)
    found = [layout_limits(layout, Limits(100, 8192), policy) for layout in LAYOUTS]
    assert [one.max_num_seqs for one in found] == [100, 150, 100, 800]
    assert layout_limits(LAYOUTS[3], Limits(500, 8192), policy).max_num_seqs == MOST_SEQS


@given(engines())
def check_bounds(engine: tuple[Limits, int, PATConfig]) -> None:
    given_, per_seq, config = engine
    for layout in LAYOUTS:
        found = layout_limits(layout, given_, config, per_seq)
        assert given_.max_num_seqs <= found.max_num_seqs
        assert found.max_num_seqs <= min(
            layout.tp * given_.max_num_seqs, max(MOST_SEQS, given_.max_num_seqs)
        )
        assert given_.max_num_batched_tokens <= found.max_num_batched_tokens
        assert found.max_num_batched_tokens <= layout.tp * given_.max_num_batched_tokens
        assert found.max_num_batched_tokens >= found.max_num_seqs, "vLLM demands it"
        if given_.max_num_batched_tokens >= given_.max_num_seqs * per_seq:
            assert found.max_num_batched_tokens >= found.max_num_seqs * per_seq
        if layout.tp == 1:
            assert found == given_


@given(engines())
def check_attentions_workspace_of_the_base_layout_suffices(
    engine: tuple[Limits, int, PATConfig],
) -> None:
    """FlashInfer's is as large as the tokens of a step times the heads of a rank."""
    given_, per_seq, config = engine
    layouts = config.resolve_layouts(RANKS)
    base, *others = (
        layout_limits(one, given_, config, per_seq).max_num_batched_tokens / one.tp
        for one in layouts
    )
    assert all(base >= one for one in others)


@given(engines())
def check_per_replica_they_are_as_given(engine: tuple[Limits, int, PATConfig]) -> None:
    given_, per_seq, config = engine
    config = config.model_copy(update={"limits_per": "replica"})
    for layout in LAYOUTS:
        assert layout_limits(layout, given_, config, per_seq) == given_
        assert narrower_limit(5, layout, given_.max_num_seqs, config) == min(5, given_.max_num_seqs)


def check_drafts_have_tokens() -> None:
    """Of 256 requests with 63 drafts each, which the engine's own limits have room for."""
    for layout in LAYOUTS:
        found = layout_limits(layout, Limits(256, 16384), EVERY_LAYOUT, tokens_per_seq=64)
        assert found.max_num_batched_tokens == 64 * found.max_num_seqs


def check_narrower_limits_grow_too() -> None:
    """As vLLM has them for requests that run and tokens that are scheduled."""
    for given_, limit, expected in ((None, 100, None), (10, 100, 40), (50, 100, 100)):
        assert narrower_limit(given_, LAYOUTS[2], limit, EVERY_LAYOUT) == expected


CHECKS: list[Callable[[], None]] = [
    check_an_engine_takes_the_same_number_in_every_layout,
    check_large_limits_stay,
    check_what_the_policy_enters_a_layout_with,
    check_bounds,
    check_attentions_workspace_of_the_base_layout_suffices,
    check_per_replica_they_are_as_given,
    check_drafts_have_tokens,
    check_narrower_limits_grow_too,
]


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__.removeprefix("check_"))
def test(check: Callable[[], None]) -> None:
    check()


def test_another_value_is_refused() -> None:
    with pytest.raises(ValueError, match=r"limits_per.*engine.*'rank' or 'replica'"):
        PATConfig.parse({"limits_per": "engine"})


LIMITS, NARROWER = module.layout_limits, module.narrower_limit
MISTAKES: dict[str, tuple[Callable[[], None], Any, dict[str, str]]] = {
    "a replica's limits are a rank's": (
        check_an_engine_takes_the_same_number_in_every_layout,
        LIMITS,
        {'config.limits_per == "replica"': "True"},
    ),
    "requests grow without end": (
        check_large_limits_stay,
        LIMITS,
        {
            "min(layout.tp * given.max_num_seqs, max(given.max_num_seqs, enough))": (
                "layout.tp * given.max_num_seqs"
            )
        },
    ),
    "tokens grow without end": (
        check_large_limits_stay,
        LIMITS,
        {"max(given.max_num_batched_tokens, MOST_BATCHED_TOKENS, ": "max(10**6, 1, "},
    ),
    "less than the user gave": (
        check_what_the_policy_enters_a_layout_with,
        LIMITS,
        {"max(given.max_num_seqs, enough)": "enough"},
    ),
    "whatever the policy enters a layout with": (
        check_what_the_policy_enters_a_layout_with,
        LIMITS,
        {"MOST_SEQS if enters_with is None else min(MOST_SEQS, enters_with)": "MOST_SEQS"},
    ),
    "drafts have no tokens": (check_drafts_have_tokens, LIMITS, {"seqs * tokens_per_seq": "seqs"}),
    "the option is not looked at": (
        check_per_replica_they_are_as_given,
        LIMITS,
        {'config.limits_per == "replica"': "False"},
    ),
    "the narrower limit stays": (
        check_narrower_limits_grow_too,
        NARROWER,
        {'layout.tp if config.limits_per == "rank" else 1': "1"},
    ),
    "the narrower limit is the wider": (
        check_narrower_limits_grow_too,
        NARROWER,
        {", limit)": ", 10**9)"},
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(mistake: str) -> None:
    check, function, changes = MISTAKES[mistake]
    with mutated(function, changes), pytest.raises(AssertionError):
        check()
