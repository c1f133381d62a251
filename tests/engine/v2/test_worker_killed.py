"""A killed worker: the engine fails clearly, and leaves nothing."""

from __future__ import annotations

import pytest

import pat_vllm
from tests.engine.specs import V2
from tests.engine.v2.batch import batch, most_tokens
from tests.support.engines import engine_processes
from tests.support.faults import assert_gone, die_in_exchange
from tests.support.pool import EnginePool, EngineSpec, go_home


@pytest.mark.engine(V2)
def test_a_worker_killed_in_a_switch_ends_the_engine(spec: EngineSpec, engines: EnginePool) -> None:
    """The last test of this engine. The other ranks wait for the killed one in a collective."""
    from vllm import SamplingParams

    llm = engines.get(spec)
    go_home(llm)
    workers = engine_processes()
    try:
        assert len(workers) == len(llm.collective_rpc(die_in_exchange)) == spec.ranks
        for name in ("greedy", "long", "penalties"):
            job = batch("none")[name]
            llm.llm_engine.add_request(
                name, {"prompt_token_ids": job.prompt}, SamplingParams(**job.sampling)
            )
        while most_tokens(llm) < 3:
            llm.llm_engine.step()
        with pytest.raises(RuntimeError, match=r"failed|died"):
            pat_vllm.switch(llm, tp=2)
        with pytest.raises(RuntimeError, match="Executor failed"):
            llm.llm_engine.step()
        assert_gone(workers)
    finally:
        del llm
        engines.close()
