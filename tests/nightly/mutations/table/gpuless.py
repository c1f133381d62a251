# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes on GPUs: order of work, memory, graphs, compiled code, groups, kernels, platforms."""

from __future__ import annotations

from tests.nightly.mutations.mutation import mutations

# fmt: off
MUTATIONS = mutations({
    "tests/gpuless/test_collectives.py::test_all_ranks_make_the_same_calls_on_their_devices[4]": [
        ("devices in the order of ranks", "worker.worker:PATWorkerMixin._devices_of_group", "device_of(rank, ranks) for", "rank for"),
        ("a rank makes its groups in another order", "worker.worker:PATWorkerMixin.init_device", "dist_backend)\n                for layout in layouts\n", "dist_backend)\n                for layout in layouts[:: -1 if self.rank == 1 else 1]\n"),
        ("groups are made by their members only", "worker.runtime:make_tp_group", "in range(layout.replicas)", "in [torch.distributed.get_rank() % layout.replicas]"),
        ("a layout keeps the workspace of another", "patches.groups:_change_workspaces", "vars(module).update(", "dict().update("),
    ],
    "tests/gpuless/test_gpu_worker.py": [
        ("weights go to sleep as they lie", "worker.weight_updates:WeightUpdatesMixin.sleep", "self._weights.arrange(self._base.layout)", "pass"),
        ("CUDA graphs: a KV buffer for each layout", "kv_transfer.kv_buffer:_Allocation.__torch_function__", "if self._shared.buffer is None:", "if True:"),
    ],
    "tests/gpuless/test_happens_before.py": [
        ("loaders: neither rows nor steps are waited for", "worker.weight_updates:WeightUpdatesMixin._enter_for_a_call", "self._synchronize_device()", "pass"),
        ("row swaps: all rounds at once", "weights.row_order:rounds", "not disjoint or any", "not disjoint or False and any"),
    ],
    "tests/gpuless/test_kv_layouts.py": [
        ("copied heads count", "models.kinds:StateKind.ratio", "len(self.heads_of(base, 0)) // len(self.heads_of(layout, 0))", "layout.tp // base.tp"),
    ],
    "tests/gpuless/test_layouts_in_updates.py": [
        ("a payload for another rank", "worker.weight_updates:WeightUpdatesMixin.update_weights", "update_info[self.rank]", "update_info[0]"),
    ],
})
# fmt: on
