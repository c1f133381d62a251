"""PAT's workers on imitated devices, around weights of vLLM's layers and views of a KV buffer."""

from __future__ import annotations

import functools
import itertools
import math
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.weight_transfer.packed_tensor import packed_nccl_broadcast_consumer
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.worker.worker_base import CompilationTimes

from pat_vllm.executor.messages import SwitchCommand
from pat_vllm.kv_transfer.connector import PATConnector
from pat_vllm.kv_transfer.exchange import Exchange
from pat_vllm.kv_transfer.plan import RequestBlocks, plan_moves
from pat_vllm.layout import Layout
from pat_vllm.weights.inplace import InPlaceShards
from pat_vllm.weights.model_weights import model_weights
from pat_vllm.worker import worker as worker_module
from pat_vllm.worker.layout_weights import LayoutWeights
from pat_vllm.worker.request_state import V2RequestStateTransfer
from pat_vllm.worker.runtime import LayoutRuntime
from pat_vllm.worker.side_stream import SideStream
from pat_vllm.worker.worker import PATWorkerMixin
from tests.gpuless.devices import CUDA, Devices
from tests.gpuless.nccl import Group, Trainer
from tests.gpuless.streams import unseen
from tests.support.kinds import full
from tests.vllm.weights.test_weights import CASES

RANKS = 4
LAYOUTS = tuple(Layout.of(tp, RANKS) for tp in (1, 2, 4))
KV_HEADS, LAYERS, BLOCKS, TOKENS, CONTENT = 4, 3, 16, 2, 4
LAYERS_OF_WEIGHTS = {
    case.name: case
    for case in CASES
    if case.name in ("qkv-8-4-4-4", "qkv-8-2-6-2", "gate_up", "column", "row")
}

A_LAYER = 3480
"""Bytes after which each of these layers, and no part of it, is a packed buffer. Where a layer
comes in several, vLLM's receiver gives memory back that another stream may still read."""

Weights = Iterable[tuple[str, torch.Tensor]]

_reload = threading.Lock()
"""vLLM keeps what it reloads by process, and ranks are threads here."""


def checkpoint(factor: float = 1.0) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors that a trainer sends, or that lie on disk: name, whole tensor."""
    for name, case in LAYERS_OF_WEIGHTS.items():
        for i, (_, _, shape) in sorted(
            enumerate(case.checkpoint), key=lambda item: math.prod(item[1][2])
        ):
            generator = torch.Generator().manual_seed(i)
            yield f"{name}/{i}", factor * torch.randn(shape, generator=generator)


def load_weights(model: nn.Module, weights: Weights) -> None:
    """By vLLM's loaders of the layers."""
    for name, tensor in weights:
        layer, i = name.split("/")
        attribute, shard, _ = LAYERS_OF_WEIGHTS[layer].checkpoint[int(i)]
        parameter = getattr(model[layer], attribute)  # type: ignore[index]
        parameter.weight_loader(parameter, tensor, *([] if shard is None else [shard]))


@functools.cache
def _vllm_config() -> VllmConfig:
    return VllmConfig()


def empty_model(tp: int, rank: int) -> nn.Module:
    """One of a rank in the layout of this tp, in pageable memory of the host."""
    at = Layout.of(tp, RANKS).tp_rank_of(rank)
    with set_current_vllm_config(_vllm_config()):
        return nn.ModuleDict(
            {name: case.empty(tp, at)["layer"] for name, case in LAYERS_OF_WEIGHTS.items()}
        )


@functools.cache
def expected(tp: int, rank: int) -> dict[str, torch.Tensor]:
    """What vLLM loads there."""
    model = empty_model(tp, rank)
    with torch.no_grad():
        load_weights(model, checkpoint())
    return {weight.name: weight.tensor for weight in model_weights(model)}


def to_device(devices: Devices, model: nn.Module) -> nn.Module:
    """The same model, with parameters in the device's memory."""
    for parameter in model.parameters():
        parameter.data = devices.hold(parameter.data)
    return model


