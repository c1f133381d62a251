"""The state of vLLM's that belongs to a layout's group."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import custom_all_reduce
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

from pat_vllm.patches import groups as patches


def test_each_group_has_its_own_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """As FlashInfer's all-reduce makes them: for the group that is the first to ask."""
    module = SimpleNamespace(**patches._WORKSPACES, _fi_ar_workspaces_for_group=lambda group: [])
    monkeypatch.setitem(sys.modules, patches._FLASHINFER, module)  # type: ignore[arg-type]
    monkeypatch.setattr(patches, "_workspaces_of", {})
    groups: list[Any] = [SimpleNamespace(name=name) for name in "abc"]
    monkeypatch.setattr(parallel_state, "_TP", groups[0])
    monkeypatch.setattr(parallel_state, "_ETP", groups[0])
    for group in [*groups, *groups, groups[1]]:
        patches.install_tp_group(group)
        if module._fi_ar_workspace is None:
            module._fi_ar_workspace = group.name
        assert module._fi_ar_workspace == group.name


def test_groups_are_destroyed_with_their_own_workspaces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each group once, though layouts share it; vLLM's own is left in place for vLLM."""
    module = SimpleNamespace(**patches._WORKSPACES, _fi_ar_workspaces_for_group=lambda group: [])
    monkeypatch.setitem(sys.modules, patches._FLASHINFER, module)  # type: ignore[arg-type]
    monkeypatch.setattr(patches, "_workspaces_of", {})
    destroyed: list[tuple[str, Any]] = []

    def destroy(name: str) -> None:  # as FlashInfer's communicator destroys what is in place
        destroyed.append((name, module._fi_ar_workspace))
        module._fi_ar_workspace = None

    own, *groups = (SimpleNamespace(name=n, destroy=partial(destroy, n)) for n in "abc")
    for name in ("_TP", "_ETP"):
        monkeypatch.setattr(parallel_state, name, own)
    for group in (own, *groups):
        patches.install_tp_group(group)  # type: ignore[arg-type]
        module._fi_ar_workspace = f"workspace of {group.name}"
    patches.destroy_tp_groups([*groups, own, *groups], own)  # type: ignore[list-item, arg-type]
    assert destroyed == [("b", "workspace of b"), ("c", "workspace of c")]
    assert parallel_state._TP is parallel_state._ETP is own
    assert module._fi_ar_workspace == "workspace of a"


def test_experts_lie_over_the_active_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """And vLLM destroys the group that it made for them."""
    monkeypatch.setattr(patches, "_expert_groups_of_vllm", {})
    own, *groups = (SimpleNamespace(name=name) for name in "abc")
    for name in ("_TP", "_ETP", "_EP"):
        monkeypatch.setattr(parallel_state, name, own)
    for group in groups:
        patches.install_tp_group(group)  # type: ignore[arg-type]
        assert parallel_state._EP is parallel_state._TP is group
    for _ in range(2):
        patches.destroy_tp_groups([], own)
        assert parallel_state._EP is own

    monkeypatch.setattr(parallel_state, "_EP", None)  # of a dense model
    patches.install_tp_group(groups[0])  # type: ignore[arg-type]
    assert parallel_state._EP is None


def test_graphs_that_go_give_peers_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Custom all-reduce is given its own buffer, which is a peer's for good."""
    communicator: Any = CustomAllreduce.__new__(CustomAllreduce)
    # Custom operators take the handle, input, output, and a buffer that is registered, if any.
    buffers: list[int] = []
    ops = SimpleNamespace(all_reduce=lambda ptr, inp, out, buffer, size: buffers.append(buffer))
    monkeypatch.setattr(custom_all_reduce, "ops", ops)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    vars(communicator).update(
        disabled=False, rank=1, buffer_ptrs=[5, 6], max_size=1 << 20, _ptr=0, _IS_CAPTURING=True
    )
    communicator.should_custom_ar = lambda tensor: True
    communicator._capture_registered = True

    def captured() -> int:
        assert communicator.custom_all_reduce(torch.zeros(8)) is not None
        return buffers.pop()

    with patches.capture_without_ipc():
        assert captured() == 6
    assert captured() == 0
