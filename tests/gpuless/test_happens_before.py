"""What orders accesses to the same memory on a device: the exchange, the side stream, row swaps,
weight loaders, outputs.

PAT's code runs on imitated devices, whose streams, events and memory are watched (`devices.py`),
with vLLM's weight loaders, receiver of packed weights and output of asynchronous steps. A test
fails with the races that were seen.
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.worker.gpu.async_utils import AsyncOutput
from vllm.v1.worker.gpu.sample.output import SamplerOutput

from pat_vllm.executor import lanes
from pat_vllm.executor.lanes import WorkerLanes
from pat_vllm.kv_transfer.exchange import Exchange, Part
from pat_vllm.kv_transfer.plan import RankMoves
from pat_vllm.layout import Layout
from pat_vllm.weights.inplace import InPlaceShards
from pat_vllm.weights.materialized import MaterializedShards
from pat_vllm.weights.model_weights import model_weights
from pat_vllm.worker import weight_updates
from tests.gpuless import rank_worker
from tests.gpuless.devices import CUDA, imitated
from tests.gpuless.nccl import Group
from tests.gpuless.rank_worker import (
    LAYOUTS,
    RANKS,
    Worker,
    checkpoint,
    make_workers,
    some_requests,
)
from tests.gpuless.streams import Queue
from tests.vllm.kv_transfer import test_exchange as exchanges

LOADED_RANK = 1


def test_exchange() -> None:
    """KV moves between layouts as planned, and the model goes on with it."""
    with imitated(RANKS) as devices:
        group = Group(devices, RANKS)
        cases = [exchanges._random_case(seed, RANKS) for seed in range(6)]

        def rank_main(rank: int) -> None:
            exchange = Exchange(group, CUDA)  # type: ignore[arg-type]
            exchange.measure(64)
            for source, target, heads, dtype, heads_first, moves in cases:
                size = heads * dtype.itemsize
                size *= exchanges.LAYERS * exchanges.BLOCKS * exchanges.TOKENS * exchanges.CONTENT
                buffer = torch.zeros(size, dtype=torch.uint8, device=CUDA)
                old, new = (
                    exchanges._views(buffer, layout, heads, dtype, heads_first)
                    for layout in (source, target)
                )
                for view in old:
                    view.copy_(view.clone())  # a step
                with exchange.staging([Part(RankMoves.of(rank, RANKS, moves), old[0], new[0])]):
                    for pair in zip(old, new, strict=True):
                        exchange.run([pair])
                for view in new:
                    view.copy_(view.clone())

        devices.run(rank_main)


def run_workers(function: Callable[[Worker], None]) -> None:
    """Call it for the worker of each rank."""
    with imitated(RANKS) as devices, rank_worker.without_vllm():
        workers = make_workers(devices)
        devices.run(lambda rank: function(workers[rank]))


def test_switches() -> None:
    """Weights move beside KV, and both are there when the model goes on."""
    walk = (0, 1, 2, 1, 0, 2, 0)

    def rank_main(worker: Worker) -> None:
        for source, target in itertools.pairwise(LAYOUTS[i] for i in walk):
            worker.step(read=False)
            worker.switch(target, some_requests(source, target))
            worker.step(read=False)
            worker.check_weights()

    run_workers(rank_main)


def test_row_swaps() -> None:
    """Layouts are entered as at start, and left for sleep."""

    def rank_main(worker: Worker) -> None:
        for i in (1, 2, 0, 2, 1):
            worker._enter(worker._runtimes[LAYOUTS[i]])
            worker.step()
            worker.check_weights()
        worker.sleep(1)
        worker.update("replace")
        worker.step()
        worker.check_weights()

    run_workers(rank_main)


def test_loaders() -> None:
    """New weights come on streams of their own, whatever was done before."""

    def rank_main(worker: Worker) -> None:
        factors = itertools.count(2)

        def receive() -> None:
            worker.update("receive", factor := float(next(factors)))
            worker.check_weights(factor)

        worker.compile_or_warm_up_model()
        receive()
        worker.step()
        for target in (LAYOUTS[2], LAYOUTS[0]):
            worker.switch(target, [])
            receive()
            worker.step()
        worker.update("replace")
        receive()
        worker.step(read=False)
        receive()

    run_workers(rank_main)


def test_buckets() -> None:
    """Weights come one after the other on the current stream, steps and switches in between."""

    def rank_main(worker: Worker) -> None:
        layouts = itertools.cycle(LAYOUTS[1:] + LAYOUTS[:1])
        worker.compile_or_warm_up_model()
        for factor in (2.0, 3.0):
            for name, values in checkpoint(factor):
                worker.update("load", name, values)
                worker.step(read=False)
                worker.switch(next(layouts), [])
            for layout in LAYOUTS:
                worker.switch(layout, [])
                worker.check_weights(factor)

    run_workers(rank_main)


def test_a_call_in_every_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    """It finds rows in place, whichever stream it reads them on."""
    monkeypatch.setattr(weight_updates, "_IN_EVERY_LAYOUT", {"look"})

    def rank_main(worker: Any) -> None:
        seen: list[int] = []

        def look() -> None:
            seen.append(worker._active.layout.tp)
            worker.check_weights()
            stream = torch.cuda.Stream()
            with torch.cuda.stream(stream):
                for weight in model_weights(worker.model_runner.get_model()):
                    weight.current.clone()
            stream.synchronize()

        worker.look = look
        worker.step()
        worker.pat_call_in_base("look", (), {})
        assert seen == [2, 4, 1]

    run_workers(rank_main)


@pytest.mark.parametrize(
    "make", [MaterializedShards, lambda: InPlaceShards(LAYOUTS, LOADED_RANK)], ids=["copy", "view"]
)
def test_loading(make: Callable[[], Any]) -> None:
    """The base layout is loaded from disk; the others' weights are copies or views of its."""
    strategy, rank = make(), LOADED_RANK
    models = {layout.tp: rank_worker.empty_model(layout.tp, rank) for layout in LAYOUTS}
    wanted = {tp: rank_worker.expected(tp, rank) for tp in models}
    with imitated(RANKS) as devices, devices.on(rank):
        for model in models.values():
            rank_worker.to_device(devices, model)
        base, *others = models.values()
        strategy.check(base)
        rank_worker.load_weights(base, rank_worker.checkpoint())
        strategy.capture(base)
        for model in others:
            strategy.fill(model)
        strategy.release()
        for tp in (2, 4, 1):
            strategy.arrange(Layout.of(tp, RANKS))
            for weight in model_weights(models[tp]):
                values = weight.current.clone().cpu()
                assert torch.equal(values, wanted[tp][weight.name])


