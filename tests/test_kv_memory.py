"""What the layouts need beside the KV cache is there, and no more is kept free."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.worker.gpu_worker import Worker

from pat_vllm.executor.gpu_worker import PATGPUWorker
from pat_vllm.executor.kv_memory import Measured, kv_cache_bytes
from pat_vllm.layout import Layout

GB = 10**9


@st.composite
def measurements(draw: st.DrawFn) -> list[Measured]:
    sizes = st.integers(0, 8 * GB)
    one = st.builds(Measured, st.integers(40 * GB, 100 * GB), sizes, sizes)
    return draw(st.lists(one, min_size=1, max_size=4))


@given(measurements(), st.integers(1, 100), st.integers(1, 4))
def test_every_layout_and_every_switch_have_room(
    layouts: list[Measured], num_layers: int, copies_sent: int
) -> None:
    kv = kv_cache_bytes(layouts, num_layers, copies_sent)
    graphs = sum(one.graphs for one in layouts)
    staging = kv * (1 + copies_sent) / num_layers if len(layouts) > 1 else 0
    lacking = max(0, staging - max(one.activations for one in layouts))
    spare = [one.available + one.graphs - graphs - lacking - kv for one in layouts]
    assert -1000 < min(spare) < 1000  # bytes


def test_one_layout_is_as_vllm_has_it() -> None:
    assert kv_cache_bytes([Measured(50 * GB, GB, 0)], num_layers=1, copies_sent=2) == 50 * GB


@pytest.mark.parametrize("given_bytes", [None, 7 * GB])
def test_each_layout_is_measured_in_turn(
    monkeypatch: pytest.MonkeyPatch, given_bytes: int | None
) -> None:
    """On the worker itself, with numbers in place of a GPU."""
    found = {1: (60 * GB, 2 * GB, 3 * GB), 2: (61 * GB, GB, 2 * GB), 4: (62 * GB, GB, 2 * GB)}
    entered: list[int] = []

    def measure(worker: Any) -> int:
        if given_bytes:
            return given_bytes
        available, worker.cudagraph_memory_estimate, activations = found[entered[-1]]
        worker.peak_activation_memory = activations + worker.cudagraph_memory_estimate
        return available

    monkeypatch.setattr(Worker, "determine_available_memory", measure)
    worker: Any = PATGPUWorker.__new__(PATGPUWorker)
    worker._runtimes = {Layout.of(tp, 4): SimpleNamespace(tp=tp) for tp in found}
    worker._enter = lambda runtime: entered.append(runtime.tp)
    worker.cache_config = SimpleNamespace(kv_cache_memory_bytes=given_bytes)
    worker.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 2)
    )
    worker.model_runner = SimpleNamespace(get_kv_cache_spec=lambda: dict.fromkeys(range(30)))
    expected = kv_cache_bytes([Measured(*one) for one in found.values()], 30, 2)
    assert worker.determine_available_memory() == (given_bytes or expected)
    assert entered == [4, 2, 1]
