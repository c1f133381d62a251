"""How many requests and tokens a replica of each layout runs: what the arithmetic promises."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from pat_vllm.config import PATConfig
from pat_vllm.layout import Layout
from pat_vllm.modelled.gpus import GPUS
from pat_vllm.modelled.roofline import Machine
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.model_size import ModelSize
from pat_vllm.start.limits import (
    MOST_BATCHED_TOKENS,
    MOST_SEQS,
    Limits,
    layout_limits,
    narrower_limit,
)

RANKS = 8
LAYOUTS = tuple(Layout.of(tp, RANKS) for tp in (1, 2, 4, 8))
EVERY_LAYOUT = PATConfig()


def schedule(switch_at: dict[int, int]) -> dict[str, Any]:
    return {"policy": {"kind": "schedule", "switch_at": switch_at}}


@st.composite
def engines(draw: st.DrawFn) -> tuple[Limits, int, PATConfig]:
    """Limits (vLLM takes no fewer tokens than requests), tokens of a request in a step, options."""
    seqs = draw(st.integers(1, 3000))
    given_ = Limits(seqs, draw(st.integers(seqs, 50_000)))
    live = st.integers(1, 5000)
    policy = draw(st.sampled_from([{}, schedule({draw(live): 4, draw(live): 8})]))
    config = PATConfig.parse({"base_tp": draw(st.sampled_from([1, 2, 4])), **policy})
    return given_, draw(st.integers(1, 32)), config


def test_an_engine_takes_the_same_number_in_every_layout() -> None:
    """As long as that is no more than vLLM's default on large GPUs."""
    for seqs in (1, 100, MOST_SEQS // RANKS):
        for tokens in (seqs, MOST_BATCHED_TOKENS // RANKS):
            for layout in LAYOUTS:
                limits = layout_limits(layout, Limits(seqs, tokens), EVERY_LAYOUT)
                assert limits.max_num_seqs * layout.replicas == RANKS * seqs
                assert limits.max_num_batched_tokens * layout.replicas == RANKS * tokens


def test_large_limits_stay() -> None:
    """vLLM's defaults on H100 for both kinds of use, and more than those."""
    for default in (Limits(MOST_SEQS, MOST_BATCHED_TOKENS), Limits(2048, 40_000)):
        assert {layout_limits(layout, default, EVERY_LAYOUT) for layout in LAYOUTS} == {default}
    grown = [layout_limits(layout, Limits(1024, 8192), EVERY_LAYOUT) for layout in LAYOUTS]
    assert grown == [Limits(1024, 8192)] + [Limits(1024, 16384)] * 3
    grown = [layout_limits(layout, Limits(256, 8192), EVERY_LAYOUT) for layout in LAYOUTS]
    assert [limits.max_num_seqs for limits in grown] == [256, 512, 1024, 1024]


def test_no_layout_is_sized_for_requests_that_it_will_not_see() -> None:
    """But for no fewer than the user gave."""
    policy = PATConfig.parse(schedule({150: 2, 40: 4, 4000: 8}))
    grown = [layout_limits(layout, Limits(100, 8192), policy) for layout in LAYOUTS]
    assert [limits.max_num_seqs for limits in grown] == [100, 150, 100, 800]
    assert layout_limits(LAYOUTS[3], Limits(500, 8192), policy).max_num_seqs == MOST_SEQS


def test_over_pcie_a_step_does_not_grow() -> None:
    """But to a token for each of all requests, and to their drafts."""
    small = Limits(256, 2048)
    grown = [layout_limits(layout, small, EVERY_LAYOUT, link="pcie") for layout in LAYOUTS]
    assert grown == [small, *(Limits(seqs, 2048) for seqs in (512, 1024, 1024))]
    drafting = layout_limits(LAYOUTS[3], small, EVERY_LAYOUT, 8, "pcie")
    assert drafting == Limits(1024, 8192)
    widest = layout_limits(LAYOUTS[3], small, EVERY_LAYOUT, link="nvlink")
    assert widest == layout_limits(LAYOUTS[3], small, EVERY_LAYOUT) == Limits(1024, 16384)
    # What a prompt's longest step takes, in which nobody else decodes.
    machine = Machine(ModelSize.of(MODEL_SHAPES["qwen3-8b"]), GPUS["A40"])
    short, long = (
        machine.step(LAYOUTS[3], 0, 0, prefill=limits.max_num_batched_tokens)
        for limits in (grown[3], widest)
    )
    assert short < 0.5 < 1.5 < long
    # A prompt takes about as long in several such steps.
    assert 8 * short < 1.1 * long


@settings(max_examples=60)
@given(engines())
def test_bounds(engine: tuple[Limits, int, PATConfig]) -> None:
    given_, per_seq, config = engine
    for layout in LAYOUTS:
        limits = layout_limits(layout, given_, config, per_seq)
        seqs, tokens = limits.max_num_seqs, limits.max_num_batched_tokens
        most = max(MOST_SEQS, given_.max_num_seqs)
        assert given_.max_num_seqs <= seqs <= min(layout.tp * given_.max_num_seqs, most)
        assert given_.max_num_batched_tokens <= tokens <= layout.tp * given_.max_num_batched_tokens
        assert tokens >= seqs, "vLLM demands it"
        if given_.max_num_batched_tokens >= given_.max_num_seqs * per_seq:
            assert tokens >= seqs * per_seq
        if layout.tp == 1:
            assert limits == given_
    # FlashInfer's workspace is as large as the tokens of a step times the heads of a rank: that
    # of the base layout suffices for all.
    base, *others = (
        layout_limits(layout, given_, config, per_seq).max_num_batched_tokens / layout.tp
        for layout in config.resolve_layouts(RANKS)
    )
    assert all(base >= other for other in others)


@settings(max_examples=30)
@given(engines())
def test_per_replica_they_are_as_given(engine: tuple[Limits, int, PATConfig]) -> None:
    given_, per_seq, config = engine
    config = config.model_copy(update={"limits_per": "replica"})
    for layout in LAYOUTS:
        assert layout_limits(layout, given_, config, per_seq) == given_
        assert narrower_limit(5, layout, given_.max_num_seqs, config) == min(5, given_.max_num_seqs)


def test_narrower_limits_grow_too() -> None:
    """As vLLM has them for requests that run and tokens that are scheduled."""
    for given_, limit, expected in ((None, 100, None), (10, 100, 40), (50, 100, 100)):
        assert narrower_limit(given_, LAYOUTS[2], limit, EVERY_LAYOUT) == expected
