"""verl's weight push finds the worker of its own GPU. Starts nothing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("verl")

from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension
from vllm.config import VllmConfig

from pat_vllm.layout import Layout, device_of
from pat_vllm.worker.layout_config import layout_config
from tests.support.mutation import mutated

RANKS = 8


def check_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    """A training rank binds the socket of its place among the GPUs of the node."""
    monkeypatch.setenv("VERL_REPLICA_RANK", "1")
    monkeypatch.setenv("VERL_RAY_JOB_ID", "2")
    monkeypatch.delenv("VERL_ZMQ_BASE_TRAINER_RANK", raising=False)
    engine = VllmConfig(additional_config={"pat": {}})
    engine.parallel_config.tensor_parallel_size = engine.parallel_config.world_size = RANKS
    for base_tp in (1, 2, 4, 8):
        for rank in range(RANKS):
            config = layout_config(engine, Layout.of(base_tp, RANKS), rank)
            device = device_of(rank, RANKS)
            worker: Any = SimpleNamespace(
                local_rank=device, model_runner=SimpleNamespace(vllm_config=config)
            )
            handle = vLLMColocateWorkerExtension._get_zmq_handle(worker)
            assert handle == f"ipc:///tmp/rl-colocate-zmq-2-replica-1-rank-{device}.sock"


def test_sockets(monkeypatch: pytest.MonkeyPatch) -> None:
    check_sockets(monkeypatch)


def test_replicas_that_verl_knew_of_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """It counts those of vLLM's data parallelism, and finds workers by them."""
    index = "data_parallel_index = layout.replica_of(rank)"
    size = "data_parallel_size = layout.replicas; config.parallel_config."
    with mutated(layout_config, {index: size + index}), pytest.raises(AssertionError):
        check_sockets(monkeypatch)
