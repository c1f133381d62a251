"""The workloads with speculation: long tails whose drafts are accepted, refused, or now so now so.

Models, temperature, seeds, lengths and prompts are fixed here, before anything was measured. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.batch import Request
from benchmarks.bench.serve import requests_of
from benchmarks.bench.speculative.models import REPEATING, SCATTERED, SPECS
from benchmarks.bench.workloads import Workload
from pat_vllm.cli.random_tokenizer import SPECIAL_TOKENS
from pat_vllm.simulator import shapes
from pat_vllm.simulator.traces import LengthTrace

NGRAMS = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4}
"""The drafter of all sides. Requests are sampled at temperature 1 and unseeded, as in the other
workloads; the engines' seed is vLLM's default, 0."""
MOST_DRAFTS = 4
DRAFT_LENGTHS = (0, 1, 2, 4)
"""Every fixed one; an engine for 4 keeps these ready."""

ACCEPTED: Mapping[str, tuple[float, float]] = {REPEATING: (0.3, 0.7), SCATTERED: (0.0, 0.05)}
"""Least and most share of the draft tokens that has to be accepted with each model."""

LONGEST = 144
PHRASE_TOKENS = 40
"""With which a prompt ends, so that drafts are found from the first tokens on."""
_RANDOM_TOKENS = 8


@dataclass(frozen=True)
class SpeculativeWorkload(Workload):
    """A long tail that is served with drafts.

    Attributes:
        models: the first serves two batches in a row, then the next one two, and so on.
    """

    models: tuple[str, ...] = (REPEATING,)

    def model(self, repeat: int) -> str:
        """The model of a repeat: with several, one right after a change and one later."""
        return self.models[repeat // 2 % len(self.models)]

    @property
    def updates(self) -> bool:
        """Whether weights are replaced between batches."""
        return len(self.models) > 1


def _long_tail(repeat: int, scale: float, seed: int) -> LengthTrace:
    return shapes.lognormal(
        max(4, round(32 * scale)), 14 * scale, 1.2, round(LONGEST * scale), seed
    )


def requests_with_phrase(
    trace: LengthTrace, vocab: int, seed: int, size: int
) -> tuple[Request, ...]:
    """A trace's requests, whose prompts end with a phrase of so many tokens, again and again."""
    first = len(SPECIAL_TOKENS)
    random = np.random.default_rng((seed, 1))
    found = []
    for one in requests_of(trace, vocab, seed):
        at = int(random.integers(size)) + np.arange(PHRASE_TOKENS)
        phrase = tuple((first + at % size).tolist())
        found.append(replace(one, prompt=one.prompt[:-PHRASE_TOKENS] + phrase))
    return tuple(found)


def phrase_of(model: str) -> int:
    """Tokens of a model's phrase."""
    size: int = SPECS[model].get("phrase", 16)
    return size


def _workload(name: str, text: str, *models: str) -> SpeculativeWorkload:
    prompt = _RANDOM_TOKENS + PHRASE_TOKENS
    return SpeculativeWorkload(
        name, text, _long_tail, longest=LONGEST, prompts=(prompt, prompt),
        models=models,
    )  # fmt: skip


_TAIL = f"32 log-normal requests around 14 tokens, at most {LONGEST}"

SPECULATIVE: Mapping[str, SpeculativeWorkload] = {
    one.name: one
    for one in (
        _workload("repeating", f"{_TAIL}; 0.3 to 0.7 of the draft tokens are accepted", REPEATING),
        _workload("unpredictable", f"{_TAIL}; below 0.05 of the drafts are accepted", SCATTERED),
        _workload(
            "changing",
            f"{_TAIL}; the weights are replaced before every second batch: drafts are accepted as "
            "in `repeating` and as in `unpredictable` in turns",
            REPEATING,
            SCATTERED,
        ),
    )
}  # fmt: skip