def test_outputs() -> None:
    """A step's output is copied on a stream of its own, and read in another thread."""
    replies: Any = queue.SimpleQueue()

    with imitated(1) as devices, devices.on(0), pytest.MonkeyPatch.context() as patch:
        patch.setattr(lanes, "queue", SimpleNamespace(SimpleQueue=Queue))
        platform = SimpleNamespace(set_device=lambda device: devices.another_thread(0))
        patch.setattr(lanes, "current_platform", platform)
        ends: Any = WorkerLanes.__new__(WorkerLanes)
        ends._device, ends._finishing = CUDA, None
        ends._reply = SimpleNamespace(enqueue=replies.put)
        main, copies = torch.cuda.current_stream(), torch.cuda.Stream()
        for step in range(4):
            sampled = torch.full((2, 1), step, device=CUDA)
            count = torch.ones(2, dtype=torch.int32, device=CUDA)
            output = SamplerOutput(sampled, None, None, count, count)
            result = ModelRunnerOutput(["a", "b"], {"a": 0, "b": 1})
            async_output = AsyncOutput(result, output, count, main, copies, False, None)
            del sampled, count, output
            ends._answer(async_output, None)
            del async_output
            succeeded, answer = replies.get(timeout=30)
            assert succeeded and answer.output.sampled_token_ids == [[step], [step]], answer
            del answer, result
