"""The contract tests notice: a doctored vLLM lacks things that we rely on, and each is reported."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from tests.vllm.contract.behaviour import check_patches, check_texts
from tests.vllm.contract.checker import CACHE, check
from tests.vllm.contract.test_vllm_contract import INSTALLED, found, sources

SCHEDULER = "v1/core/sched/scheduler.py"
INTERFACE = "v1/core/sched/interface.py"

pytestmark = pytest.mark.timeout(1200)


class Break(NamedTuple):
    """A text of vLLM's, another in its place, and a part of the report: what, and who of us."""

    path: str
    stock: str
    doctored: str
    message: str
    user: str


BREAKS = {
    "a method called on an object": Break(
        "v1/core/kv_cache_manager.py",
        "def get_block_ids(",
        "def block_ids(",
        '"KVCacheManager" has no attribute "get_block_ids"',
        "pat_vllm/scheduler/",
    ),
    "a private global": Break(
        "distributed/parallel_state.py",
        "_ETP: GroupCoordinator | None",
        "_EMBEDDING_TP: GroupCoordinator | None",
        'Module has no attribute "_ETP"',
        "pat_vllm/patches/",
    ),
    "an attribute that a constructor assigned": Break(
        SCHEDULER,
        "self.kv_holding_waiting =",
        "self.kv_waiting =",
        '"Scheduler" has no attribute "kv_holding_waiting"',
        "pat_vllm/",
    ),
    "an overridden method": Break(
        "v1/worker/gpu_worker.py",
        "def _maybe_activate_jit_monitor(self",
        "def _activate_jit_monitor(self",
        "overridden: _maybe_activate_jit_monitor",
        "pat_vllm/worker/gpu_worker.py:",
    ),
    "a parameter that an override does not take": Break(
        INTERFACE,
        "def set_pause_state(self, pause_state: PauseState)",
        "def set_pause_state(self, pause_state: PauseState, reason: str)",
        'Signature of "set_pause_state" incompatible with supertype',
        "pat_vllm/scheduler/scheduler.py:",
    ),
    "a new abstract method": Break(
        INTERFACE,
        "    def finish_requests(",
        "    def count(self): ...\n\n    @abstractmethod\n    def finish_requests(",
        "concrete class",
        "tests/vllm/contract/spelled.py:",
    ),
    "what `self` has from a base class": Break(
        "v1/executor/multiproc_executor.py",
        "self.rpc_broadcast_mq",
        "self.broadcast_mq",
        'has no attribute "rpc_broadcast_mq"',
        "pat_vllm/executor/executor.py:",
    ),
    "a new question to our scheduler": Break(
        "v1/engine/core.py",
        "self.scheduler.has_requests()",
        "self.scheduler.has_any_requests()",
        '"PATScheduler" has no attribute "has_any_requests"',
        "/engine_core.py:",
    ),
    "a name in a string": Break(
        "v1/worker/gpu_worker.py",
        "def discard(",
        "def drop(",
        '"Worker" has no attribute "discard"',
        "tests/vllm/contract/spelled.py:",
    ),
    "what ranks that share a GPU replace": Break(
        "platforms/interface.py",
        "def device_id_to_physical_device_id(cls, device_id",
        "def device_id_to_physical_device_id(cls, logical_id",
        "has cls, logical_id, not cls, device_id",
        "vllm.platforms.interface:Platform.device_id_to_physical_device_id",
    ),
    "how it does something": Break(
        "v1/worker/utils.py",
        "torch.zeros(buf_size, dtype=torch.int8",
        "torch.empty(buf_size, dtype=torch.uint8",
        "the one allocation that the shared buffer answers",
        "vllm.v1.worker.utils.allocate_kv_cache",
    ),
}


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Of one vLLM that has all breaks."""
    folder, instead = tmp_path_factory.mktemp("doctored"), dict[Path, Path]()
    for fault in BREAKS.values():
        file = sources(INSTALLED) / "vllm" / fault.path
        text = instead.get(file, file).read_text()
        assert fault.stock in text, fault
        instead[file] = folder / fault.path.replace("/", "-")
        instead[file].write_text(text.replace(fault.stock, fault.doctored))
    broken = check(sources(INSTALLED), CACHE / "doctored", instead)
    gone = [line.replace(": ", ": overridden: ") for line in found(INSTALLED).overrides]
    still = {line.replace(": ", ": overridden: ") for line in broken.overrides}
    texts = check_texts(sources(INSTALLED), instead)
    patches = check_patches(sources(INSTALLED), instead)
    return [*broken.problems, *texts, *patches, *(line for line in gone if line not in still)]


@pytest.mark.parametrize("what", BREAKS)
def test_a_break_is_reported(what: str, report: list[str]) -> None:
    fault = BREAKS[what]
    assert any(fault.user in line and fault.message in line for line in report), report


def test_nothing_is_reported_without_a_break() -> None:
    assert found(INSTALLED).problems == ()
    assert not list(check_texts(sources(INSTALLED)))
