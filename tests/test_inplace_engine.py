"""Engines whose layouts share one copy of the weights."""

from __future__ import annotations

from typing import Any

import pytest

import pat_vllm
from tests.engines import engine

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


@pytest.mark.parametrize("model", ["qwen3", "qwen3_tied"])
def test_the_layouts_take_the_memory_of_one(model: str) -> None:
    with engine(model, 4, {"weights": "inplace"}) as llm:
        for tp in (1, 4, 2):
            pat_vllm.switch(llm, tp=tp)
            for every, base in llm.collective_rpc(weight_bytes):
                print(f"tp={tp}: weights of all layouts / base layout's: {every / base:.4f}")
                assert base > 100_000
                assert every <= 1.02 * base
