"""CUDA graphs for every draft length: which ones vLLM's managers capture in each layout.

vLLM's configs and its graph manager are its own; nothing is captured.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.worker.gpu.cudagraph_utils as cudagraph_utils
from vllm.config import CUDAGraphMode, VllmConfig
from vllm.config import vllm as config_module
from vllm.platforms import current_platform

from pat_vllm.layout import Layout
from pat_vllm.patches import drafts as patches
from pat_vllm.start.setup import Setup
from pat_vllm.worker.layout_config import layout_config
from pat_vllm.worker.request_state import V1RequestStateTransfer
from tests.gpuless.replaced import replace
from tests.support.models import random_model

LONGEST = 5
LENGTHS = (0, 1, 2, 4, 5)
MAX_NUM_SEQS = 100
"""No size that vLLM captures without speculation, but for being the largest batch."""
NGRAM = {"method": "ngram_gpu", "num_speculative_tokens": LONGEST, "prompt_lookup_max": 3}
FULL, PIECEWISE = CUDAGraphMode.FULL, CUDAGraphMode.PIECEWISE


@pytest.fixture(scope="module", autouse=True)
def graph_managers() -> Iterator[None]:
    """Has vLLM's graph managers work on CPU, in configs for Model Runner V2."""
    import vllm.model_executor.models.registry as registry

    with pytest.MonkeyPatch.context() as patch:
        # vLLM looks at each new model class in a process of its own, which takes long.
        put = functools.partial(replace, put=patch.setattr)
        put(registry, "_run_in_subprocess", lambda fn: fn())
        put(config_module, "HAS_TRITON", True)
        alone = SimpleNamespace(is_first_rank=True, is_last_rank=True)
        put(cudagraph_utils, "get_pp_group", lambda: alone)
        put(type(current_platform), "get_global_graph_pool", lambda self: (0, 1))
        # Restored with the rest.
        lookup = cudagraph_utils.build_dynamic_sd_schedule_lookup
        put(cudagraph_utils, "build_dynamic_sd_schedule_lookup", lookup)
        runner: Any = SimpleNamespace(speculative_config=SimpleNamespace(**NGRAM), req_states=None)
        patches.take_every_draft_length(runner)
        patch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
        yield


def engine_config(
    speculative: dict[str, Any] | None = NGRAM,
    max_num_seqs: int = MAX_NUM_SEQS,
    **pat: Any,
) -> VllmConfig:
    """Of an engine with CUDA graphs, which vLLM's CPU platform does not allow by itself."""
    from vllm.engine.arg_utils import EngineArgs

    config = EngineArgs(
        model=str(random_model("qwen3")),
        tensor_parallel_size=4,
        distributed_executor_backend="pat",
        additional_config={"pat": {"policy": {"kind": "static", "tp": 1}, **pat}},
        speculative_config=speculative,
        dtype="float32",
        max_model_len=512,
        max_num_seqs=max_num_seqs,
    ).create_engine_config()
    config.model_config.enforce_eager = False
    compilation = config.compilation_config
    compilation.cudagraph_mode = CUDAGraphMode.FULL_AND_PIECEWISE
    compilation.cudagraph_capture_sizes = None  # type: ignore[assignment]
    compilation.max_cudagraph_capture_size = None  # type: ignore[assignment]
    config._set_cudagraph_sizes()
    return config


def manager_of(config: VllmConfig) -> Any:
    """vLLM's for Model Runner V2, as after its captures."""
    manager = cudagraph_utils.CudaGraphManager(
        config,
        torch.device("cpu"),
        config.compilation_config.cudagraph_mode,
        decode_query_len=config.uniform_decode_query_len,
    )
    manager._graphs_captured = True
    return manager


@functools.cache
def stock_manager(drafts: int, max_num_seqs: int) -> Any:
    """That of stock vLLM with a fixed draft length."""
    alone = {**NGRAM, "num_speculative_tokens": drafts} if drafts else None
    return manager_of(engine_config(alone, max_num_seqs))


def dispatched(manager: Any, batch: int, drafts: int) -> Any:
    """The graph of a step of requests that each verify so many drafts."""
    length = 1 + drafts
    return manager.dispatch(batch, batch * length, length, 0, max_query_len=length)


