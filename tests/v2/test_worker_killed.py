"""A killed worker: the engine fails clearly, and leaves nothing."""

from __future__ import annotations

from typing import Any

import psutil
import pytest

import pat_vllm
from tests.test_faults import GONE_WITHIN, die_in_exchange
from tests.v2.batch import Served, most_tokens

pytestmark = pytest.mark.slow


def test_a_worker_killed_in_a_switch_ends_the_engine(served: Served, llm: Any) -> None:
    """The last test of this engine. The other ranks wait for the killed one in a collective."""
    from vllm import SamplingParams

    assert len(served.workers) == len(llm.collective_rpc(die_in_exchange))
    for name in ("greedy", "long", "penalties"):
        job = served.jobs[name]
        llm.llm_engine.add_request(
            name, {"prompt_token_ids": job.prompt}, SamplingParams(**job.sampling)
        )
    while most_tokens(llm) < 3:
        llm.llm_engine.step()
    with pytest.raises(RuntimeError, match=r"failed|died"):
        pat_vllm.switch(llm, tp=2)
    with pytest.raises(RuntimeError, match="Executor failed"):
        llm.llm_engine.step()
    _, alive = psutil.wait_procs(served.workers, timeout=GONE_WITHIN)
    assert not alive
