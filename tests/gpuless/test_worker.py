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
from pat_vllm.layout import Layout, device_of
from pat_vllm.patches.groups import probe_p2p_between
from pat_vllm.patches.runners import token_ids_of
from pat_vllm.worker import worker as worker_module
from pat_vllm.worker.handover import V1Handover, V2Handover, gather_states
from pat_vllm.worker.runtime import largest_first
from pat_vllm.worker.worker import PATWorkerMixin
from tests.support.mutation import mutated

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
        self.p2p = {RANKS: custom_all_reduce._can_p2p(self.rank, RANKS)}


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
    """Of the GPUs, the last two have peer access to each other."""
    platform = SimpleNamespace(
        is_cuda=lambda: True, logical_device_id_to_visible_device_id=lambda device: device
    )
    monkeypatch.setattr("vllm.platforms.current_platform", platform)
    peers = ({6, 7},)
    monkeypatch.setenv("VLLM_SKIP_P2P_CHECK", "0")
    monkeypatch.setattr(
        custom_all_reduce, "gpu_p2p_access_check", lambda own, other: {own, other} in peers
    )
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
                if layout.tp > 1:
                    worker.p2p[layout.tp] = custom_all_reduce._can_p2p(at, layout.tp)
                return SimpleNamespace(world_size=layout.tp, rank_in_group=at)

            monkeypatch.setattr(worker_module, "make_tp_group", make_tp_group)
            worker.init_device()
            worker.pinned = list(pinned)
            yield worker

    return workers


def check_pinned_memory(make: Make) -> None:
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


def test_layouts_share_the_pinned_memory_of_token_ids(make: Make) -> None:
    check_pinned_memory(make)


def test_other_token_ids_are_kept_apart(pinned: list[int]) -> None:
    base: Any = SimpleNamespace(req_states=request_states())
    with token_ids_of(base):
        other_size = request_states(MAX_NUM_SEQS + 1)
    assert other_size.all_token_ids is not base.req_states.all_token_ids
    assert request_states().all_token_ids is not base.req_states.all_token_ids
    for no_runner_v2 in (None, SimpleNamespace()):
        with token_ids_of(no_runner_v2):  # type: ignore[arg-type]
            assert states.StagedWriteTensor is buffer_utils.StagedWriteTensor


def check_peer_access(make: Make) -> None:
    for worker in make():
        device = device_of(worker.rank, RANKS)
        assert worker.p2p == {2: device >= 6, 4: False, 8: False}
    assert custom_all_reduce._can_p2p.__module__ == custom_all_reduce.__name__


def test_peer_access_is_asked_for_between_the_devices_of_a_group(make: Make) -> None:
    check_peer_access(make)


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


def check_update() -> None:
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


def test_an_update_on_another_stream_finds_rows_in_place() -> None:
    check_update()


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


def check_titles(make: Make, monkeypatch: pytest.MonkeyPatch, base: int = 0) -> None:
    """A worker's process and its log lines are named as stock vLLM's, by the rank."""
    named: list[str] = []
    monkeypatch.setattr(multiproc_executor, "set_process_title", lambda name: named.append(name))
    monkeypatch.setattr(multiproc_executor, "decorate_logs", named.append)
    for worker in make(LAYOUTS[base:]):
        # As vLLM does between `init_device` and `load_model`.
        multiproc_executor.WorkerProc.setup_proc_title_and_log_prefix(enable_ep=False)
        assert worker._active is worker._base
    assert named == [f"Worker_TP{rank}" for rank in range(RANKS) for _ in "12"]


@pytest.mark.parametrize("base", range(len(LAYOUTS)))
def test_titles(make: Make, monkeypatch: pytest.MonkeyPatch, base: int) -> None:
    check_titles(make, monkeypatch, base)


def check_states(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_states_are_gathered_by_all_ranks_or_none(monkeypatch: pytest.MonkeyPatch) -> None:
    check_states(monkeypatch)


MISTAKES: dict[str, tuple[str, Any, dict[str, str]]] = {
    "token ids for each layout": (
        "pinned",
        token_ids_of,
        {"size[0] > most_rows": "True"},
    ),
    "all states of requests are shared": (
        "pinned",
        token_ids_of,
        {
            "if isinstance(size, int) or": (
                "if isinstance(size, int):\n            size = (size, columns)\n        if"
            )
        },
    ),
    "the rows of a layout that has fewer": (
        "pinned",
        largest_first,
        {"reverse=True": "reverse=False"},
    ),
    "rows of tokens for requests": (
        "pinned",
        largest_first,
        {"if runtime.config.use_v2_model_runner": "if False"},
    ),
    "all rows for few requests": (
        "pinned",
        token_ids_of,
        {"shared.gpu[: size[0]]": "shared.gpu"},
    ),
    "ranks taken for devices": (
        "peers",
        probe_p2p_between,
        {"if not current_platform.is_cuda()": "if True"},
    ),
    "devices in the order of ranks": (
        "peers",
        PATWorkerMixin._devices_of_group,
        {"device_of(rank, ranks) for": "rank for"},
    ),
    "swaps are not waited for": (
        "update",
        PATWorkerMixin._enter_for_a_call,
        {"self._synchronize_device()": "pass"},
    ),
    "titled by the base layout": (
        "titles",
        PATWorkerMixin.init_device,
        {"install_tp_group(all_ranks)": "pass"},
    ),
    "V2 gathers nothing": ("states", gather_states, {" or not handover.keeps_states": ""}),
    "a rank decides for itself": (
        "states",
        gather_states,
        {"gathered: list": "if not mine:\n        return {}\n    gathered: list"},
    ),
}
"""Which check sees it, and where it is made."""


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_seen(make: Make, monkeypatch: pytest.MonkeyPatch, mistake: str) -> None:
    check, function, changes = MISTAKES[mistake]
    checks: dict[str, Callable[[], None]] = {
        "pinned": lambda: check_pinned_memory(make),
        "peers": lambda: check_peer_access(make),
        "update": check_update,
        "titles": lambda: check_titles(make, monkeypatch),
        "states": lambda: check_states(monkeypatch),
    }
    with mutated(function, changes), pytest.raises(AssertionError):
        checks[check]()
