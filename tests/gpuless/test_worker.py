"""What a worker of layouts does on GPUs, with objects in the place of vLLM's and of a device."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed.device_communicators import custom_all_reduce
from vllm.v1.worker.gpu import buffer_utils, states

from pat_vllm.layout import Layout, device_of
from pat_vllm.patches import probe_p2p_between, token_ids_of
from pat_vllm.worker import worker as worker_module
from pat_vllm.worker.worker import PATWorkerMixin

RANKS = 8
LAYOUTS = tuple(Layout.of(tp, RANKS) for tp in (1, 2, 4, 8))
MAX_NUM_SEQS, MAX_MODEL_LEN = 4, 1 << 12


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
        self.made_groups: list[int] = []

    def init_device(self) -> None:
        self.made_groups.append(RANKS)
        self.p2p = {RANKS: custom_all_reduce._can_p2p(self.rank, RANKS)}


class Worker(PATWorkerMixin, Stock):  # type: ignore[misc]
    def _make_runner(self, config: Any) -> Any:
        return SimpleNamespace(req_states=request_states())


@pytest.fixture
def made_workers(monkeypatch: pytest.MonkeyPatch, pinned: list[int]) -> list[Any]:
    """One for each rank of 8 GPUs, of which the last two have peer access to each other."""
    platform = SimpleNamespace(
        is_cuda=lambda: True, logical_device_id_to_visible_device_id=lambda device: device
    )
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    peers = ({6, 7},)
    monkeypatch.setenv("VLLM_SKIP_P2P_CHECK", "0")
    monkeypatch.setattr(
        custom_all_reduce, "gpu_p2p_access_check", lambda own, other: {own, other} in peers
    )
    workers: list[Any] = []

    def make_tp_group(layout: Layout, *args: Any) -> Any:
        worker = workers[-1]
        if layout.tp > 1:
            at = layout.tp_rank_of(worker.rank)
            worker.p2p[layout.tp] = custom_all_reduce._can_p2p(at, layout.tp)
        return layout

    for name, value in {
        "exit_when_orphaned": lambda: None,
        "layouts_of": lambda config: LAYOUTS,
        "home_layout": lambda config: LAYOUTS[0],
        "layout_config": lambda config, layout, rank: SimpleNamespace(
            parallel_config=None, cache_config=None, compilation_config=None, load_config=None
        ),
        "make_tp_group": make_tp_group,
        "install_tp_group": lambda group: None,
        "LayoutWeights": lambda *args: None,
        "set_current_vllm_config": lambda config: torch.no_grad(),
        "device_world_group": lambda: None,
        "Exchange": lambda *args: None,
    }.items():
        monkeypatch.setattr(worker_module, name, value)
    for rank in range(RANKS):
        pinned.clear()
        workers.append(Worker(rank))
        workers[-1].init_device()
        workers[-1].pinned = list(pinned)
    return workers


def test_layouts_share_the_pinned_memory_of_token_ids(made_workers: list[Any]) -> None:
    """It is max_num_seqs * max_model_len * 4 bytes, as much as stock vLLM takes."""
    large = MAX_NUM_SEQS * MAX_MODEL_LEN * 4
    for worker in made_workers:
        assert sum(size >= large for size in worker.pinned) == 1
        base, *others = (one.runner.req_states for one in worker._runtimes.values())
        assert all(one.all_token_ids is base.all_token_ids for one in others)
        assert len({id(one.total_len) for one in (base, *others)}) == len(LAYOUTS)
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


def test_peer_access_is_asked_for_between_the_devices_of_a_group(made_workers: list[Any]) -> None:
    for worker in made_workers:
        device = device_of(worker.rank, RANKS)
        assert worker.p2p == {2: device >= 6, 4: False, 8: False}
    assert custom_all_reduce._can_p2p.__module__ == custom_all_reduce.__name__


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


class Streams:
    """Rows of a weight, swapped by work that a stream has in its queue."""

    def __init__(self) -> None:
        self.rows = [2, 1]  # as another layout has them
        self.queue: list[Any] = []
        self.arranged = 2

    def arrange(self, layout: Layout) -> int:
        if layout.tp == self.arranged:
            return 0
        self.arranged = layout.tp
        self.queue.append(self.rows.reverse)
        return 16

    def synchronize(self) -> None:
        for work in self.queue:
            work()
        self.queue.clear()


def worker_in(active: Layout, streams: Streams) -> Any:
    worker: Any = Worker(rank=0)
    worker._weights = streams
    worker._runtimes = {one: SimpleNamespace(layout=one) for one in LAYOUTS}
    worker._base = worker._runtimes[LAYOUTS[0]]
    worker._active = worker._runtimes[active]
    worker._activate = lambda runtime: setattr(worker, "_active", runtime)
    worker._synchronize_device = streams.synchronize
    return worker


def test_an_update_on_another_stream_finds_rows_in_place() -> None:
    """Packed updates of vLLM load on streams of their own, which wait for no other."""
    streams = Streams()
    worker = worker_in(LAYOUTS[1], streams)

    def update() -> None:
        streams.rows[:] = [10, 20]

    worker.update = update
    worker.pat_call_in_base("update", (), {})
    streams.synchronize()
    assert streams.rows == [10, 20]
    assert worker._active.layout == LAYOUTS[1]


def test_a_call_in_every_layout_finds_rows_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    streams = Streams()
    worker = worker_in(LAYOUTS[0], streams)
    monkeypatch.setattr(worker_module, "_IN_EVERY_LAYOUT", {"look"})
    waiting: list[int] = []
    worker.look = lambda: waiting.append(len(streams.queue))
    worker.pat_call_in_base("look", (), {})
    assert waiting == [0] * len(LAYOUTS)


def test_nothing_is_waited_for_where_no_row_moves() -> None:
    streams = Streams()
    streams.arranged = 1
    worker = worker_in(LAYOUTS[0], streams)
    worker._synchronize_device = None
    worker.look = lambda: "seen"
    assert worker.pat_call_in_base("look", (), {}) == "seen"