class Runner:
    """A model runner that reads all weights and all KV, and writes KV."""

    def __init__(self, model: nn.Module, kv: list[torch.Tensor]) -> None:
        self.req_states, self.speculator = SimpleNamespace(req_id_to_index={}), None
        self._model = model
        self._kv = kv

    def get_model(self) -> nn.Module:
        return self._model

    def reset_encoder_cache(self) -> None:
        """It takes text alone."""

    def reset_mm_cache(self) -> None:
        """Likewise."""

    def execute_model(self) -> torch.Tensor:
        """Queue a step; returns something of its output, on the device."""
        every = [weight.current.clone() for weight in model_weights(self._model)]
        for view in self._kv:
            view.copy_(view.clone())
        return every[-1].reshape(-1)[:1].clone()


class Stock:
    """In place of vLLM's worker."""

    devices: Devices
    model_runner: Runner

    def compile_or_warm_up_model(self) -> CompilationTimes:
        self.model_runner.execute_model()
        return CompilationTimes(language_model=0.0, encoder=0.0)

    def sleep(self, level: int) -> None:
        # By the driver's own calls, which the streams know nothing of.
        for weight in model_weights(self.model_runner.get_model()):
            self.devices.by_host(weight.tensor, writes=True)


class Worker(PATWorkerMixin, Stock):  # type: ignore[misc]
    """A rank's, with calls of a trainer."""

    def step(self, read: bool = True) -> None:
        """A step of the active layout.

        Args:
            read: the engine has its output before it goes on. No weight is read after the last
                collective of a step, so that this is as if all ranks had read it.
        """
        output = self.model_runner.execute_model()
        assert not self.devices.races.found  # and `imitated` says which
        if read:
            output.cpu()

    def receive(self, factor: float) -> None:
        """New weights, packed, by vLLM's own receiver, which loads on streams of its own."""
        weights = list(checkpoint(factor))
        model = self.model_runner.get_model()
        with _reload:
            initialize_layerwise_reload(model)
            packed_nccl_broadcast_consumer(
                iterator=iter(
                    [(name, (list(tensor.shape), tensor.dtype)) for name, tensor in weights]
                ),
                group=Trainer(self.devices, [tensor for _, tensor in weights]),
                src=0,
                post_unpack_func=functools.partial(load_weights, model),
                buffer_size_bytes=A_LAYER,
                num_buffers=2,
                device=CUDA,
            )
            finalize_layerwise_reload(model, None)

    def load(self, name: str, values: torch.Tensor) -> None:
        """A new weight by itself, as OpenRLHF and VeRL's receivers load it."""
        load_weights(self.model_runner.get_model(), [(name, values.to(CUDA, non_blocking=True))])

    def replace(self) -> None:
        """New weights that take the place of the parameters."""
        for weight in model_weights(self.model_runner.get_model()):
            weight.bind(weight.current.clone())

    def update(self, method: str, *args: Any) -> None:
        """As the executor has it done before the next step."""
        assert self.pat_call_in_base(method, args, {}) is None
        self.pat_refresh_weights()

    def switch(self, target: Layout, requests: list[RequestBlocks]) -> None:
        """As the executor has all ranks do it."""
        source = self._active.layout
        moves = tuple(plan_moves(source, target, full(KV_HEADS), requests))
        times = self.pat_switch(SwitchCommand(1, source, target, moves))
        assert bool(times.kv_bytes) == bool([m for m in moves if m.route.source_rank == self.rank])

    def check_weights(self, factor: float = 1.0) -> None:
        """The active layout's are what vLLM loads."""
        with unseen():
            wanted = expected(self._active.layout.tp, self.rank)
            for weight in model_weights(self.model_runner.get_model()):
                assert torch.equal(weight.current, factor * wanted[weight.name]), weight.name


def kv_views(buffer: torch.Tensor, layout: Layout) -> list[torch.Tensor]:
    """The layers of one buffer as a layout sees them: [blocks, heads, tokens, content]."""
    heads = layout.kv_heads_per_rank(KV_HEADS)
    layers = buffer.view(torch.float32).view(LAYERS, -1, TOKENS, heads, CONTENT)
    return [layer.transpose(1, 2) for layer in layers]


