"""Patches: applied twice they do no harm, and the originals come back."""

from __future__ import annotations

import asyncio
import logging
import os
import queue
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.engine.core_client import AsyncMPClient, MPClient, SyncMPClient
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.sample import rejection_sampler

from pat_vllm.patches import drafts, front_end, schedulers, weights

NUMBA = """
import numba, sys
if "launched" in sys.argv:
    numba.set_num_threads(1)
from pat_vllm.patches.drafts import keep_openmp_threads
keep_openmp_threads()
keep_openmp_threads()

@numba.njit(parallel=True)
def add(n):
    total = 0
    for i in numba.prange(n):
        total += i
    return total

assert add(5) == 10
print(numba.config.NUMBA_NUM_THREADS)
"""


@pytest.mark.parametrize(
    ("arguments", "given", "threads"),
    [([], None, 1), ([], "2", 2), (["launched"], None, os.cpu_count())],
    ids=["none", "the user's own", "they run"],
)
def test_numbas_threads(arguments: list[str], given: str | None, threads: int) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "NUMBA_NUM_THREADS"}
    if given is not None:
        environment["NUMBA_NUM_THREADS"] = given
    command = [sys.executable, "-c", NUMBA, *arguments]
    found = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert found.stdout.strip() == str(threads), found.stderr


def test_a_method_is_replaced_once_and_kept() -> None:
    calls: list[str] = []

    class Executor:
        @staticmethod
        def get_class(vllm_config: Any) -> type:
            return dict

    def resolve(vllm_config: Any, original: Any) -> type:
        calls.append(vllm_config)
        return original(vllm_config)

    stock = Executor.get_class
    for _ in range(2):
        front_end.patch_get_class(Executor, resolve)
    assert Executor.get_class("a config") is dict
    assert Executor().get_class("from an instance") is dict
    assert calls == ["a config", "from an instance"], "resolved once per call"
    assert Executor.get_class.__wrapped__ is stock  # type: ignore[attr-defined]


def dead_client(outputs: Any) -> Any:
    """A client whose monitor is about to shut it down; no process, no sockets."""
    client = object.__new__(SyncMPClient)
    client._finalizer = SimpleNamespace(detach=lambda: None)
    client.resources = SimpleNamespace(engine_dead=True)
    client.outputs_queue = outputs
    client.utility_results = {}
    return client


def test_who_waits_for_a_dead_core_is_told() -> None:
    """vLLM's own client leaves `generate` and calls waiting for good."""
    client = dead_client(queue.Queue())
    call: Future[Any] = Future()
    answered: Future[Any] = Future()
    client.utility_results.update({1: call, 2: answered})
    answered.set_result("before")
    with ThreadPoolExecutor(1) as pool:
        output = pool.submit(client.get_output)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MPClient, "shutdown", MPClient.shutdown)
            front_end.fail_waits_for_a_dead_core()
            client.shutdown()
        # Ends the thread also where nobody was told.
        client.outputs_queue.put_nowait(ValueError("not told"))
        with pytest.raises(EngineDeadError):
            output.result(60)
    assert client.outputs_queue.get_nowait().args == ("not told",)
    assert isinstance(call.exception(0), EngineDeadError)
    assert answered.result(0) == "before"


def test_a_coroutine_that_waits_for_a_dead_core_is_told() -> None:
    client = dead_client(None)
    client.__class__ = AsyncMPClient

    async def wait() -> None:
        call = client.utility_results[1] = asyncio.get_running_loop().create_future()
        await asyncio.to_thread(client.shutdown)
        await asyncio.wait_for(call, 60)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MPClient, "shutdown", MPClient.shutdown)
        front_end.fail_waits_for_a_dead_core()
        with pytest.raises(EngineDeadError):
            asyncio.run(wait())


