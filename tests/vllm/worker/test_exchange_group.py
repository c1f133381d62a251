"""The group by which KV moves: over NCCL, which this machine need not have, one of few channels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from pat_vllm.kv_transfer.plan import EXCHANGE_CHANNELS
from pat_vllm.worker import runtime


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What groups are made of."""
    calls: list[Any] = []
    world = SimpleNamespace(device_group="world")
    monkeypatch.setattr(runtime.parallel_state, "get_world_group", lambda: world)
    options = lambda: SimpleNamespace(config=SimpleNamespace(max_ctas=None))  # noqa: E731
    nccl = SimpleNamespace(Options=options)
    monkeypatch.setattr(dist, "ProcessGroupNCCL", nccl, raising=False)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: [0, 1, 2])

    def new_group(*args: Any, **named: Any) -> str:
        calls.append((args, named))
        return "own"

    monkeypatch.setattr(dist, "new_group", new_group)
    return calls


def test_nccl_has_few_channels(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: "nccl")
    assert runtime.exchange_group() == "own"
    (((ranks,), named),) = made
    assert ranks == [0, 1, 2] and named["backend"] == "nccl"
    assert named["pg_options"].config.max_ctas == EXCHANGE_CHANNELS


def test_other_backends_move_kv_in_the_world(
    made: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda group: "gloo")
    assert runtime.exchange_group() == "world" and not made
