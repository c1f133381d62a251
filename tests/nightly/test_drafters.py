"""Storms of drafters with weights."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

import pat_vllm
from tests.engine.specs import EAGLE3, MTP, SELF_DRAFTS
from tests.engine.test_drafters import batch, verified, without_drafts
from tests.engine.v2.batch import kv_carried, sizes_of
from tests.support.engines import Outcome, run
from tests.support.pool import EngineSpec, go_home
from tests.support.same import PLAIN_TOLERANCE, assert_same

pytestmark = pytest.mark.engine(SELF_DRAFTS, MTP, EAGLE3)

COPIES = 6


def test_storm(llm: Any, spec: EngineSpec) -> None:
    """Random switches, with KV carried or computed again, and random draft lengths, while requests
    come, wait and are given up; then again after sleep."""
    rng = random.Random(3)
    expected = without_drafts(spec.model)
    for turn in range(2):
        go_home(llm)
        jobs = {
            f"{name}/{turn}/{copy}": replace(job, arrives=rng.randint(0, 20 * COPIES))
            for copy in range(COPIES)
            for name, job in batch(spec.model).items()
        }
        given_up = {*rng.sample(sorted(jobs), 5)}
        waiting = set(given_up)
        seen: dict[str, Outcome] = {}
        began = len(pat_vllm.report(llm).switches)
        due = 0

        def before_step(
            step: int, waiting: set[str] = waiting, seen: dict[str, Outcome] = seen
        ) -> None:
            nonlocal due
            pat_vllm.speculate(llm, rng.choice((0, 1, 2)))
            for name in [name for name in waiting & seen.keys() if len(seen[name].token_ids) > 2]:
                waiting.remove(name)
                llm.llm_engine.abort_request([name])
            if sum(len(outcome.token_ids) for outcome in seen.values()) >= due:
                due += rng.randint(3, 16)
                here = pat_vllm.report(llm).layout.tp
                assert pat_vllm.switch(
                    llm, tp=rng.choice([tp for tp in sizes_of(llm) if tp != here])
                )

        carried = kv_carried(llm, lambda: rng.choice(("migrate", "migrate", "recompute")))
        with carried, verified() as counts:
            finished = run(llm, jobs, before_step, seen)
            drafted, accepted = counts.take()
        done = {name: outcome for name, outcome in finished.items() if name not in given_up}
        assert_same(done, {name: expected[name.split("/")[0]] for name in done}, PLAIN_TOLERANCE)
        switches = [switch for switch in pat_vllm.report(llm).switches[began:] if switch.num_seqs]
        assert len(switches) >= 2 * COPIES and drafted
        assert accepted == drafted if spec.name.endswith("draft_model") else 0 < accepted < drafted
        if not turn:
            assert llm.reset_prefix_cache()
            llm.sleep(level=1)
            llm.wake_up()
