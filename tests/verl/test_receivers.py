"""What verl does in workers: its weight push finds the one of its own GPU. Starts no engine."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.config import VllmConfig

from pat_vllm.layout import Layout, device_of
from pat_vllm.start.setup import Setup
from pat_vllm.worker.layout_config import layout_config

RANKS = 8


@pytest.mark.parametrize("base_tp", [1, 2, 4, 8])
def test_sockets(base_tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A training rank binds the socket of its place among the GPUs of the node.

    verl finds workers by vLLM's data parallelism, which a layout's config must not have.
    """
    monkeypatch.setenv("VERL_REPLICA_RANK", "1")
    monkeypatch.setenv("VERL_RAY_JOB_ID", "2")
    monkeypatch.delenv("VERL_ZMQ_BASE_TRAINER_RANK", raising=False)
    engine = VllmConfig(additional_config={"pat": {}})
    engine.parallel_config.tensor_parallel_size = engine.parallel_config.world_size = RANKS
    for rank in range(RANKS):
        config = layout_config(engine, Setup.of(engine), Layout.of(base_tp, RANKS), rank)
        device = device_of(rank, RANKS)
        worker: Any = SimpleNamespace(
            local_rank=device, model_runner=SimpleNamespace(vllm_config=config)
        )
        handle = vLLMColocateWorkerExtension._get_zmq_handle(worker)
        assert handle == f"ipc:///tmp/rl-colocate-zmq-2-replica-1-rank-{device}.sock"


def test_a_worker_outlives_the_thread_that_has_started_it() -> None:
    """vLLM 0.33 starts workers from threads, which end when all have started."""
    from pat_verl.extension import PatWorkerExtension

    extension: Any = PatWorkerExtension
    libc, asked = ctypes.CDLL(None), ctypes.c_int(-1)

    def make_worker() -> None:
        extension.__new__(extension, vllm_config=VllmConfig())
        libc.prctl(2, ctypes.byref(asked))  # PR_GET_PDEATHSIG, of this thread

    thread = threading.Thread(target=make_worker)
    thread.start()
    thread.join()
    assert asked.value == 0
