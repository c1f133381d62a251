"""Weights that vLLM quantizes as they arrive."""

from __future__ import annotations

from typing import Any

import pat_vllm
from tests.engine.specs import FP8
from tests.engine.test_weight_updates import batch, load_one_by_one, transfer, update
from tests.support.engines import engine, run
from tests.support.stock import stock_answers

RANKS = 2
OPTIONS: dict[str, Any] = {**FP8.options, "quantization": "fp8_per_channel", "dtype": "bfloat16"}
PAT = {**FP8.pat, "readonly_calls": ["prints_of_weights"]}


def seen_in_each(llm: Any) -> dict[int, Any]:
    """Every weight's bytes and a batch's outcomes, in each layout."""
    seen = {}
    for tp in [layout.tp for layout in pat_vllm.report(llm).layouts]:
        assert pat_vllm.switch(llm, tp=tp)
        # Activations are quantized, too, by each rank's part: KV of another layout's is not alike.
        llm.reset_prefix_cache()
        outcomes = run(llm, batch())
        seen[tp] = llm.collective_rpc("prints_of_weights"), outcomes
    return seen


def test_a_trainer_sends_16_bits() -> None:
    """As OpenRLHF does, a call for each tensor, which parameters do not fit; as TRL does, too.

    Bytes, scales and tokens are those of an engine that has started with the new weights, whose
    tokens are stock vLLM's at each layout's tp.
    """
    with engine("fp8_updated", RANKS, PAT, **OPTIONS) as fresh:
        wanted = seen_in_each(fresh)
    for tp, (_, outcomes) in wanted.items():
        static = stock_answers("fp8_updated", batch(), ranks=tp, **OPTIONS)
        assert {name: outcome.token_ids for name, outcome in outcomes.items()} == {
            name: outcome.token_ids for name, outcome in static.items()
        }
    with engine("fp8", RANKS, PAT, **OPTIONS) as llm:
        old = seen_in_each(llm)
        assert all(old[tp] != wanted[tp] for tp in wanted)
        for model, how, expected in (
            ("fp8_updated", load_one_by_one, wanted),
            ("fp8", transfer, old),
        ):
            update(llm, model, how)
            assert seen_in_each(llm) == expected
