"""An engine on CPU allocates what `pat_vllm.memory` computes: weights, KV, staging, buffers.

Counted are the storages of all tensors that a worker's model runners hold. Model Runner V2 runs in
Triton's interpreter, which vLLM looks for at import: its engine is in a process of its own
(`python -m tests.test_engine_memory OUT`).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest

from pat_vllm.kv_transfer.plan import ROUNDS
from pat_vllm.layout import Layout
from pat_vllm.memory import buffers
from pat_vllm.memory.buffers import EngineShape, all_buffers
from pat_vllm.memory.model import ModelShape
from pat_vllm.memory.sizing import staged_share
from tests.engines import engine
from tests.models import random_model
from tests.support.child import Child
from tests.support.mutation import mutated

pytestmark = pytest.mark.slow

MODEL = "qwen3"
RANKS = 2
LAYOUTS = tuple(Layout.of(tp, RANKS) for tp in (1, 2))
OPTIONS: dict[str, Any] = {
    "max_num_seqs": 48,
    "max_num_batched_tokens": 1536,
    "max_model_len": 1024,
    "block_size": 32,
}
TOLERANCE = 0.003
"""Of the bytes that are computed; small tensors are not in the arithmetic."""
SUPPORT = Path(__file__).parent / "support" / "v2_on_cpu"


# ---------------------------------------------------------------- in a worker


def allocated(worker: Any) -> dict[str, Any]:
    """Bytes of a rank; by layout, base first, those that no layout before has."""
    seen: set[int] = {worker._buffer.buffer.untyped_storage().data_ptr()}
    weights, runners, largest = [], [], []
    for runtime in worker._runtimes.values():
        model = runtime.runner.get_model()
        weights.append(sum(_new([*model.parameters(), *model.buffers()], seen).values()))
    for runtime in worker._runtimes.values():
        found = dict(_tensors(runtime.runner))
        new = _new(found.values(), seen)
        runners.append(sum(new.values()))
        names = {t.untyped_storage().data_ptr(): name for name, t in found.items()}
        by_size = sorted(new, key=lambda at: -new[at])
        largest.append({names[at]: new[at] for at in by_size})
    return {
        "kv": worker._buffer.buffer.nbytes,
        "blocks": [one.kv_cache_config.num_blocks for one in worker._runtimes.values()],
        "weights": weights,
        "runners": runners,
        "largest": largest,
        "staged": _staged_by_a_full_switch(worker),
    }


def _new(tensors: Any, seen: set[int]) -> dict[int, int]:
    """Bytes of the storages that were not seen before."""
    found: dict[int, int] = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            found[storage.data_ptr()] = storage.nbytes()
    seen.update(found)
    return found


def _tensors(runner: Any) -> Iterator[tuple[str, Any]]:
    """All tensors that a model runner leads to, but for those of its model and its config."""
    import numpy as np
    import torch
    from torch import nn

    passed: set[int] = set()
    waiting: list[tuple[str, Any]] = [("runner", runner)]
    while waiting:
        name, one = waiting.pop()
        if id(one) in passed or isinstance(one, nn.Module | np.ndarray | str | bytes):
            continue
        passed.add(id(one))
        kind = type(one)
        if isinstance(one, torch.Tensor):
            yield name, one
        elif isinstance(one, Mapping):
            waiting += [(f"{name}[{key!r}]", value) for key, value in one.items()]
        elif isinstance(one, list | tuple | set | frozenset):
            waiting += [(f"{name}[{i}]", value) for i, value in enumerate(one)]
        elif kind.__module__.startswith("vllm.v1") and hasattr(one, "__dict__"):
            waiting += [(f"{name}.{key}", value) for key, value in vars(one).items()]


def _staged_by_a_full_switch(worker: Any) -> int:
    """Bytes that a switch of all KV from the base layout to the widest stages. Collective."""
    from pat_vllm.kv_transfer.plan import RequestBlocks, plan_moves

    source, *_, target = worker._runtimes.values()
    blocks = source.kv_cache_config.num_blocks
    requests = [
        RequestBlocks(
            f"of replica {replica}",
            replica,
            tuple(range(blocks)),
            0,
            tuple(range(replica * blocks, (replica + 1) * blocks)),
        )
        for replica in range(source.layout.replicas)
    ]
    heads = worker.vllm_config.model_config.get_total_num_kv_heads()
    worker._move_kv(source, target, plan_moves(source.layout, target.layout, heads, requests))
    size: int = worker._exchange._transport._own.size
    return size


def start(weights: str) -> AbstractContextManager[Any]:
    """An engine whose weights vLLM does not pack for its CPU kernels."""
    options = OPTIONS | {"kv_cache_memory_bytes": 24 << 20}
    plain = "tests.support.weight_updates.WeightUpdates"
    return engine(MODEL, RANKS, {"weights": weights}, worker_extension_cls=plain, **options)


def main(out: str) -> None:
    """An engine with Model Runner V2."""
    print("V2: the engine starts", flush=True)
    with start("inplace") as llm:
        assert llm.llm_engine.vllm_config.use_v2_model_runner
        Path(out).write_text(json.dumps(llm.collective_rpc(allocated)))
    print("V2: done", flush=True)


# ---------------------------------------------------------------- in the process of the tests


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What the ranks of an engine have allocated, by model runner."""
    folder = tmp_path_factory.mktemp("memory")
    root, out = Path(__file__).parents[1], folder / "v2.json"
    environment = os.environ | {
        "VLLM_USE_V2_MODEL_RUNNER": "1",
        "TRITON_INTERPRET": "1",
        "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(root), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, "-m", "tests.test_engine_memory", str(out)]
    child = Child(command, folder / "log", cwd=root, env=environment)
    try:
        with start("materialized") as llm:
            assert not llm.llm_engine.vllm_config.use_v2_model_runner
            results = {"V1, materialized": llm.collective_rpc(allocated)}
        assert child.wait() == 0, child.tail()
        results["V2, inplace"] = json.loads(out.read_text())
        yield results
    finally:
        child.kill()


CASES = ("V1, materialized", "V2, inplace")


def shapes(case: str) -> tuple[ModelShape, EngineShape]:
    config = json.loads((random_model(MODEL) / "config.json").read_text())
    runner, weights = case.split(", ")
    options: Any = {"runner": runner, "weights": weights, "attention": "CPU_ATTN"}
    return ModelShape.from_config(config, dtype_bytes=4), EngineShape(LAYOUTS, **OPTIONS, **options)


def check_weights(case: str, found: dict[str, Any]) -> None:
    """Of each layout, those that no layout before has."""
    model, shape = shapes(case)
    tables = [model.rotary_bytes, 0]
    expected = [model.weight_bytes(layout.tp) for layout in shape.layouts]
    if shape.weights == "inplace":
        expected[1:] = [0]
    for rank in found[case]:
        for a, b, table in zip(rank["weights"], expected, tables, strict=True):
            # A layer has scales of its own, a few bytes.
            assert a == pytest.approx(b + table, rel=TOLERANCE, abs=1024)


def check_kv(case: str, found: dict[str, Any]) -> None:
    """The blocks of each layout take all of the buffer."""
    model, shape = shapes(case)
    for rank in found[case]:
        for layout, blocks in zip(shape.layouts, rank["blocks"], strict=True):
            per_block = shape.block_size * model.kv_bytes_per_token(layout.tp)
            assert rank["kv"] == blocks * per_block


def check_staging(case: str, found: dict[str, Any]) -> None:
    """Ranks that share memory stage what is sent: a layer, when all of it moves."""
    model, shape = shapes(case)
    share = staged_share(shape.layouts, model.kv_heads, model.layers)
    rounds = 2 / ROUNDS / model.layers
    for rank in found[case]:
        assert rank["staged"] == pytest.approx(rank["kv"] * (share - rounds), rel=TOLERANCE)


def check_buffers(case: str, found: dict[str, Any]) -> None:
    """Of each layout's model runner, those that no layout before has."""
    model, shape = shapes(case)
    expected = [sum(one.on_cpu for one in made) for made in all_buffers(model, shape)]
    for rank in found[case]:
        for a, b, largest in zip(rank["runners"], expected, rank["largest"], strict=True):
            assert a == pytest.approx(b, rel=TOLERANCE), largest


CHECKS = (check_weights, check_kv, check_staging, check_buffers)
Check = Callable[[str, dict[str, Any]], None]


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("check", CHECKS)
def test_an_engine_allocates_what_is_computed(
    found: dict[str, Any], check: Check, case: str
) -> None:
    check(case, found)


MISTAKES: dict[str, tuple[Check, str, Callable[..., Any], dict[str, str]]] = {
    "embeddings are forgotten": (
        check_weights,
        "V2, inplace",
        ModelShape.weight_bytes,
        {"(of_all + outside)": "of_all"},
    ),
    "weights have two bytes": (
        check_weights,
        "V1, materialized",
        ModelShape.weight_bytes,
        {"* self.dtype_bytes": "* 2"},
    ),
    "KV has two bytes": (
        check_kv,
        "V1, materialized",
        ModelShape.kv_bytes_per_token,
        {"* self.kv_dtype_bytes": "* 2"},
    ),
    "two layers are sent": (
        check_staging,
        "V2, inplace",
        staged_share,
        {"max(1,": "max(2,"},
    ),
    "block tables are forgotten, V2": (
        check_buffers,
        "V2, inplace",
        buffers._v2_buffers,
        {'made.staged("block tables", width, with_kv=True),': ""},
    ),
    "biases are forgotten, V2": (
        check_buffers,
        "V2, inplace",
        buffers._v2_buffers,
        {"count=3)": "count=2)"},
    ),
    "a shared buffer for each layout, V2": (
        check_buffers,
        "V2, inplace",
        all_buffers,
        {"if not one.shared": ""},
    ),
    "a shared buffer for each layout, V1": (
        check_buffers,
        "V1, materialized",
        all_buffers,
        {"if not one.shared": ""},
    ),
    "slots are forgotten, V1": (
        check_buffers,
        "V1, materialized",
        buffers._v1_buffers,
        {'_mirrored("slots", 8 * tokens),': ""},
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_seen(found: dict[str, Any], mistake: str) -> None:
    check, case, function, changes = MISTAKES[mistake]
    with mutated(function, changes), pytest.raises(AssertionError):
        check(case, found)


if __name__ == "__main__":
    main(*sys.argv[1:])
