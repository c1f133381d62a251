"""Patches: applied twice they do no harm, and the originals come back."""

from __future__ import annotations

import gc
import threading
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import vllm.v1.engine.core_client as core_client
import vllm.v1.engine.utils as engine_cores
import zmq
from torch import nn

from pat_vllm.patches import front_end, runners, schedulers, weights


def test_a_method_is_replaced_once_and_kept() -> None:
    calls: list[str] = []

    class Executor:
        @staticmethod
        def get_class(vllm_config: Any) -> type:
            return dict

    def resolve(vllm_config: Any, original: Any) -> type:
        calls.append(vllm_config)
        return original(vllm_config)  # type: ignore[no-any-return]

    stock = Executor.get_class
    for _ in range(2):
        front_end.patch_get_class(Executor, resolve)
    assert Executor.get_class("a config") is dict
    assert Executor().get_class("from an instance") is dict
    assert calls == ["a config", "from an instance"], "resolved once per call"
    assert Executor.get_class.__wrapped__ is stock  # type: ignore[attr-defined]


# -------------------------------------------------------------------- the front end


def test_engine_cores_have_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM kills them after 5 s, those of a server at once, before they have removed what their
    workers leave."""
    asked = []
    monkeypatch.setattr(
        engine_cores, "shutdown", lambda processes, timeout=None: asked.append(timeout)
    )
    front_end.let_engine_cores_end()
    engine_cores.shutdown([])
    for timeout in (0.0, 60.0):
        engine_cores.shutdown([], timeout=timeout)
    assert asked == [front_end.ENDS_WITHIN, front_end.ENDS_WITHIN, 60.0]


def test_an_interrupt_ends_the_start_of_an_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM takes it for the end of the wait for the engine core, and waits on."""
    monkeypatch.setattr(engine_cores, "zmq_socket_ctx", engine_cores.zmq_socket_ctx)
    front_end.interrupt_starts()
    with (
        pytest.raises(KeyboardInterrupt),
        engine_cores.zmq_socket_ctx("inproc://handshake", zmq.ROUTER, bind=True) as opened,
    ):
        assert not opened.closed
        raise KeyboardInterrupt
    assert opened.closed


def test_sends_of_two_threads_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most = [0], [0]
    together = threading.Barrier(3)

    class Client:
        def _send_input(self, request: str) -> str:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            # Without the lock, the other threads come in here.
            threading.Event().wait(0.05)
            inside[0] -= 1
            return request

    def send(client: Client) -> None:
        together.wait(60)
        assert client._send_input("abort") == "abort"

    monkeypatch.setattr(core_client, "SyncMPClient", Client)
    front_end.serialize_sends()
    client = Client()
    threads = [threading.Thread(target=send, args=(client,)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert most == [1]


def test_a_client_whose_sends_are_locked_goes_with_its_llm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its end is that of the engine, whose devices the next one may want."""

    class Client:
        def _send_input(self) -> None: ...

    monkeypatch.setattr(core_client, "SyncMPClient", Client)
    front_end.serialize_sends()
    gc.disable()
    try:
        client = Client()
        client._send_input()
        gone = weakref.ref(client)
        del client
        assert gone() is None
    finally:
        gc.enable()


# -------------------------------------------------------------------- schedulers


def test_admission_counts_each_load_once_and_gives_them_back() -> None:
    asked: list[str] = []

    class Scheduler:
        def __init__(self) -> None:
            self._inflight_prefills = {"a", "b"}
            self.kv_cache_manager = SimpleNamespace(block_pool=SimpleNamespace(enable_caching=True))

        def _request_remaining_blocks(self, request: str) -> int:
            asked.append(request)
            return 5

        def _inflight_prefill_reserved_blocks(self) -> int:
            return -1

    scheduler: Any = Scheduler()
    pool = scheduler.kv_cache_manager.block_pool
    with schedulers.linear_time_admission(scheduler), schedulers.linear_time_admission(scheduler):
        assert not pool.enable_caching
        assert scheduler._inflight_prefill_reserved_blocks() == 10
        scheduler._inflight_prefills.add("c")
        assert scheduler._inflight_prefill_reserved_blocks() == 15
    assert sorted(asked) == ["a", "b", "c"]
    assert scheduler._inflight_prefills == {"a", "b", "c"}
    assert scheduler._inflight_prefill_reserved_blocks() == -1
    assert pool.enable_caching


# -------------------------------------------------------------------- workers


def test_weights_are_refused_where_the_model_is_asked_itself() -> None:
    class Model(nn.Module):
        def load_weights(self, weights: Any) -> str:
            return "loaded"

    def refuse(*args: Any) -> None:
        raise RuntimeError("cannot be updated")

    model: Any = Model()
    for _ in range(2):
        weights.refuse_load_weights(model, refuse)
    with pytest.raises(RuntimeError, match="cannot be updated"):
        model.load_weights([])
    assert model.load_weights.__wrapped__([]) == "loaded"
    assert Model().load_weights([]) == "loaded", "other models are as they were"


def test_a_narrower_layout_uses_the_first_rows_of_counters_and_bitmasks() -> None:
    def runner(rows: int) -> Any:
        counts = torch.zeros(rows, 5, dtype=torch.int32)
        return SimpleNamespace(
            sampler=SimpleNamespace(
                penalties_state=SimpleNamespace(
                    output_bin_counts=counts, prompt_bin_mask=counts.clone()
                )
            ),
            structured_outputs_worker=SimpleNamespace(grammar_bitmask=counts.clone()),
        )

    def buffers(runner: Any) -> list[torch.Tensor]:
        state = runner.sampler.penalties_state
        bitmask = runner.structured_outputs_worker.grammar_bitmask
        return [state.output_bin_counts, state.prompt_bin_mask, bitmask]

    host, other = runner(8), runner(2)
    runners.share_penalty_counts(other, host)
    runners.share_grammar_bitmask(other, host)
    for own, shared in zip(buffers(other), buffers(host), strict=True):
        assert len(own) == 2 and own.data_ptr() == shared.data_ptr()
