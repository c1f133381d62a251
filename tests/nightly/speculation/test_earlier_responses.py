"""Drafts from earlier responses for long: ranks agree on them, and memory stays."""

from __future__ import annotations

import random
from typing import Any

import psutil
import pytest

import pat_vllm
from tests.engine.specs import DRAFTS
from tests.engine.speculation.batch import MODEL, batch, copies_of, without_drafts
from tests.engine.speculation.steps import watched
from tests.support.draft_prints import alike
from tests.support.engines import Job, run, scheduler_of
from tests.support.models import phrase
from tests.support.pool import go_home
from tests.support.same import assert_same, of_batch
from tests.vllm.scheduler.protocol import LENGTHS

pytestmark = pytest.mark.engine(DRAFTS)

SWITCHES = 2000
ITERATIONS = 50
KEPT = 100_000
"""Bytes of responses: those of the last ten iterations or so."""


def test_ranks_draft_alike_and_no_token_changes_over_many_switches(llm: Any) -> None:
    """The layout and the draft length change before each step."""
    rng, expected = random.Random(4), without_drafts()
    done = 0

    def before_step(step: int) -> None:
        nonlocal done
        layout = pat_vllm.report(llm).layout
        if step and pat_vllm.switch(llm, tp=3 - layout.tp):
            done += 1
        watch.k = rng.choice(LENGTHS)
        pat_vllm.speculate(llm, watch.k)

    with alike(llm):
        while done < SWITCHES:
            jobs = copies_of(batch(), [lambda: rng.randint(0, 30)] * 2)
            with watched() as watch:
                outcomes = run(llm, jobs, before_step=before_step)
            assert_same(outcomes, {name: expected[of_batch(name)] for name in jobs})
            assert any(watch.rows.values())


def test_memory_is_flat(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampled responses to the same prompts, again and again."""
    go_home(llm)
    rows = scheduler_of(llm).monitor.draft_rows
    monkeypatch.setattr(rows._corpus, "_max_bytes", KEPT)
    sampled = {"temperature": 1.0, "max_tokens": 60, "ignore_eos": True}
    prompts = [phrase(MODEL, 30, start) for start in range(8)]
    jobs = {f"p{i}/{s}": Job(prompts[i], sampled) for i in range(8) for s in range(4)}
    processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
    sizes = []
    for _ in range(ITERATIONS):
        run(llm, jobs)
        assert pat_vllm.switch(llm, tp=3 - pat_vllm.report(llm).layout.tp)
        assert rows.num_bytes <= KEPT
        assert not rows._keys and not rows._rows and not rows._changed and not rows._siblings
        sizes.append(
            sum(process.memory_info().rss for process in processes if process.is_running())
        )
    first, last = min(sizes[10:20]), min(sizes[-10:])
    assert last - first < 8 << 20, [size >> 20 for size in sizes]
