"""Engines whose layouts share one copy of the weights."""

from __future__ import annotations

from typing import Any

import pytest

import pat_vllm
from tests.engines import engine, run
from tests.test_switch import at_steps, batch

pytestmark = pytest.mark.slow


def weight_bytes(worker: Any) -> tuple[int, int]:
    """Bytes of the weights of all layouts of a rank, and of its base layout alone."""

    def storages(runtimes: Any) -> dict[int, int]:
        found = {}
        for runtime in runtimes:
            model = runtime.runner.get_model()
            for tensor in [*model.parameters(), *model.buffers()]:
                storage = tensor.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
        return found

    layouts = list(worker._runtimes.values())
    return sum(storages(layouts).values()), sum(storages(layouts[:1]).values())


def test_the_layouts_take_the_memory_of_one() -> None:
    with engine("qwen3_tied", 4, {"weights": "inplace"}) as llm:
        for tp in (1, 4, 2):
            pat_vllm.switch(llm, tp=tp)
            for every, base in llm.collective_rpc(weight_bytes):
                print(f"tp={tp}: weights of all layouts / base layout's: {every / base:.4f}")
                assert base > 100_000
                assert every <= 1.02 * base


def test_one_group_is_a_stock_engine() -> None:
    """With plain weights on both sides. A batch cut in two is rounded otherwise."""
    plain: dict[str, Any] = {"worker_extension_cls": "tests.support.weight_updates.WeightUpdates"}
    limits: dict[str, Any] = {"max_num_batched_tokens": 1000}
    with engine("qwen2", 2, None, **plain, **limits) as llm:
        stock = run(llm, batch())
    with engine("qwen2", 2, {"weights": "inplace"}, **limits) as llm:
        group, replicas = (run(llm, batch(), before_step=at_steps(llm, {0: tp})) for tp in (2, 1))
    for name, one in stock.items():
        assert group[name].token_ids == one.token_ids == replicas[name].token_ids
        assert group[name].logprobs == pytest.approx(one.logprobs, abs=1e-5)
    apart = max(
        abs(a - b)
        for name, one in stock.items()
        for a, b in zip(one.logprobs, replicas[name].logprobs, strict=True)
    )
    print(f"log-probabilities of six requests together and of three and three: {apart:.2e} apart")
