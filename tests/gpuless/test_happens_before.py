"""What orders accesses to the same memory on a device: the exchange, the side stream, row swaps,
weight loaders, outputs.

PAT's code runs on imitated devices, whose streams, events and memory are watched (`devices.py`).
Each check is made once more with a mistake in PAT's code, which it must find.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch

from pat_vllm.executor import lanes
from pat_vllm.kernels import swap
from pat_vllm.kernels.kv import TableBlocks
from pat_vllm.kv_transfer.exchange import CollectiveTransport, Exchange
from pat_vllm.weights import row_order
from pat_vllm.weights.inplace import InPlaceShards
from pat_vllm.weights.materialized import MaterializedShards
from pat_vllm.worker.side_stream import SideStream
from pat_vllm.worker.worker import PATWorkerMixin
from tests.gpuless.devices import CUDA, Devices, imitated
from tests.gpuless.order_checks import (
    check_exchange,
    check_loaders,
    check_loading_of_copies,
    check_loading_of_views,
    check_outputs,
    check_row_swaps,
    check_switches,
)
from tests.support.mutation import mutated

pytestmark = pytest.mark.slow

CHECKS = [
    check_switches,
    check_row_swaps,
    check_loaders,
    check_loading_of_copies,
    check_loading_of_views,
    check_outputs,
]
ELSEWHERE = "with torch.cuda.stream(torch.cuda.Stream()): "


# ------------------------------------------------------------------ the checker itself


@pytest.fixture
def device() -> Iterator[Devices]:
    with imitated(1) as devices, devices.on(0):
        yield devices


def races(devices: Devices) -> list[str]:
    """Those so far; they are forgotten."""
    gc.collect()
    found, devices.races.found = devices.races.found, []
    return found


@pytest.mark.parametrize("wait", ["stream", "event", "host", "too early", "none"])
def test_another_stream_has_to_wait(device: Devices, wait: str) -> None:
    side, event = torch.cuda.Stream(), torch.cuda.Event()
    rows = torch.zeros(4, 4, device=CUDA)
    if wait == "too early":
        event.record()
    rows[:2].fill_(1)
    if wait == "stream":
        side.wait_stream(torch.cuda.current_stream())
    elif wait == "host":
        torch.accelerator.synchronize()
    elif wait == "event":
        event.record()
    side.wait_event(event)
    with torch.cuda.stream(side):
        rows.clone()
    found = races(device)
    assert bool(found) == (wait in ("too early", "none")), found
    if wait == "too early":
        assert all("test_another_stream" in part for part in found[0].split(" and ")), found


def test_disjoint_columns_are_no_race(device: Devices) -> None:
    rows = torch.zeros(4, 4, device=CUDA)
    torch.accelerator.synchronize()
    rows[:, :2].fill_(1)
    with torch.cuda.stream(torch.cuda.Stream()):
        rows[:, 2:].fill_(2)
        assert not races(device)
        rows[:, 1:].sum()
        assert len(races(device)) == 1


@pytest.mark.parametrize("keep", ["recorded", "waited", "no"])
def test_memory_is_given_on_when_all_streams_are_done(device: Devices, keep: str) -> None:
    side, used = torch.cuda.Stream(), torch.zeros(64, device=CUDA)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        used.add_(1)
    if keep == "recorded":
        used.record_stream(side)  # type: ignore[arg-type]
    if keep == "waited":
        torch.cuda.current_stream().wait_stream(side)
    del used
    torch.zeros(64, device=CUDA)
    assert bool(races(device)) == (keep == "no")


@pytest.mark.parametrize("blocking", [False, True])
def test_the_host_has_to_wait_for_a_copy(device: Devices, blocking: bool) -> None:
    copy = torch.ones(4, device=CUDA).to("cpu", non_blocking=not blocking)
    assert copy.numpy().tolist() == [1.0] * 4
    assert bool(races(device)) == (not blocking)


# ------------------------------------------------------------------ PAT's code


@pytest.mark.parametrize("ranks", [2, 4])
def test_exchange(ranks: int) -> None:
    check_exchange(ranks)


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_order(check: Callable[[], None]) -> None:
    check()


# ------------------------------------------------------------------ mistakes

UNPACK = "unpacks.unpack(self._transport.finish(), self._begun.popleft())"
PACK = "packs.pack(_words(source), self._transport.send)"
TABLE = "torch.add(start[:, None], heads"
BEHIND = "self._stream.wait_stream(self._module.current_stream())"
WAIT = "self._stream.synchronize()"
ENTER = "if self._weights.arrange(runtime.layout):\n        self._synchronize_device()"
OUTPUT = "output = output.get_output()"

MISTAKES: list[tuple[Any, ...]] = [
    (
        "exchange: NCCL is not waited for",
        check_exchange,
        (CollectiveTransport.finish, {"work.wait()": "pass"}),
    ),
    (
        "exchange: the layer before is waited for",
        check_exchange,
        (
            CollectiveTransport.finish,
            {"work.wait()": "getattr(self, 'last', work).wait(); self.last = work"},
        ),
    ),
    (
        "exchange: two layers have one set of buffers",
        check_exchange,
        (CollectiveTransport.begin, {"self._free.popleft()": "self._free[0]"}),
    ),
    (
        "exchange: buffers of the layer under way are free",
        check_exchange,
        (CollectiveTransport.done, {"self._under_way.popleft()": "self._under_way.pop()"}),
    ),
    (
        "exchange: sends before it packs",
        check_exchange,
        (
            Exchange.run,
            {
                PACK: "send = self._transport.send",
                "self._transport.begin()": "self._transport.begin(); "
                "packs.pack(_words(source), send)",
            },
        ),
    ),
    (
        "exchange: packs on another stream",
        check_exchange,
        (Exchange.run, {PACK: ELSEWHERE + PACK}),
    ),
    (
        "exchange: unpacks on another stream",
        check_exchange,
        (Exchange._finish_one, {UNPACK: ELSEWHERE + UNPACK}),
    ),
    (
        "exchange: makes the table of blocks on another stream",
        check_exchange,
        (TableBlocks.__init__, {TABLE: ELSEWHERE + TABLE}),
    ),
    (
        "side stream: does not wait for the current one",
        check_switches,
        (SideStream.beside, {BEHIND: "pass"}),
    ),
    (
        "side stream: its event is recorded after the wait",
        check_switches,
        (
            SideStream.beside,
            {BEHIND: "event = self._module.Event(); event.wait(self._stream); event.record()"},
        ),
    ),
    (
        "side stream: waits for itself",
        check_switches,
        (SideStream.beside, {"self._module.current_stream()": "self._stream"}),
    ),
    (
        "side stream: works on a third",
        check_switches,
        (
            SideStream.beside,
            {"self._module.stream(self._stream)": "self._module.stream(self._module.Stream())"},
        ),
    ),
    (
        "side stream: is not waited for",
        check_switches,
        (PATWorkerMixin.pat_switch, {"self._side.wait()": "pass"}),
    ),
    (
        "side stream: the current one is waited for",
        check_switches,
        (PATWorkerMixin.pat_switch, {"self._side.wait()": "self._side.wait_for_current()"}),
    ),
    (
        "row swaps: on another stream",
        check_row_swaps,
        (InPlaceShards.arrange, {"move.run()": ELSEWHERE + "move.run()"}),
    ),
    (
        "row swaps: kernels on another stream",
        check_row_swaps,
        (swap._KernelRound.__call__, {"self._launch(": ELSEWHERE + "self._launch("}),
    ),
    (
        "row swaps: staged on another stream",
        check_row_swaps,
        (swap._CopyRound.__call__, {"kept.copy_(x)": ELSEWHERE + "kept.copy_(x)"}),
    ),
    (
        "row swaps: all rounds at once",
        check_row_swaps,
        (row_order.rounds, {"not made or any": "not made or False and any"}),
        (swap._check_disjoint, {"if not pairs:": "if True:"}),
    ),
    (
        "row swaps: sleep does not wait",
        check_row_swaps,
        (PATWorkerMixin.sleep, {"self._synchronize_device()": "pass"}),
    ),
    (
        "row swaps: replaced weights are taken over on another stream",
        check_row_swaps,
        (
            InPlaceShards.refresh,
            {"weight.tensor.copy_(new)": ELSEWHERE + "weight.tensor.copy_(new)"},
        ),
    ),
    (
        "loaders: rows are not waited for",
        check_loaders,
        (
            PATWorkerMixin._enter_for_a_call,
            {ENTER: "self._weights.arrange(runtime.layout)"},
        ),
    ),
    (
        "loaders: rows are waited for before they move",
        check_loaders,
        (
            PATWorkerMixin._enter_for_a_call,
            {ENTER: "self._synchronize_device(); self._weights.arrange(runtime.layout)"},
        ),
    ),
    (
        "loaders: start does not wait for the rows of the home layout",
        check_loaders,
        (
            PATWorkerMixin.compile_or_warm_up_model,
            {"self._enter_for_a_call(home)": "self._enter(home)"},
        ),
    ),
    (
        "loaders: of a switch, only the current stream waits",
        check_loaders,
        (SideStream.wait, {WAIT: "self._module.current_stream().wait_stream(self._stream)"}),
    ),
    (
        "loaders: replaced weights are not waited for",
        check_loaders,
        (PATWorkerMixin.pat_refresh_weights, {"self._synchronize_device()": "pass"}),
    ),
    (
        "loaders: shards are copied on another stream",
        check_loading_of_copies,
        (MaterializedShards._derive, {"into.copy_(": ELSEWHERE + "into.copy_("}),
    ),
    (
        "outputs: are read before they are there",
        check_outputs,
        (lanes._reply_to, {OUTPUT: f"output.sampled_token_ids.tolist(); {OUTPUT}"}),
    ),
]


@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake[0])
def test_a_mistake_is_found(mistake: tuple[Any, ...]) -> None:
    _, check, *changes = mistake
    with ExitStack() as stack:
        for function, change in changes:
            stack.enter_context(mutated(function, change))
        with pytest.raises(
            AssertionError, match=r"^(nothing orders|programs of a launch|memory given back)"
        ):
            check()