def test_engine_cores_have_time_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM kills them after 5 s, before they have removed what their workers leave."""
    import vllm.v1.engine.utils as cores

    asked = []
    monkeypatch.setattr(cores, "shutdown", lambda processes, timeout=None: asked.append(timeout))
    front_end.let_engine_cores_end()
    cores.shutdown([])
    cores.shutdown([], timeout=0.0)
    assert asked == [front_end.ENDS_WITHIN, 0.0]


def test_sends_of_two_threads_do_not_meet() -> None:
    inside, most = [0], [0]
    together = threading.Barrier(2)

    class Client:
        def _send_input(self, request: str) -> str:
            inside[0] += 1
            most[0] = max(most[0], inside[0])
            # Without the lock, the other thread comes in here.
            threading.Event().wait(0.05)
            inside[0] -= 1
            return request

    client = Client()
    llm = SimpleNamespace(llm_engine=SimpleNamespace(engine_core=client))
    front_end.serialize_sends(llm)
    once = client._send_input
    front_end.serialize_sends(llm)
    assert client._send_input is once

    def send() -> None:
        together.wait()
        assert client._send_input("abort") == "abort"

    threads = [threading.Thread(target=send) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


def test_an_engine_in_this_process_sends_nothing() -> None:
    core = SimpleNamespace()
    front_end.serialize_sends(SimpleNamespace(llm_engine=SimpleNamespace(engine_core=core)))
    assert not vars(core)


def test_pools_come_from_the_innermost() -> None:
    def outer(**options: Any) -> Any:
        return "outer"

    def inner(**options: Any) -> Any:
        return "inner"

    with schedulers.block_pools_from(outer):
        with pytest.raises(KeyError), schedulers.block_pools_from(inner):
            assert kv_cache_coordinator.BlockPool() == "inner"  # type: ignore[call-arg]
            raise KeyError
        assert kv_cache_coordinator.BlockPool() == "outer"  # type: ignore[call-arg]
    assert kv_cache_coordinator.BlockPool is BlockPool


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


def test_drafts_are_verified_by_the_parameters_of_their_requests() -> None:
    """vLLM's own C++ for CPU leaves them unwritten, and fails where there are no drafts."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("expand_batch_to_tokens", "apply_sampling_constraints"):
            patch.setattr(rejection_sampler, name, getattr(rejection_sampler, name))
        for _ in range(2):
            drafts.verify_sampled_drafts()
        expand = rejection_sampler.expand_batch_to_tokens
        counts = torch.tensor([2, 2, 5], dtype=torch.int32)
        temperature = expand(torch.tensor([0.5, 9.0, 0.0]), counts, 5, replace_to=1)
        assert temperature.tolist() == [0.5, 0.5, 1.0, 1.0, 1.0]
        top_k = expand(torch.tensor([7, 8, 9], dtype=torch.int32), counts, 5)
        assert top_k.dtype == torch.int32
        assert top_k.tolist() == [7, 7, 9, 9, 9]
        parameters: Any = SimpleNamespace(
            all_greedy=False, temperature=torch.ones(1), top_k=torch.ones(1), top_p=None
        )
        none = torch.zeros(1, dtype=torch.int32)
        constrained = rejection_sampler.apply_sampling_constraints(
            torch.zeros(0, 16), none, parameters
        )
        assert constrained.shape == (0, 16)


def test_pool_resets_are_quiet_inside() -> None:
    logger = logging.getLogger("vllm.v1.core.block_pool")
    before = logger.level
    with schedulers.quiet_pool_resets(), schedulers.quiet_pool_resets():
        assert not logger.isEnabledFor(logging.INFO)
        assert logger.isEnabledFor(logging.WARNING)
    assert logger.level == before


def test_weights_are_refused_where_the_model_is_asked_itself() -> None:
    class Model(nn.Module):
        def load_weights(self, weights: Any) -> str:
            return "loaded"

    class Worker:
        def refuse(self, *args: Any) -> None:
            raise RuntimeError("cannot be updated")

    model: Any = Model()
    for _ in range(2):
        weights.refuse_load_weights(model, Worker().refuse)
    with pytest.raises(RuntimeError, match="cannot be updated"):
        model.load_weights([])
    assert model.load_weights.__wrapped__([]) == "loaded"
    assert Model().load_weights([]) == "loaded", "other models are as they were"


def test_a_ray_cluster_is_noted_in_the_config() -> None:
    parallel: Any = SimpleNamespace()
    assert front_end.noted_ray_address(parallel) is None
    front_end.note_ray_address(parallel, "10.0.0.1:6379")
    assert front_end.noted_ray_address(parallel) == "10.0.0.1:6379"
