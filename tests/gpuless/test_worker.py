"""What a worker of layouts does on GPUs, with objects in the place of vLLM's and of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators import custom_all_reduce
from vllm.v1.executor import multiproc_executor
from vllm.v1.worker.gpu import buffer_utils, states

from pat_vllm.executor.messages import SwitchCommand
from pat_vllm.layout import Layout
from pat_vllm.patches.groups import probe_p2p_between
from pat_vllm.patches.runners import token_ids_of
from pat_vllm.worker import worker as worker_module
from pat_vllm.worker.handover import V1Handover, V2Handover, gather_states
from pat_vllm.worker.worker import PATWorkerMixin

RANKS = 8
LAYOUTS = tuple(Layout.of(tp, RANKS) for tp in (1, 2, 4, 8))
MAX_NUM_SEQS, MAX_MODEL_LEN = 4, 1 << 12
MOST_SEQS = {1: MAX_NUM_SEQS, 2: 2 * MAX_NUM_SEQS, 4: 3 * MAX_NUM_SEQS, 8: MAX_NUM_SEQS}
"""Requests that a replica runs, by tp."""

Make = Callable[..., Iterator[Any]]
"""Makes a worker for each rank of 8 GPUs, in turn."""


def request_states(max_num_reqs: int = MAX_NUM_SEQS) -> Any:
    """Those of vLLM's Model Runner V2."""
    return states.RequestState(
        max_num_reqs=max_num_reqs,
        max_model_len=MAX_MODEL_LEN,
        max_num_batched_tokens=16,
        num_speculative_steps=0,
        vocab_size=8,
        device=torch.device("cpu"),
    )


@pytest.fixture
def pinned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes of each buffer of pinned host memory that is made."""
    made: list[int] = []

    class Buffer:
        def __init__(self, size: int | Sequence[int], dtype: torch.dtype) -> None:
            self.cpu = torch.zeros(size, dtype=dtype)
            self.np = self.cpu.numpy()
            made.append(self.cpu.nbytes)

        def uva(self, n: int | None = None) -> torch.Tensor:
            return self.cpu[:n]

    monkeypatch.setattr(buffer_utils, "UvaBuffer", Buffer)
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: True)
    return made


class Stock:
    """In place of vLLM's worker."""

    def __init__(self, rank: int) -> None:
        self.rank = self.local_rank = rank
        self.device = torch.device("cpu")
        self.parallel_config = SimpleNamespace(world_size=RANKS)
        self.vllm_config = SimpleNamespace(model_config=SimpleNamespace(seed=0))

    def init_device(self) -> None:
        every = SimpleNamespace(world_size=RANKS, rank_in_group=self.rank)
        parallel_state._TP = parallel_state._ETP = every  # type: ignore[assignment]


class Worker(PATWorkerMixin, Stock):  # type: ignore[misc]
    def _make_runner(self, config: Any) -> Any:
        states = request_states(config.scheduler_config.max_num_seqs)
        return SimpleNamespace(req_states=states, speculative_config=None)


def config_of(engine: Any, layout: Layout, rank: int) -> Any:
    """As far as these checks go, a layout's; one in the middle runs most requests."""
    scheduler = SimpleNamespace(max_num_seqs=MOST_SEQS[layout.tp], max_num_batched_tokens=16)
    return SimpleNamespace(
        scheduler_config=scheduler,
        use_v2_model_runner=True,
        parallel_config=None,
        cache_config=None,
        compilation_config=None,
        load_config=None,
    )


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, pinned: list[int]) -> Make:
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    for name in ("_TP", "_ETP", "_PP", "_DP", "_PCP", "_DCP"):
        monkeypatch.setattr(parallel_state, name, alone)
    for name, value in {
        "exit_when_orphaned": lambda: None,
        "layout_config": config_of,
        "LayoutWeights": lambda *args: None,
        "set_current_vllm_config": lambda config: torch.no_grad(),
        "device_world_group": lambda: None,
        "Exchange": lambda *args: None,
    }.items():
        monkeypatch.setattr(worker_module, name, value)

    def workers(layouts: Sequence[Layout] = LAYOUTS) -> Iterator[Any]:
        monkeypatch.setattr(worker_module, "layouts_of", lambda config: layouts)
        monkeypatch.setattr(worker_module, "home_layout", lambda config: layouts[0])
        for rank in range(RANKS):
            pinned.clear()
            worker: Any = Worker(rank)

            def make_tp_group(layout: Layout, *args: Any, worker: Any = worker) -> Any:
                at = layout.tp_rank_of(worker.rank)
                return SimpleNamespace(world_size=layout.tp, rank_in_group=at)

            monkeypatch.setattr(worker_module, "make_tp_group", make_tp_group)
            worker.init_device()
            worker.pinned = list(pinned)
            yield worker

    return workers


