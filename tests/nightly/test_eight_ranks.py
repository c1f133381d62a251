"""Eight ranks: every ordered pair of their layouts, with few KV heads, so that ranks share them."""

from __future__ import annotations

import itertools
from typing import Any

import pat_vllm
from tests.engine.test_switch import at_steps, batch, tolerance
from tests.support.engines import engine, run
from tests.support.same import assert_teacher_forced

# For every change: all pairs on four ranks, with more and with fewer KV heads, and all pairs of
# eight ranks' layouts in arithmetic.

SIZES = (1, 2, 4, 8)


def test_every_ordered_pair_of_layouts() -> None:
    """What is sampled after each switch is what the static target layout gives to that token."""
    options: dict[str, Any] = {"kv_transfer": "migrate", "weights": "inplace"}
    jobs = batch(requests=4, longest=18)
    with engine("qwen3", 8, options, max_num_batched_tokens=1000) as llm:
        for source, target in itertools.permutations(SIZES, 2):
            outcomes = run(llm, jobs, before_step=at_steps(llm, {0: source, 4: target}))
            last = [switch for switch in pat_vllm.report(llm).switches if switch.num_seqs][-1]
            assert (last.source.tp, last.target.tp) == (source, target)
            assert last.migrated == last.num_seqs == len(jobs)
            print(f"{source} -> {target}: stall {1e3 * (last.seconds - last.quiesce):.0f} ms")
            pat_vllm.switch(llm, tp=target)
            assert_teacher_forced(llm, jobs, outcomes, tolerance(llm))
