"""A wider layout runs more requests of every kind, and computes what narrow layouts do."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import pytest
from vllm.sampling_params import StructuredOutputsParams

import pat_vllm
from pat_vllm.scheduler.replica_set import ReplicaSet
from tests.engine.specs import DENSE
from tests.support.engines import OPTIONS, Job, Outcome, run, scheduler_of
from tests.support.pool import EnginePool
from tests.support.same import assert_same

pytestmark = pytest.mark.engine(DENSE)

SEQS: int = OPTIONS["max_num_seqs"]


def jobs() -> dict[str, Job]:
    """As many as two ranks run, of every kind that a runner keeps rows for; all alive at once."""
    always: dict[str, Any] = {"logprobs": 0, "ignore_eos": True, "max_tokens": 24}
    kinds: list[dict[str, Any]] = [
        {"temperature": 0},
        {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0, "bad_words": ["a"]},
    ]
    every = {
        f"{kind} {index}": Job([3 + 10 * kind + index, 11, 5], always | sampling)
        for kind, sampling in enumerate(kinds)
        for index in range(2 * SEQS // len(kinds))
    }
    for name in list(every)[: SEQS + SEQS // 4]:
        every[name].sampling["structured_outputs"] = StructuredOutputsParams(regex="[a-z ]{200}")
    return every


def await_grammars(replica_set: ReplicaSet) -> None:
    """Wait until no request waits for a grammar, which vLLM compiles in a thread."""
    end = time.monotonic() + 300
    waiting = [request for replica in replica_set.replicas for request in replica.scheduler.waiting]
    for grammar in filter(None, (request.structured_output_request for request in waiting)):
        while grammar.grammar is None:
            assert time.monotonic() < end, "a grammar does not become ready"
            time.sleep(0.01)


def served(llm: Any, script: Mapping[int, int]) -> tuple[dict[str, Outcome], dict[int, list[int]]]:
    """Outcomes of the jobs, and what each replica ran at most, by tp; switches at `script`'s
    steps."""
    seen: dict[int, list[int]] = {}

    def before_step(step: int) -> None:
        if (tp := script.get(step)) is not None:
            pat_vllm.switch(llm, tp=tp)
        replica_set = scheduler_of(llm).replica_set
        await_grammars(replica_set)
        most = seen.setdefault(replica_set.layout.tp, [0] * len(replica_set.replicas))
        for replica in replica_set.replicas:
            most[replica.index] = max(most[replica.index], len(replica.scheduler.running))
            if step > 8:
                assert not replica.scheduler.waiting, "queued"

    assert llm.reset_prefix_cache()
    return run(llm, jobs(), before_step), seen


@pytest.mark.parametrize("script", [{0: 2}, {0: 1, 10: 2, 15: 1, 21: 2}], ids=["wide", "switches"])
def test_a_group_of_two_runs_twice_as_many(
    llm: Any, engines: EnginePool, script: dict[int, int]
) -> None:
    """And all that run go on after a switch, with the tokens of the narrow layout."""
    narrow, of_narrow = engines.keep("narrow", lambda: served(llm, {0: 1}))
    assert of_narrow == {1: [SEQS, SEQS]}
    outcomes, seen = served(llm, script)
    assert seen[2] == [2 * SEQS] and seen.get(1, [SEQS, SEQS]) == [SEQS, SEQS]
    assert len(outcomes) == 2 * SEQS
    assert_same(outcomes, narrow)


def views(worker: Any) -> dict[int, tuple[int, int, int]]:
    """Of each layout: requests, tokens, and where its input embeddings lie."""
    return {
        layout.tp: (
            runtime.runner.max_num_reqs,
            runtime.runner.max_num_tokens,
            runtime.runner.inputs_embeds.cpu.data_ptr(),
        )
        for layout, runtime in worker._runtimes.items()
    }


def test_runners_have_their_layouts_limits(llm: Any) -> None:
    tokens = llm.llm_engine.vllm_config.scheduler_config.max_num_batched_tokens
    for of_layout in llm.collective_rpc(views):
        narrow, wide = of_layout[1], of_layout[2]
        assert narrow[:2] == (SEQS, tokens)
        assert wide[:2] == (2 * SEQS, min(2 * tokens, max(tokens, 16384)))
        assert narrow[2] == wide[2], "input embeddings are shared"
