"""Speculation with the engine core in a process of its own, as for users."""

from __future__ import annotations

import threading

import pytest

import pat_vllm
from tests.engines import Outcome
from tests.speculation.batch import MODEL, OPTIONS, batch
from tests.speculation.steps import LENGTHS, SPECULATIVE

pytestmark = [pytest.mark.slow, pytest.mark.nightly]


def test_lengths_change_while_an_engine_generates(static: dict[str, Outcome]) -> None:
    from vllm import SamplingParams

    from tests.engines import engine

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

    options = {**OPTIONS, "speculative_config": SPECULATIVE}
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
        assert list(output.outputs[0].token_ids) == static[name].token_ids
    assert {one.num_speculative_tokens for one in report.drafts} == set(LENGTHS)
    assert sum(one.accepted for one in report.drafts) > 10
