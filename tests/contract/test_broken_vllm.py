"""The contract test notices: each doctored vLLM lacks one thing that we rely on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.contract.source import Package
from tests.contract.test_vllm_contract import INSTALLED, everything, package, problems

SCHEDULER = "v1/core/sched/scheduler.py"
INTERFACE = "v1/core/sched/interface.py"
BREAKS = {
    "a method called on an object": (
        "v1/core/kv_cache_manager.py",
        "def get_block_ids(",
        "def block_ids(",
        "KVCacheManager.get_block_ids does not exist",
        "pat_vllm/scheduler/switch.py:",
    ),
    "a parameter that we pass": (
        SCHEDULER,
        "def schedule(self, throttle_prefills: bool = False)",
        "def schedule(self)",
        "Scheduler.schedule(...) takes 0 arguments by position, not 1",
        "pat_vllm/scheduler/replica.py:",
    ),
    "a keyword that we pass": (
        "distributed/parallel_state.py",
        "    group_name: str | None = None,\n    use_device_communicator",
        "    name: str | None = None,\n    use_device_communicator",
        "init_model_parallel_group(...) has no parameter 'group_name'",
        "pat_vllm/worker/runtime.py:",
    ),
    "a new parameter that we do not pass": (
        "device_allocator/__init__.py",
        "def get_mem_allocator_instance() -> MemAllocator",
        "def get_mem_allocator_instance(device) -> MemAllocator",
        "get_mem_allocator_instance(...) needs its parameter 'device'",
        "pat_vllm/worker/gpu_worker.py:",
    ),
    "a private global": (
        "distributed/parallel_state.py",
        "_ETP: GroupCoordinator | None",
        "_EMBEDDING_TP: GroupCoordinator | None",
        "vllm.distributed.parallel_state._ETP does not exist",
        "pat_vllm/worker/runtime.py:",
    ),
    "a member of an enumeration": (
        "v1/request.py",
        "    WAITING_FOR_REMOTE_KVS =",
        "    WAITING_FOR_KVS =",
        "RequestStatus.WAITING_FOR_REMOTE_KVS does not exist",
        "pat_vllm/scheduler/switch.py:",
    ),
    "a field that we set": (
        "v1/core/sched/output.py",
        "    prefill_token_ids: list[int] | None = None",
        "    prefill_tokens: list[int] | None = None",
        "NewRequestData(...) has no parameter 'prefill_token_ids'",
        "pat_vllm/worker/synthetic.py:",
    ),
    "an attribute that a constructor assigned": (
        SCHEDULER,
        "self.kv_holding_waiting =",
        "self.kv_waiting =",
        "Scheduler.kv_holding_waiting does not exist",
        "pat_vllm/scheduler/switch.py:",
    ),
    "an import": (
        "v1/kv_cache_interface.py",
        "def create_kv_cache_views(",
        "def make_kv_cache_views(",
        "vllm.v1.kv_cache_interface.create_kv_cache_views does not exist",
        "pat_vllm/kv_transfer/kv_buffer.py:",
    ),
    "an overridden method": (
        "v1/worker/gpu_worker.py",
        "def _maybe_get_memory_pool_context(self, tag: str)",
        "def _memory_pool_context(self, tag: str)",
        "Worker._maybe_get_memory_pool_context is gone, but PATGPUWorker overrides it",
        "pat_vllm/worker/gpu_worker.py:",
    ),
    "a parameter that an override does not take": (
        INTERFACE,
        "def set_pause_state(self, pause_state: PauseState)",
        "def set_pause_state(self, pause_state: PauseState, reason: str)",
        "that our override does not take the parameter 'reason'",
        "pat_vllm/scheduler/scheduler.py:",
    ),
    "a new abstract method": (
        INTERFACE,
        "    def finish_requests(",
        "    def count(self): ...\n\n    @abstractmethod\n    def finish_requests(",
        "SchedulerInterface.count is abstract, and PATScheduler does not define it",
        "pat_vllm/scheduler/scheduler.py:",
    ),
    "what `self` has from a base class": (
        "v1/executor/multiproc_executor.py",
        "self.rpc_broadcast_mq",
        "self.broadcast_mq",
        "MultiprocExecutor.rpc_broadcast_mq does not exist",
        "pat_vllm/executor/executor.py:",
    ),
    "a new question to our scheduler": (
        "v1/engine/core.py",
        "self.scheduler.has_requests()",
        "self.scheduler.has_any_requests()",
        "self.scheduler.has_any_requests is asked for, but PATScheduler has no such name",
        "pat_vllm/scheduler/scheduler.py:",
    ),
    "how it does something": (
        "v1/worker/utils.py",
        "torch.zeros(buf_size, dtype=torch.int8",
        "torch.empty(buf_size, dtype=torch.uint8",
        "the one allocation that the shared buffer answers",
        "pat_vllm/kv_transfer/kv_buffer.py",
    ),
}


@pytest.mark.parametrize("what", BREAKS)
def test_a_break_is_reported(what: str, tmp_path: Path) -> None:
    path, stock, doctored, message, user = BREAKS[what]
    sound = package(INSTALLED)
    text = (sound.roots[0] / "vllm" / path).read_text()
    assert stock in text
    copy = tmp_path / "vllm" / path
    copy.parent.mkdir(parents=True)
    copy.write_text(text.replace(stock, doctored))

    broken = Package("vllm", f"doctored {sound.label}", (tmp_path, *sound.roots))
    found = problems(everything(broken), broken)
    assert any(message in line and user in line for line in found), found
