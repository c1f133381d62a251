"""Sampled responses follow the law of the model, whatever a drafter with weights drafts.

As `tests/engine/speculation/test_law.py` has it of n-grams: in the middle of each batch the layout
and the draft length change, and of each position the tokens are tested against their exact
probabilities. With Model Runner V1, whose kernels for CPUs draw thousands of responses in minutes.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams

import pat_vllm
from tests.engine.specs import IN_PLACE
from tests.engine.speculation.law import (
    NAMINGS,
    Draws,
    Sampling,
    chi_square,
    independence,
    teacher_forced,
)
from tests.engine.speculation.steps import counted
from tests.engine.speculation.test_law import LENGTH, PROBABLE, PROMPT, Script, in_step, run
from tests.support.engines import scheduler_of
from tests.support.models import random_model
from tests.support.pool import EngineSpec

__all__ = ["in_step"]
BATCH, BATCHES = 250, 24
SCRIPTS = (Script(2, 2, 1, 1), Script(1, 2, 2, 0), Script(2, 1, 1, 2), Script(1, 0, 2, 2))
REQUESTS = (Sampling(), Sampling(temperature=1.5), Sampling())
"""How the requests of a batch draw, in turn. The last have seeds."""
DRAFT_MODEL, MTP = (
    EngineSpec(
        f"law, {method}",
        model,
        2,
        IN_PLACE,
        {
            "speculative_config": {"method": method, "num_speculative_tokens": 2, **drafter},
            "max_model_len": 64,
            "max_num_seqs": BATCH,
            "max_num_batched_tokens": BATCH * 32,
            "kv_cache_memory_bytes": 64 << 20,
        },
    )
    for method, model, drafter in (
        ("draft_model", "vocab16", {"model": "vocab16"}),
        ("mtp", "vocab16_mimo", {}),
    )
)
pytestmark = [pytest.mark.engine(DRAFT_MODEL, MTP), pytest.mark.usefixtures("in_step")]


def test_the_law_holds_across_switches_and_changes_of_the_draft_length(
    llm: Any, spec: EngineSpec
) -> None:
    from transformers import AutoModelForCausalLM

    scheduler_of(llm).controller.switch_id = 1_000  # seeds the requests that have no seed
    began, before = len(pat_vllm.report(llm).switches), counted(llm)
    kinds = np.arange(BATCHES * BATCH) % len(REQUESTS)
    responses: list[list[int]] = []
    pairs: list[tuple[int, int]] = []
    for number in range(BATCHES):
        first = number * BATCH
        params = [
            SamplingParams(
                temperature=REQUESTS[kind].temperature,
                seed=first + i if kind == 2 else None,
                max_tokens=LENGTH,
                ignore_eos=True,
                detokenize=False,
            )
            for i, kind in enumerate(kinds[first : first + BATCH])
        ]
        replicas = run(llm, SCRIPTS[number % len(SCRIPTS)], params, responses)
        if len(replicas) == 2:
            rows = zip(*replicas, strict=False)
            pairs += [(first + a, first + b) for a, b in rows if kinds[a] < 2 and kinds[b] < 2]
    drafted, accepted = (now - then for now, then in zip(counted(llm), before, strict=True))
    print(f"{accepted} of {drafted} drafts accepted")
    assert 0.25 < accepted / drafted < 0.8
    busy = [switch for switch in pat_vllm.report(llm).switches[began:] if switch.num_seqs]
    assert len(busy) == BATCHES and all(switch.migrated for switch in busy)
    model = AutoModelForCausalLM.from_pretrained(random_model(spec.model))
    tokens = np.array(responses)
    logits = teacher_forced(model, PROMPT, tokens)
    laws = np.empty_like(logits)
    for kind, sampling in enumerate(REQUESTS):
        laws[kinds == kind] = sampling.law(logits[kinds == kind])
    draws = Draws(tokens, laws)
    probable = {
        f"{name}, position {position}": chi_square(*naming(draws, position))
        for name, naming in NAMINGS.items()
        for position in range(name == "first token", LENGTH)
    }
    for position in range(LENGTH):
        probable[f"replicas, position {position}"] = independence(draws, position, pairs)
    print(min(probable.values()), probable)
    assert min(probable.values()) > PROBABLE, probable
