"""What PAT does to vLLM's tensor-parallel groups, in the workers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from pat_vllm.patches.replacing import replace, replaced

if TYPE_CHECKING:
    from vllm.distributed.parallel_state import GroupCoordinator


def install_tp_group(group: GroupCoordinator) -> None:
    """Make `group` vLLM's tensor-parallel group, as which layers look it up at each call.

    Without it: there is one layout only. vLLM assigns the group once, at start. Missing seam:
    model runners that are given their group.
    """
    import vllm.distributed.parallel_state as parallel_state

    _change_workspaces(parallel_state._TP, group)
    parallel_state._TP = group
    # vLLM lets the engram TP group be the TP group unless a config sets it apart.
    parallel_state._ETP = group
    # Experts lie over the same ranks. vLLM has a group for them where a model has some.
    if parallel_state._EP is not None:
        _expert_groups_of_vllm.setdefault("ep", parallel_state._EP)
        parallel_state._EP = group


_expert_groups_of_vllm: dict[str, GroupCoordinator] = {}


def destroy_tp_groups(groups: Iterable[GroupCoordinator], own: GroupCoordinator) -> None:
    """Destroy all groups of layouts but vLLM's own, which it then finds and destroys.

    Without it: vLLM destroys the group that is installed, and that which it made for experts never.
    The others' communicators and IPC buffers end with the interpreter, when CUDA may be gone.
    Missing seam: as of `install_tp_group`.
    """
    import vllm.distributed.parallel_state as parallel_state

    for group in {id(group): group for group in groups if group is not own}.values():
        install_tp_group(group)  # for FlashInfer's workspaces, of which it destroys those in place
        group.destroy()
    install_tp_group(own)
    if expert_group := _expert_groups_of_vllm.pop("ep", None):
        parallel_state._EP = expert_group


_FLASHINFER = "vllm.distributed.device_communicators.flashinfer_all_reduce"
_WORKSPACES = {
    "_fi_ar_workspace": None,
    "_fi_ar_quant_workspace": None,
    "_fi_ar_workspace_failed": False,
    "_fi_ar_quant_workspace_failed": False,
}
"""What `_FLASHINFER` keeps for one group: made by the first that asks, looked up at each call."""
_workspaces_of: dict[int, dict[str, Any]] = {}


def _change_workspaces(previous: GroupCoordinator | None, group: GroupCoordinator) -> None:
    """Have FlashInfer's all-reduce find the workspaces of `group`, or none yet.

    Without it: the all-reduce of one layout uses the workspace that was made for the ranks of
    another. Missing seam: workspaces by group.
    """
    module = sys.modules.get(_FLASHINFER)
    if module is None or previous is None or group is previous:
        return
    replace(module, "_fi_ar_workspaces_for_group", _find_in_every_layout)
    _workspaces_of[id(previous)] = {name: getattr(module, name) for name in _WORKSPACES}
    vars(module).update(_workspaces_of.get(id(group), _WORKSPACES))


def _find_in_every_layout(stock: Callable[[Any], list[Any]]) -> Callable[[Any], list[Any]]:
    """Have a group's workspaces be found whichever layout is active.

    Without it: in a sleep with `enable_nccl_comm_suspend`, all but those of the active layout stay.
    Missing seam: workspaces by group.
    """

    def find(group: Any) -> list[Any]:
        groups = sys.modules[_FLASHINFER]._fi_ar_workspace_groups
        kept = [workspace for each in _workspaces_of.values() for workspace in each.values()]
        own = [workspace for workspace in kept if groups.get(id(workspace)) is group]
        return [*{id(workspace): workspace for workspace in (*stock(group), *own)}.values()]

    return find


def capture_without_ipc() -> AbstractContextManager[None]:
    """Inside, have custom all-reduce read from its own buffer in CUDA graphs, too.

    Without it: at the end of a capture peers open the memory of the graphs, and do not close it.
    That of graphs which are thrown away after they were measured may stay allocated. Missing seam:
    a capture that registers no buffers.
    """
    from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce

    original = CustomAllreduce.all_reduce

    def all_reduce(self: Any, inp: Any, **options: Any) -> Any:
        return original(self, inp, **{**options, "registered": False})

    return replaced(CustomAllreduce, "all_reduce", all_reduce)


def probe_p2p_between(devices_of: Callable[[int], Sequence[int]]) -> AbstractContextManager[None]:
    """Inside, have new groups look for peer access between the devices of their ranks.

    Without it: vLLM takes a rank's place in its group for the index of its device. A layout's group
    would use its custom all-reduce, or not, by what other devices can do. Missing seam: groups
    that are told the devices of their ranks.

    Args:
        devices_of: index of the device of each rank in this rank's group of a given size.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cuda():
        return nullcontext()
    import torch
    import vllm.envs as envs
    from vllm.distributed.device_communicators import custom_all_reduce

    visible = current_platform.logical_device_id_to_visible_device_id

    def can_p2p(rank: int, world_size: int) -> bool:
        others = list(devices_of(world_size))
        own = others.pop(rank)
        if envs.VLLM_SKIP_P2P_CHECK:
            can = torch.cuda.can_device_access_peer
            return all(can(visible(own), visible(other)) for other in others)
        return all(custom_all_reduce.gpu_p2p_access_check(own, other) for other in others)

    return replaced(custom_all_reduce, "_can_p2p", can_p2p)