def test_layouts_share_the_pinned_memory_of_token_ids(make: Make) -> None:
    """That of token ids is max_num_seqs * max_model_len * 4 bytes, as much as stock vLLM takes.

    The layout counts that runs most requests. The others use the first rows.
    """
    large = MAX_NUM_SEQS * MAX_MODEL_LEN * 4
    for worker in make():
        found = [size for size in worker.pinned if size >= large]
        assert found == [max(MOST_SEQS.values()) * MAX_MODEL_LEN * 4]
        every = {layout.tp: one.runner.req_states for layout, one in worker._runtimes.items()}
        for tp, one in every.items():
            ids = one.all_token_ids
            assert ids.gpu.shape == (ids.num_rows, MAX_MODEL_LEN)
            assert ids.num_rows == one.max_num_reqs == MOST_SEQS[tp]
        assert len({one.all_token_ids.gpu.data_ptr() for one in every.values()}) == 1
        assert len({id(one.all_token_ids._staged_write_indices) for one in every.values()}) == 1
        assert len({one.total_len.gpu.data_ptr() for one in every.values()}) == len(LAYOUTS)
    assert states.StagedWriteTensor is buffer_utils.StagedWriteTensor


def test_other_token_ids_are_kept_apart(pinned: list[int]) -> None:
    base: Any = SimpleNamespace(req_states=request_states())
    with token_ids_of(base):
        other_size = request_states(MAX_NUM_SEQS + 1)
    assert other_size.all_token_ids is not base.req_states.all_token_ids
    assert request_states().all_token_ids is not base.req_states.all_token_ids
    for no_runner_v2 in (None, SimpleNamespace()):
        with token_ids_of(no_runner_v2):  # type: ignore[arg-type]
            assert states.StagedWriteTensor is buffer_utils.StagedWriteTensor


@pytest.mark.parametrize("skip", [False, True])
def test_peer_access_to_each_other_rank(monkeypatch: pytest.MonkeyPatch, skip: bool) -> None:
    """By vLLM's own check, or by the driver's word, which knows devices by other numbers."""
    asked: list[tuple[int, int]] = []

    def ask(own: int, other: int) -> bool:
        asked.append((own, other))
        return True

    platform = SimpleNamespace(
        is_cuda=lambda: True, logical_device_id_to_visible_device_id=lambda device: 10 + device
    )
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    monkeypatch.setenv("VLLM_SKIP_P2P_CHECK", str(int(skip)))
    monkeypatch.setattr(custom_all_reduce, "gpu_p2p_access_check", ask)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", ask)
    with probe_p2p_between(lambda size: [5, 1, 3, 7][:size]):
        assert custom_all_reduce._can_p2p(1, 4)
    visible = 10 if skip else 0
    assert asked == [(1 + visible, other + visible) for other in (5, 3, 7)]


@pytest.mark.parametrize("base", [0, len(LAYOUTS) - 1])
def test_titles(make: Make, monkeypatch: pytest.MonkeyPatch, base: int) -> None:
    """A worker's process and its log lines are named as stock vLLM's, by the rank."""
    named: list[str] = []
    monkeypatch.setattr(multiproc_executor, "set_process_title", lambda name: named.append(name))
    monkeypatch.setattr(multiproc_executor, "decorate_logs", named.append)
    for worker in make(LAYOUTS[base:]):
        # As vLLM does between `init_device` and `load_model`.
        multiproc_executor.WorkerProc.setup_proc_title_and_log_prefix(enable_ep=False)
        assert worker._active is worker._base
    assert named == [f"Worker_TP{rank}" for rank in range(RANKS) for _ in "12"]


def test_states_are_gathered_by_all_ranks_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks gather states of requests, or none does: V2's runners have nothing to give."""
    gathering: list[int] = []
    command = SwitchCommand(1, LAYOUTS[1], LAYOUTS[0], placement={"request": 0})
    monkeypatch.setattr(
        torch.distributed, "all_gather_object", lambda into, own, group: gathering.append(group)
    )
    for handover, expected in ((V1Handover(), list(range(RANKS))), (V2Handover(), [])):
        gathering.clear()
        for rank in range(RANKS):
            runner: Any = SimpleNamespace(requests={})
            group: Any = rank
            assert gather_states(handover, runner, command, rank, group) == {}
        assert gathering == expected
        if not expected:
            assert handover.take(runner, command.placement) == {}
