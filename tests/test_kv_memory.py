"""What the layouts need beside the KV cache is there, and no more is kept free."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from vllm.v1.worker.gpu_worker import Worker

from pat_vllm.kv_transfer.kv_memory import Measured, kv_cache_bytes
from pat_vllm.layout import Layout
from pat_vllm.worker.gpu_worker import PATGPUWorker

GB = 10**9


@st.composite
def devices(draw: st.DrawFn) -> tuple[int, list[Measured]]:
    """Memory that is free in the end, and what was measured while layouts took some of it."""
    sizes = st.integers(0, 8 * GB)
    free = draw(st.integers(80 * GB, 200 * GB))
    layouts: list[Measured] = []
    taken_later = 0
    for _ in range(draw(st.integers(1, 4))):
        graphs, activations = draw(sizes), draw(sizes)
        available = free + taken_later - graphs - activations
        layouts.insert(0, Measured(available, graphs, activations))
        taken_later += draw(sizes)
    return free, layouts


@given(devices(), st.floats(0, 3))
def test_steps_and_switches_have_room_and_nothing_else_is_kept_free(
    device: tuple[int, list[Measured]], staged: float
) -> None:
    free, layouts = device
    kv = kv_cache_bytes(layouts, staged)
    left = free - sum(one.graphs for one in layouts) - kv
    assert -1000 < left - max(kv * staged, *(one.activations for one in layouts), 0) < 1000


def test_one_layout_is_as_vllm_has_it() -> None:
    assert kv_cache_bytes([Measured(50 * GB, GB, 0)], staged=0) == 50 * GB


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
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: 2), additional_config={}
    )
    worker.model_runner = SimpleNamespace(get_kv_cache_spec=lambda: dict.fromkeys(range(30)))
    expected = kv_cache_bytes([Measured(*one) for one in reversed(found.values())], 3 / 30)
    assert worker.determine_available_memory() == (given_bytes or expected)
    assert entered == [4, 2, 1]
