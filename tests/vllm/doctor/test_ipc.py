"""Weights by handles of another process's memory, on CPU: both ends in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from pat_vllm.doctor.in_workers import send_by_ipc


def test_each_rank_loads_what_was_sent(tmp_path: Path) -> None:
    sent = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.arange(4, dtype=torch.bfloat16)}
    save_file(sent, tmp_path / "model.safetensors")
    loaded: list[dict[str, torch.Tensor]] = []

    def on_workers(function: Callable[..., None], args: tuple[Any, ...]) -> None:
        for rank in range(2):
            model = SimpleNamespace(load_weights=lambda weights: loaded.append(dict(weights)))
            runner = SimpleNamespace(model=model)
            function(
                SimpleNamespace(device=torch.device("cpu"), rank=rank, model_runner=runner), *args
            )

    config = SimpleNamespace(parallel_config=SimpleNamespace(tensor_parallel_size=2))
    llm: Any = SimpleNamespace(
        llm_engine=SimpleNamespace(vllm_config=config), collective_rpc=on_workers
    )
    strategy = torch.multiprocessing.get_sharing_strategy()
    try:
        assert send_by_ipc(llm, str(tmp_path), on_cpu=True) == "shared host memory"
    finally:
        torch.multiprocessing.set_sharing_strategy(strategy)
    for weights in loaded:
        assert weights.keys() == sent.keys()
        assert all(torch.equal(weights[name], weight) for name, weight in sent.items())
    assert len(loaded) == 2
