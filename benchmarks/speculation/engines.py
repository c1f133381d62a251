"""Engines of these measurements, and what runs in their processes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from benchmarks.common import MODELS, Engine, model

RANKS = 2
BIND = "0|1"
SEQS_PER_RANK = 16
"""PAT's `max_num_seqs`. A stock engine gets as many for each of its ranks."""
MAX_MODEL_LEN = 4096
_SETTLE_SECONDS = 0.05
"""After a batch, an engine learns in a step of its own that nothing is left to do."""
_RANDOM_TOKENS = 8
_PHRASE_TOKENS = 40


def flags(name: str, kv_mib: int = 512) -> dict[str, Any]:
    """What every engine gets; `kv_mib` is of a core."""
    return dict(
        model=model(name),
        dtype=MODELS[name].get("dtype", "float32"),
        enforce_eager=True,
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory_bytes=kv_mib << 20,
    )


def ngram(length: int) -> dict[str, Any]:
    """Options by which an engine speculates."""
    config = dict(
        method="ngram", num_speculative_tokens=length, prompt_lookup_min=2, prompt_lookup_max=4
    )
    return {"speculative_config": config}


def pat(tp: int, **more: Any) -> dict[str, Any]:
    """Options of a PAT engine that stays in `tp`; `more` is of `additional_config["pat"]`."""
    return dict(
        tensor_parallel_size=RANKS,
        distributed_executor_backend="pat",
        additional_config={"pat": {"policy": {"kind": "static", "tp": tp}, **more}},
        max_num_seqs=SEQS_PER_RANK,
    )


def stock(tp: int) -> dict[str, Any]:
    """Options of a stock engine with as many ranks as a replica of PAT's in `tp`."""
    backend = {"distributed_executor_backend": "mp"} if tp > 1 else {}
    return dict(tensor_parallel_size=tp, max_num_seqs=SEQS_PER_RANK * tp, **backend)


@contextmanager
def turn(engines: Sequence[Engine]) -> Iterator[None]:
    """Have paused engines go on inside."""
    for engine in engines:
        engine.resume()
    try:
        yield
    finally:
        time.sleep(_SETTLE_SECONDS)
        for engine in engines:
            engine.pause()


def repeating_prompts(name: str, count: int, seed: int) -> list[dict[str, list[int]]]:
    """Prompts that begin differently and go on with the phrase that the model repeats."""
    import random

    from pat_vllm.cli.random_model import SPECIAL_TOKENS

    rng = random.Random(seed)
    size, first = MODELS[name].get("phrase", 16), len(SPECIAL_TOKENS)
    prompts = []
    for _ in range(count):
        start = rng.randrange(size)
        tokens = [rng.randrange(300, 4000) for _ in range(_RANDOM_TOKENS)]
        tokens += [first + (start + i) % size for i in range(_PHRASE_TOKENS)]
        prompts.append({"prompt_token_ids": tokens})
    return prompts


@dataclass(frozen=True)
class Batch:
    """Requests that begin together and generate equally many tokens.

    Attributes:
        length: what `pat_vllm.speculate` is told; None leaves it.
        tp: what `pat_vllm.switch` is told; None leaves it.
        begin_at: moment on the monotonic clock, so that several engines begin together.
    """

    prompts: Sequence[Mapping[str, Any]]
    new_tokens: int
    temperature: float = 0.0
    length: int | None = None
    tp: int | None = None
    begin_at: float | None = None


@dataclass(frozen=True)
class Served:
    """A batch that was served.

    Attributes:
        began, ended: on the monotonic clock.
        tokens: generated ids of each request.
        steps, drafted, accepted: of a PAT engine; 0 of others.
    """

    began: float
    ended: float
    tokens: tuple[tuple[int, ...], ...]
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


def serve(llm: Any, batch: Batch) -> Served:
    """Serve a batch, in the engine's process, after a short one that wakes the engine up."""
    from vllm import SamplingParams

    def generate(prompts: Sequence[Mapping[str, Any]], new_tokens: int) -> list[Any]:
        params = [
            SamplingParams(
                temperature=batch.temperature,
                seed=index,
                max_tokens=new_tokens,
                ignore_eos=True,
                detokenize=False,
            )
            for index in range(len(prompts))
        ]
        outputs: list[Any] = llm.generate(list(prompts), params, use_tqdm=False)
        return outputs

    import pat_vllm

    uses_pat = llm.llm_engine.vllm_config.additional_config.get("pat") is not None
    generate([{"prompt_token_ids": [7, 8, 9]}], 2)
    if batch.tp is not None:
        assert pat_vllm.switch(llm, batch.tp)
    if batch.length is not None:
        pat_vllm.speculate(llm, batch.length)
    before = _counts(llm) if uses_pat else (0, 0, 0)
    while batch.begin_at is not None and (left := batch.begin_at - time.monotonic()) > 0:
        time.sleep(min(left, 1e-3))
    began = time.monotonic()
    outputs = generate(batch.prompts, batch.new_tokens)
    ended = time.monotonic()
    tokens = tuple(tuple(output.outputs[0].token_ids) for output in outputs)
    assert all(len(one) == batch.new_tokens for one in tokens)
    after = _counts(llm) if uses_pat else (0, 0, 0)
    return Served(began, ended, tokens, *(b - a for a, b in zip(before, after, strict=True)))


def _counts(llm: Any) -> tuple[int, int, int]:
    """Steps, drafted and accepted tokens of an engine's whole life."""
    import pat_vllm

    report = pat_vllm.report(llm)
    return (
        sum(steps.steps for steps in report.steps.values()),
        sum(sample.drafted for sample in report.drafts),
        sum(sample.accepted for sample in report.drafts),
    )