def some_requests(source: Layout, target: Layout) -> list[RequestBlocks]:
    """One for each replica, with two blocks; few enough for two layers to be under way."""
    count = max(source.replicas, target.replicas)
    return [
        RequestBlocks(
            f"request {i}",
            i % source.replicas,
            (1 + i // source.replicas, 9 + i // source.replicas),
            i % target.replicas,
            (2 + i // target.replicas, 10 + i // target.replicas),
        )
        for i in range(count)
    ]


def make_worker(devices: Devices, group: Group, rank: int, models: dict[int, nn.Module]) -> Worker:
    """A rank's, with weights loaded and KV allocated; all ranks do it together."""
    worker: Any = Worker()
    worker.devices, worker.rank, worker.device = devices, rank, CUDA
    worker._seed = worker._salt = 0
    buffer = devices.hold(
        torch.zeros(LAYERS * BLOCKS * KV_HEADS * TOKENS * CONTENT * 4, dtype=torch.uint8)
    )
    config: Any = SimpleNamespace(
        parallel_config=None,
        cache_config=None,
        compilation_config=None,
        load_config=None,
        scheduler_config=None,
        use_v2_model_runner=True,
        model_config=SimpleNamespace(get_total_num_kv_heads=lambda: KV_HEADS),
    )
    group_of_blocks = SimpleNamespace(kv_cache_spec=SimpleNamespace(block_size=TOKENS))
    worker._runtimes = {}
    for layout in LAYOUTS:
        views = kv_views(buffer, layout)
        connector = PATConnector.__new__(PATConnector)
        layers = {f"layer {i}": view for i, view in enumerate(views)}
        connector._group_of = dict.fromkeys(layers, 0)
        connector._specs = [
            FullAttentionSpec(
                block_size=TOKENS, num_kv_heads=KV_HEADS, head_size=1, dtype=torch.bfloat16
            )
        ]
        connector.register_kv_caches(layers)
        worker._runtimes[layout] = LayoutRuntime(
            layout,
            config,
            group=None,  # type: ignore[arg-type]
            runner=Runner(models[layout.tp], views),  # type: ignore[arg-type]
            kv_cache_config=SimpleNamespace(  # type: ignore[arg-type]
                num_blocks=BLOCKS, kv_cache_groups=[group_of_blocks]
            ),
            connector=connector,
        )
    worker._kinds = full(KV_HEADS, TOKENS)
    worker._base = worker._runtimes[LAYOUTS[0]]
    worker._setup = SimpleNamespace(default_layout=LAYOUTS[0])  # type: ignore[assignment]
    worker._weights = LayoutWeights.__new__(LayoutWeights)
    worker._weights._runtimes = tuple(worker._runtimes.values())
    worker._weights._base = worker._base
    worker._weights._packed = False
    worker._weights._kv_scales = []
    worker._weights._strategy = strategy = InPlaceShards(LAYOUTS, rank)
    base, *others = (models[layout.tp] for layout in LAYOUTS)
    with CUDA:
        record_metadata_for_reloading(base)
    load_weights(to_device(devices, base), checkpoint())
    strategy.check(base)
    strategy.capture(base)
    for model in others:
        strategy.fill(model)
    strategy.release()
    worker._state_transfer = V2RequestStateTransfer()
    worker._exchange = Exchange(group, CUDA)  # type: ignore[arg-type]
    worker._side = SideStream(CUDA)
    worker._activate(worker._base)
    return worker  # type: ignore[no-any-return]


def make_workers(devices: Devices) -> list[Worker]:
    """One for each rank."""
    group = Group(devices, RANKS)
    models = [
        {layout.tp: empty_model(layout.tp, rank) for layout in LAYOUTS} for rank in range(RANKS)
    ]
    for layout, rank in itertools.product(LAYOUTS, range(RANKS)):
        expected(layout.tp, rank)
    return devices.run(lambda rank: make_worker(devices, group, rank, models[rank]))


@contextmanager
def without_vllm() -> Iterator[None]:
    """Inside, workers leave alone what is vLLM's and has no part in the order of work."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "install_tp_group": lambda group: None,
            "cpu_world_group": lambda: None,
            "seed_replica": lambda *args: None,
            "set_current_vllm_config": lambda config: nullcontext(),
            "warm_up": lambda worker, *args: worker.step() or 1.0,
            "_PROBE_BYTES": 256,
        }.items():
            patch.setattr(worker_module, name, value)
        yield
