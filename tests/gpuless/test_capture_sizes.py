"""For which batch sizes a layout captures CUDA graphs: those of stock vLLM with its limits."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.config import CompilationConfig, CUDAGraphMode, SpeculativeConfig, VllmConfig

from pat_vllm.config import PATConfig
from pat_vllm.modelled.gpus import GPUS
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.start.buffers import EngineShape
from pat_vllm.start.choice import choose
from pat_vllm.start.load import Load
from pat_vllm.start.setup import Setup
from pat_vllm.worker.layout_config import layout_config
from tests.unit.start.test_choice import QWEN3_8B


def engine_config(seqs: int, tokens: int, chosen: dict[str, Any], **pat: Any) -> Any:
    """An engine of eight ranks whose graphs vLLM has chosen, or a user: `chosen`."""
    config: Any = VllmConfig(additional_config={"pat": pat})
    parallel, scheduler = config.parallel_config, config.scheduler_config
    parallel.tensor_parallel_size = parallel.world_size = 8
    scheduler.max_num_seqs, scheduler.max_num_batched_tokens = seqs, tokens
    config.model_config = SimpleNamespace(enforce_eager=False)
    config.compilation_config = CompilationConfig(
        cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE, **chosen
    )
    config._set_cudagraph_sizes()
    return config


def sizes_of(config: Any) -> tuple[list[int], int]:
    compilation = config.compilation_config
    return compilation.cudagraph_capture_sizes, compilation.max_cudagraph_capture_size


def largest_sizes(engine: Any) -> dict[int, int]:
    """By tp."""
    return {
        layout.tp: sizes_of(layout_config(engine, Setup.of(engine), layout))[1]
        for layout in Setup.of(engine).layouts
    }


def test_sizes_are_those_of_stock_vllm() -> None:
    for seqs, tokens in ((3, 64), (16, 512), (100, 8192), (256, 8192), (1024, 16384)):
        engine = engine_config(seqs, tokens, {})
        before = copy.deepcopy(sizes_of(engine))
        for layout in Setup.of(engine).layouts:
            limits = Setup.of(engine).limits[layout.tp]
            stock = engine_config(limits.max_num_seqs, limits.max_num_batched_tokens, {})
            assert sizes_of(layout_config(engine, Setup.of(engine), layout)) == sizes_of(stock)
        assert sizes_of(engine) == before
    assert largest_sizes(engine_config(16, 512, {})) == {1: 32, 2: 64, 4: 128, 8: 256}


@pytest.mark.parametrize("model", [QWEN3_8B, MODEL_SHAPES["qwen3-30b-a3b"]], ids=["8B", "30B-A3B"])
def test_a_default_start_costs_little_more_than_stock(model: dict[str, Any]) -> None:
    """Captured graphs and compiled ranges of 8 H100s, beside stock vLLM's tp=8."""
    for seqs, tokens in ((1024, 16384), (256, 8192)):
        shape = EngineShape(
            (), max_num_seqs=seqs, max_num_batched_tokens=tokens, max_model_len=40960
        )
        load = Load.usual(seqs, 8, shape.max_model_len)
        choice = choose(model, PATConfig(), shape, 8, GPUS["H100"].device, load=load)
        engine = engine_config(seqs, tokens, {}, **choice.options | {"experts": "auto"})
        kept = Setup.of(engine).layouts
        limits = Setup.of(engine).limits[kept[-1].tp]
        stock = engine_config(limits.max_num_seqs, limits.max_num_batched_tokens, {})
        captured = [
            len(sizes_of(layout_config(engine, Setup.of(engine), layout))[0]) for layout in kept
        ]
        assert sum(captured) <= 2.5 * len(sizes_of(stock)[0])
        assert sum(1 if layout.tp == 1 else 2 for layout in kept) <= 2.5 * 2


def test_a_users_sizes_stay() -> None:
    for chosen in ({"cudagraph_capture_sizes": [1, 2, 4, 24]}, {"max_cudagraph_capture_size": 8}):
        engine = engine_config(16, 512, chosen)
        for layout in Setup.of(engine).layouts:
            assert sizes_of(layout_config(engine, Setup.of(engine), layout)) == sizes_of(engine)


def test_no_graphs_for_batches_that_a_layout_does_not_see() -> None:
    policy = {"kind": "schedule", "switch_at": {"70": 2, "8": 8}}
    engine = engine_config(16, 512, {}, policy=policy)
    assert largest_sizes(engine) == {1: 32, 2: 64, 4: 128, 8: 8}


def test_a_request_takes_a_token_for_each_draft() -> None:
    policy = {"kind": "schedule", "switch_at": {"5": 8}}
    engine = engine_config(16, 512, {}, policy=policy)
    drafts = engine.speculative_config = SpeculativeConfig.__new__(SpeculativeConfig)
    vars(drafts).update(
        method="ngram", num_speculative_tokens=3, num_speculative_tokens_per_batch_size=None
    )
    engine.compilation_config.cudagraph_capture_sizes = None
    engine.compilation_config.max_cudagraph_capture_size = None
    engine._set_cudagraph_sizes()
    assert largest_sizes(engine) == {1: 128, 2: 256, 4: 512, 8: 24}, "5 requests of 4 tokens"


def test_limits_are_the_layouts_own() -> None:
    engine = engine_config(16, 512, {})
    scheduler = engine.scheduler_config
    scheduler.max_num_active_seqs, scheduler.max_num_scheduled_tokens = 10, 512
    before = copy.deepcopy(scheduler)
    for layout in Setup.of(engine).layouts:
        limits = layout_config(engine, Setup.of(engine), layout).scheduler_config
        assert limits is not scheduler
        assert (limits.max_num_seqs, limits.max_num_active_seqs) == (16 * layout.tp, 10 * layout.tp)
        assert limits.max_num_batched_tokens == limits.max_num_scheduled_tokens == 512 * layout.tp
    assert scheduler == before
    for layout in Setup.of(engine).layouts:
        engine.additional_config["pat"] = {"limits_per": "replica"}
        assert layout_config(engine, Setup.of(engine), layout).scheduler_config == before