def check_every_length(engine: VllmConfig, largest: dict[int, int] | None = None) -> None:
    """A decode step has a graph, in each layout, where stock vLLM with this draft length alone has.

    Without drafts and with the longest it is no larger; in between, the batch may be padded more.

    Args:
        largest: by tp, the largest batch with which the layout is entered.
    """
    for layout in Setup.of(engine).layouts:
        tp, config = layout.tp, layout_config(engine, Setup.of(engine), layout)
        manager, max_num_seqs = manager_of(config), config.scheduler_config.max_num_seqs
        for drafts in LENGTHS:
            stock = stock_manager(drafts, max_num_seqs)
            for batch in range(1, (largest or {}).get(tp, max_num_seqs) + 1):
                wanted, got = (
                    dispatched(dispatcher, batch, drafts) for dispatcher in (stock, manager)
                )
                seen = f"tp={tp}: {batch} requests with {drafts} drafts: {got}, not {wanted}"
                # No graph is larger than vLLM's limit.
                assert wanted.cg_mode == FULL or batch * (1 + drafts) > 480
                assert got.cg_mode.value >= wanted.cg_mode.value, seen
                if wanted.cg_mode == FULL:
                    assert got.uniform_token_count == 1 + drafts, seen
                    assert got.num_reqs < batch + 16, seen
                if wanted.cg_mode == FULL and drafts in (0, LONGEST):
                    assert got.num_tokens <= wanted.num_tokens, seen


def test_every_draft_length_has_graphs_in_every_layout() -> None:
    """At most twice the full graphs of stock vLLM with no drafts and the most."""
    engine = engine_config()
    assert engine.speculative_config is not None
    assert Setup.of(engine).draft_lengths == LENGTHS
    check_every_length(engine)
    for layout in Setup.of(engine).layouts:
        config = layout_config(engine, Setup.of(engine), layout)
        most = config.scheduler_config.max_num_seqs
        stock = [stock_manager(drafts, most)._capture_descs[FULL] for drafts in (0, LONGEST)]
        assert len(manager_of(config)._capture_descs[FULL]) <= 2 * sum(map(len, stock))


@pytest.mark.parametrize("max_num_seqs", [1, 3])
def test_fewer_requests_than_draft_lengths(max_num_seqs: int) -> None:
    check_every_length(engine_config(max_num_seqs=max_num_seqs))


def test_layouts_that_are_entered_with_few_requests() -> None:
    """They capture graphs for those."""
    engine = engine_config(policy={"kind": "schedule", "switch_at": {"20": 2, "3": 4}})
    check_every_length(engine, {2: 20, 4: 3})
    narrow, wide = (
        layout_config(engine, Setup.of(engine), Layout.of(tp, 4)).compilation_config
        for tp in (2, 4)
    )
    assert narrow.max_cudagraph_capture_size < 20 * (1 + LONGEST) + 16
    assert wide.max_cudagraph_capture_size < 3 * (1 + LONGEST) + 16


def test_a_layout_speculates_with_its_own_tp() -> None:
    engine = engine_config()
    configs = [
        layout_config(engine, Setup.of(engine), layout) for layout in Setup.of(engine).layouts
    ]
    assert engine.speculative_config is not None
    for config in configs:
        own = config.speculative_config
        assert own is not None
        for parallel in (own.target_parallel_config, own.draft_parallel_config):
            assert parallel is config.parallel_config, config.parallel_config.tensor_parallel_size
        assert own.uses_dynamic_speculative_decoding()
    assert len({id(config.speculative_config) for config in configs}) == len(configs)
    stock = engine.speculative_config
    assert not stock.uses_dynamic_speculative_decoding(), "the engine's is changed"
    assert stock.target_parallel_config.tensor_parallel_size == 4


def test_model_runner_v1_has_graphs_of_pieces_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As vLLM chooses where the draft length changes."""
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
    engine = engine_config({**NGRAM, "method": "ngram"})
    stock = engine.compilation_config
    for layout in Setup.of(engine).layouts:
        compilation = layout_config(engine, Setup.of(engine), layout).compilation_config
        assert compilation.cudagraph_mode == PIECEWISE
        assert compilation.cudagraph_capture_sizes == stock.cudagraph_capture_sizes
    assert stock.cudagraph_mode == CUDAGraphMode.FULL_AND_PIECEWISE


def test_the_tokens_of_model_runner_v1_on_the_device_are_there_once() -> None:
    """Whichever layout has room for more requests."""
    state_transfer: Any = V1RequestStateTransfer()
    text: dict[str, Any] = {"get_model": lambda: None, "speculative_config": None}
    for order in ((4, 2), (2, 4)):
        tokens = [torch.zeros(n, 8) for n in order]
        host, other = (SimpleNamespace(token_ids_gpu_tensor=own, **text) for own in tokens)
        state_transfer.share(host, other)
        shared = [runner.token_ids_gpu_tensor for runner in (host, other)]
        assert [len(tokens) for tokens in shared] == [*order]
        assert shared[0].data_ptr() == shared[1].data_ptr()
    state_transfer.share(SimpleNamespace(**text), other := SimpleNamespace(**text))
    assert vars(other) == text, "a drafter on the host has none"
