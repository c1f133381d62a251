"""One engine with Model Runner V2 and asynchronous scheduling for all of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest

from tests.engines import engine, engine_processes
from tests.support.v2_on_cpu.v2_on_cpu import model_runner_v2, scheduled_asynchronously
from tests.v2.batch import CHUNK, PLACES, Served, batch, refresh, run_static
from tests.v2.in_workers import runner_module


@pytest.fixture(scope="package")
def runner_v2() -> Iterator[None]:
    """The engines of these tests have Model Runner V2."""
    with model_runner_v2():
        yield


@pytest.fixture(
    scope="package",
    params=[
        pytest.param((4, "inplace"), id="four"),
        pytest.param((2, "materialized"), id="two", marks=pytest.mark.nightly),
    ],
)
def served(request: pytest.FixtureRequest, runner_v2: None) -> Iterator[Served]:
    """The engine that these tests share; the last of them kills it."""
    ranks, weights = request.param
    before = engine_processes()
    with ExitStack() as stack:
        with scheduled_asynchronously():
            llm = stack.enter_context(
                engine(
                    "qwen3",
                    ranks,
                    {"kv_transfer": "migrate", "weights": weights},
                    worker_extension_cls="tests.support.weight_updates.WeightUpdates",
                    structured_outputs_config={
                        "backend": "xgrammar",
                        "disable_any_whitespace": True,
                    },
                    max_model_len=256,
                    max_num_seqs=PLACES,
                    max_num_batched_tokens=CHUNK,
                    # So that wider layouts, with more tokens, have prompts in chunks, too.
                    long_prefill_token_threshold=CHUNK,
                )
            )
        config = llm.llm_engine.vllm_config
        assert config.use_v2_model_runner and config.scheduler_config.async_scheduling
        assert set(llm.collective_rpc(runner_module)) == {"vllm.v1.worker.cpu.model_runner"}
        plain = run_static(llm, {"greedy": batch("")["greedy"]})["greedy"].text
        jobs = batch(stop=plain[len(plain) // 2 :][:3])
        yield Served(llm, engine_processes(before), jobs, run_static(llm, jobs))


@pytest.fixture
def llm(served: Served) -> Iterator[Any]:
    """The shared engine, idle and at home."""
    refresh(served.llm)
    yield served.llm
