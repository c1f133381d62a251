"""Speculation with the engine core in a process of its own, as for users; workers that fail."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

import pat_vllm
from tests.engine.specs import DRAFTS_OPTIONS, NGRAM
from tests.engine.speculation.batch import MODEL, batch, without_drafts
from tests.engine.speculation.in_workers import die_in_verification, fail_in_drafter
from tests.support.engines import engine, run
from tests.support.faults import assert_a_dead_worker_is_noticed
from tests.vllm.scheduler.protocol import LENGTHS


def test_lengths_change_while_an_engine_generates() -> None:
    from vllm import SamplingParams

    expected = without_drafts()
    jobs = batch()
    prompts = [{"prompt_token_ids": job.prompt} for job in jobs.values()]
    params = [SamplingParams(**job.sampling) for job in jobs.values()]
    done = threading.Event()

    def restless() -> None:
        for i in range(400):
            if done.is_set():
                return
            pat_vllm.speculate(llm, LENGTHS[i % 4])
            if i % 8 == 0:
                pat_vllm.switch(llm, tp=1 + i // 8 % 2)

    options = DRAFTS_OPTIONS | {"speculative_config": NGRAM}
    with engine(MODEL, 2, {}, in_process=False, **options) as llm:
        with pytest.raises(Exception, match=r"keeps \[0, 1, 2, 4\] ready"):
            pat_vllm.speculate(llm, 3)
        changing = threading.Thread(target=restless)
        changing.start()
        try:
            outputs = llm.generate(prompts, params, use_tqdm=False)
        finally:
            done.set()
            changing.join(60)
        report = pat_vllm.report(llm)
    for name, output in zip(jobs, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == expected[name].token_ids
    assert {draft.num_speculative_tokens for draft in report.drafts} == set(LENGTHS)
    assert sum(draft.counts.accepted for draft in report.drafts) > 10


def test_a_drafter_that_fails_is_named() -> None:
    """vLLM has no other drafter to go on with."""
    options = DRAFTS_OPTIONS | {"speculative_config": NGRAM}
    with engine(MODEL, 2, {}, **options) as llm:
        llm.collective_rpc(fail_in_drafter)
        with pytest.raises(RuntimeError, match="no n-gram today"):
            run(llm, batch())


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("sabotage", [die_in_verification, fail_in_drafter])
def test_a_worker_that_fails_while_it_speculates_ends_the_engine(
    tp: int, sabotage: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an engine with processes of its own, of which none is left."""
    config = NGRAM | {"prompt_lookup_min": 1}
    assert_a_dead_worker_is_noticed({}, sabotage, tp, monkeypatch, speculative_config=config)
