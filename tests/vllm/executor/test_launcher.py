"""Who starts an engine's workers: processes of this host, or actors of a Ray cluster."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import pat_vllm
from pat_vllm.executor.launcher import executor_class, prepare_launch

PARALLEL: Any = SimpleNamespace(placement_group=None)


def config_with(launcher: str, **parallel: Any) -> Any:
    return SimpleNamespace(
        additional_config={"pat": {"launcher": launcher}},
        parallel_config=SimpleNamespace(**{"placement_group": None, **parallel}),
    )


def test_processes_where_ray_is_not_asked_for_or_cannot_be_used() -> None:
    """vLLM's CPU platform has no name for its devices in Ray, so a placement group is no help."""
    for launcher in ("auto", "mp"):
        assert executor_class(config_with(launcher)) is pat_vllm.PATExecutor
    assert executor_class(config_with("auto", placement_group=object())) is pat_vllm.PATExecutor
    with pytest.raises(ValueError, match=r"launcher='ray' runs on CUDA.*'cpu'.*launcher='mp'"):
        executor_class(config_with("ray"))


def test_ray_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.v1.executor import ray_utils

    monkeypatch.setattr(ray_utils, "ray", None)
    with pytest.raises(ValueError, match=r"launcher='ray' needs Ray.*pip install ray"):
        executor_class(config_with("ray"))


def test_a_class_that_says_otherwise() -> None:
    prepare_launch(PARALLEL, "mp", pat_vllm.PATExecutor)
    with pytest.raises(ValueError, match=r"launcher='ray', but .*=PATExecutor.*launcher='mp'"):
        prepare_launch(PARALLEL, "ray", pat_vllm.PATExecutor)


def test_a_placement_group_of_another_kind_is_refused() -> None:
    """ROLL's is a list of what its own executor reads."""
    group = [{"node_rank": 0, "gpu_rank": 0, "placement_group": object()}] * 2
    parallel: Any = SimpleNamespace(placement_group=group)
    with pytest.raises(ValueError, match=r"a list of 2, as ROLL gives it.*launcher='mp' and none"):
        prepare_launch(parallel, "auto", pat_vllm.PATExecutor)
