"""What layouts have in common on a device and in pinned memory, and what workers do as one."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu import buffer_utils, states
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from pat_vllm.executor.messages import SwitchCommand
from pat_vllm.layout import Layout
from pat_vllm.patches.runners import input_embeddings_of, token_ids_of
from pat_vllm.worker.cpu_worker import PATCPUWorker
from pat_vllm.worker.request_state import (
    V1RequestStateTransfer,
    V2RequestStateTransfer,
    gather_states,
)
from pat_vllm.worker.runtime import largest_first
from tests.gpuless.replaced import replace

RANKS = 8
LAYOUTS = tuple(Layout.of(tp, RANKS) for tp in (1, 2, 4, 8))
MAX_NUM_SEQS, MAX_MODEL_LEN = 4, 1 << 12


def request_states(max_num_reqs: int = MAX_NUM_SEQS) -> Any:
    """Those of vLLM's Model Runner V2."""
    return states.RequestState(
        max_num_reqs=max_num_reqs,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=16,
        num_speculative_steps=0,
        vocab_size=8,
        device=torch.device("cpu"),
    )


def test_layouts_share_the_pinned_memory_of_token_ids(monkeypatch: pytest.MonkeyPatch) -> None:
    class Buffer:
        def __init__(self, size: int | Sequence[int], dtype: torch.dtype) -> None:
            self.cpu = torch.zeros(size, dtype=dtype)
            self.np = self.cpu.numpy()

        def uva(self, n: int | None = None) -> torch.Tensor:
            return self.cpu[:n]

    replace(buffer_utils, "UvaBuffer", Buffer, monkeypatch.setattr)
    replace(buffer_utils, "is_uva_available", lambda: True, monkeypatch.setattr)
    host: Any = SimpleNamespace(req_states=request_states())
    shared = host.req_states.all_token_ids
    with token_ids_of(host):
        fewer, more = request_states(MAX_NUM_SEQS // 2), request_states(MAX_NUM_SEQS + 1)
    ids = fewer.all_token_ids
    assert ids.gpu.shape == (ids.num_rows, MAX_MODEL_LEN) == (MAX_NUM_SEQS // 2, MAX_MODEL_LEN)
    assert ids.gpu.data_ptr() == shared.gpu.data_ptr()
    assert ids._staged_write_indices is shared._staged_write_indices
    others = {shared.gpu.data_ptr(), host.req_states.total_len.gpu.data_ptr()}
    assert fewer.total_len.gpu.data_ptr() not in others
    assert more.all_token_ids.gpu.data_ptr() != shared.gpu.data_ptr()
    for no_runner_v2 in (None, SimpleNamespace()):
        with token_ids_of(no_runner_v2):  # type: ignore[arg-type]
            assert request_states().all_token_ids.gpu.data_ptr() != shared.gpu.data_ptr()


@pytest.mark.parametrize("use_v2, order", [(True, [2, 1, 0]), (False, [1, 0, 2])])
def test_the_layout_with_most_rows_is_the_host(use_v2: bool, order: list[int]) -> None:
    """Requests with Model Runner V2, tokens of a step with V1."""
    runtimes: list[Any] = []
    for seqs, tokens in ((4, 32), (8, 64), (12, 16)):
        limits = SimpleNamespace(max_num_seqs=seqs, max_num_batched_tokens=tokens)
        config = SimpleNamespace(scheduler_config=limits, use_v2_model_runner=use_v2)
        runtimes.append(SimpleNamespace(config=config))
    assert largest_first(runtimes) == [runtimes[i] for i in order]


class RunnerV1:
    """Of a Model Runner V1 what makes its buffers."""

    device = torch.device("cpu")

    def __init__(self, tokens: int = 32) -> None:
        make = functools.partial(GPUModelRunner._make_buffer, self)  # type: ignore[arg-type]
        self.max_num_tokens = tokens
        self.inputs_embeds = make(tokens, 8, dtype=torch.bfloat16, numpy=False)
        self.others = [
            make(tokens, 8, dtype=torch.float32, numpy=False),
            make(4, 8, dtype=torch.bfloat16, numpy=False),
            make(tokens, dtype=torch.int32),
        ]


def test_layouts_share_input_embeddings() -> None:
    """And nothing else that is like them."""
    host: Any = RunnerV1()

    def shared(buffer: Any) -> bool:
        pairs = [
            (embeds.cpu.data_ptr(), embeds.gpu.data_ptr())
            for embeds in (buffer, host.inputs_embeds)
        ]
        return pairs[0] == pairs[1]

    for tokens in (32, 16, 64):
        with input_embeddings_of(host):
            derived = RunnerV1(tokens)
        assert shared(derived.inputs_embeds) == (tokens <= 32)
        assert derived.inputs_embeds.cpu.shape == derived.inputs_embeds.gpu.shape == (tokens, 8)
        assert not any(map(shared, derived.others))
    for no_runner_v1 in (None, SimpleNamespace(req_states=None)):
        with input_embeddings_of(no_runner_v1):  # type: ignore[arg-type]
            assert not shared(RunnerV1().inputs_embeds)


def test_states_are_gathered_by_all_ranks_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """V2's runners have nothing to give."""
    gathering: list[int] = []
    command = SwitchCommand(1, LAYOUTS[1], LAYOUTS[0], placement={"request": 0})
    monkeypatch.setattr(
        torch.distributed, "all_gather_object", lambda into, own, group: gathering.append(group)
    )
    for state_transfer, expected in (
        (V1RequestStateTransfer(), list(range(RANKS))),
        (V2RequestStateTransfer(), []),
    ):
        gathering.clear()
        for rank in range(RANKS):
            runner: Any = SimpleNamespace(requests={})
            group: Any = rank
            assert gather_states(state_transfer, runner, command, rank, group) == {}
        assert gathering == expected


@pytest.mark.parametrize("given_bytes", [None, 7 << 30])
def test_on_cpu_a_switch_has_room(monkeypatch: pytest.MonkeyPatch, given_bytes: int | None) -> None:
    free, num_layers = 60 << 30, 32
    given = given_bytes or free
    replace(CPUWorker, "determine_available_memory", lambda worker: given, monkeypatch.setattr)
    worker: Any = PATCPUWorker.__new__(PATCPUWorker)
    runner = SimpleNamespace(get_kv_cache_spec=lambda: dict.fromkeys(range(num_layers)))
    model = SimpleNamespace(get_total_num_kv_heads=lambda: 8)
    config = SimpleNamespace(additional_config={}, model_config=model)
    worker._runtimes = {
        layout: SimpleNamespace(config=config, runner=runner, layout=layout) for layout in LAYOUTS
    }
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=given_bytes)
    kv = worker.determine_available_memory()
    staged = (1 + 1 / 16) / num_layers  # a layer that is sent, and a round of one both ways
    assert kv == given_bytes or kv * (1 + staged) == pytest.approx(free)
