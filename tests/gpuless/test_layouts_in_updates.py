"""New weights as trainers send them: in parts, and to one rank each."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from vllm.config import VllmConfig
from vllm.distributed.weight_transfer import nccl_common
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
    record_metadata_for_reloading,
)
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.request import RequestStatus

from pat_vllm.executor.messages import Refreshed
from pat_vllm.layout import Layout
from pat_vllm.start.setup import Setup
from pat_vllm.worker.layout_config import layout_config
from pat_vllm.worker.layout_weights import LayoutWeights
from pat_vllm.worker.worker import PATWorkerMixin
from tests.gpuless.replaced import replace
from tests.vllm import without_workers

RANKS = 8
SINGLE, PAIRS = Layout.of(1, RANKS), Layout.of(2, RANKS)


class TwoLayers(nn.Module):
    """A model of the base layout, which a trainer may send a layer at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2, bias=False)
        self.second = nn.Linear(2, 2, bias=False)
        self.requires_grad_(False)


class Halves:
    """In place of PAT's strategies: the other layout has the first row of each weight."""

    def __init__(self) -> None:
        self.arranged = 1

    def refresh(self, base: TwoLayers, others: list[TwoLayers]) -> None:
        for weight, other in zip(base.parameters(), others[0].parameters(), strict=True):
            other.copy_(weight[:1].expand(2, 2))

    def arrange(self, layout: Layout) -> int:
        self.arranged = layout.tp
        return 0


@pytest.mark.parametrize("of_drafter", [False, True], ids=["target", "drafter"])
def test_layouts_wait_for_whole_weights(of_drafter: bool) -> None:
    """By vLLM's own reload, layer by layer, as its weight transfers make it."""
    base, other, *others = (TwoLayers() for _ in range(4))
    strategy, of_others = Halves(), Halves()
    weights: Any = LayoutWeights.__new__(LayoutWeights)
    weights._strategy, weights._packed, weights._kv_scales = strategy, False, []
    getters = {"get_model": (base, other)}
    if of_drafter:  # the models with the reload are drafters
        weights._strategy, weights._of_drafter = of_others, strategy
        getters = {"get_draft_model": (base, other), "get_model": (others[0], others[1])}
    weights._runtimes = [
        SimpleNamespace(
            runner=SimpleNamespace(
                **{name: lambda model=models[i]: model for name, models in getters.items()}
            )
        )
        for i in range(2)
    ]

    def whole() -> bool:
        rows = zip(base.parameters(), other.parameters(), strict=True)
        return all(bool((own[:1] == theirs).all()) for own, theirs in rows)

    record_metadata_for_reloading(base)
    for value in (1.0, 2.0):
        strategy.arranged = 1
        initialize_layerwise_reload(base)
        for name in ("first", "second"):
            before = [weight.clone() for weight in other.parameters()]
            assert weights.refresh(PAIRS) is Refreshed.MISSING
            assert strategy.arranged == 1, "the rest is to come to the base layout"
            assert all(map(torch.equal, before, other.parameters()))
            weight = getattr(base, name).weight
            weight.weight_loader(weight, torch.full((2, 2), value))
        finalize_layerwise_reload(base, SimpleNamespace(dtype=torch.float32))
        assert weights.refresh(PAIRS) is Refreshed.DONE
        assert strategy.arranged == 2 and whole()
        assert bool((base.second.weight == value).all())


def steps_end(scheduler: Any) -> None:
    for replica in scheduler.replica_set.replicas:
        replica.in_flight.clear()


@pytest.mark.parametrize("pause", [PauseState.UNPAUSED, PauseState.PAUSED_ALL])
def test_steps_wait_for_weights(pause: PauseState, monkeypatch: pytest.MonkeyPatch) -> None:
    """A paused engine still tells its workers of requests that are gone."""
    scheduler = without_workers.pat_scheduler(1, num_blocks=80)
    for name in ("stays", "goes"):
        scheduler.add_request(without_workers.request(name, 0))
    scheduler.set_pause_state(pause)
    scheduler.finish_requests("goes", RequestStatus.FINISHED_ABORTED)
    monkeypatch.setattr(without_workers.EXECUTOR, "waits_for_weights", lambda: True)
    assert bool(scheduler.schedule().steps) == (pause == PauseState.PAUSED_ALL)
    assert scheduler.has_requests()
    monkeypatch.undo()
    steps_end(scheduler)
    scheduler.set_pause_state(PauseState.UNPAUSED)
    (step,) = scheduler.schedule().steps.values()
    assert step.total_num_scheduled_tokens


def test_no_switch_in_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = without_workers.pat_scheduler(1, num_blocks=80)
    assert scheduler.controller.request_switch(2)
    executor = without_workers.EXECUTOR
    switch = mock.Mock(wraps=executor.switch)
    monkeypatch.setattr(executor, "switch", switch)
    scheduler.add_request(without_workers.request("r", 0))
    scheduler.schedule()
    steps_end(scheduler)
    monkeypatch.setattr(executor, "refresh_weights", lambda: False)
    # A client goes away while its request is paused, and the engine has nothing left to do.
    scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    scheduler.controller.before_step()
    assert scheduler.controller.request_switch(4) is False
    assert "finish_weight_update" in scheduler.controller.report().refused[-1].why
    assert not switch.called
    monkeypatch.setattr(executor, "refresh_weights", lambda: True)
    scheduler.controller.before_step()
    (command,) = switch.call_args.args
    assert command.target == SINGLE, "back, when the weights are there"


def test_a_batch_ends_while_weights_are_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """What was asked for in it does not hold in the next, which comes before the weights."""
    scheduler = without_workers.pat_scheduler(1, num_blocks=80)
    scheduler.add_request(without_workers.request("r", 0))
    assert scheduler.controller.request_switch(2)
    scheduler.schedule()
    steps_end(scheduler)
    scheduler.finish_requests("r", RequestStatus.FINISHED_ABORTED)
    monkeypatch.setattr(without_workers.EXECUTOR, "refresh_weights", lambda: False)
    monkeypatch.setattr(without_workers.EXECUTOR, "weights_version", 1)
    batch_over = mock.Mock(wraps=scheduler.monitor.batch_over)
    monkeypatch.setattr(scheduler.monitor, "batch_over", batch_over)
    for name in ("next", "and one more"):
        scheduler.add_request(without_workers.request(name, 0))
    batch_over.assert_called_once_with()
    choose = mock.Mock(return_value=SINGLE)
    monkeypatch.setattr(type(scheduler.monitor.policy), "choose", choose)
    monkeypatch.setattr(without_workers.EXECUTOR, "refresh_weights", lambda: True)
    scheduler.controller.before_step()
    assert scheduler.controller.report().layout == SINGLE, "the policy is asked again"


def test_places_in_a_trainers_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's weight transfers over NCCL: a group of the trainer and of each worker once."""
    joined: list[int] = []

    def join(host: str, port: int, rank: int, world_size: int, device: Any) -> None:
        joined.append(rank)

    replace(nccl_common, "stateless_init_process_group", join, monkeypatch.setattr)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    engine = VllmConfig(additional_config={"pat": {}})
    engine.parallel_config.tensor_parallel_size = engine.parallel_config.world_size = RANKS
    for base in (SINGLE, PAIRS, Layout.of(4, RANKS), Layout.of(8, RANKS)):
        joined.clear()
        # Shards, where a trainer sends them, are in the order of its mesh: replicas, then tp.
        for replica in range(base.replicas):
            for rank in base.ranks_of(replica):
                info = nccl_common.NCCLWeightTransferInitInfo(
                    master_address="a", master_port=1, rank_offset=1, world_size=RANKS + 1
                )
                config = layout_config(engine, Setup.of(engine), base, rank)
                nccl_common.worker_init_process_group(info, config.parallel_config)
        assert joined == list(range(1, RANKS + 1))


def test_each_rank_takes_its_own() -> None:
    class Receiver:
        def update_weights(self, update_info: Any) -> None:
            self.received = update_info

    worker: Any = type("Worker", (PATWorkerMixin, Receiver), {})()
    worker.rank = 5
    for given, received in (([*range(RANKS)], 5), ({"of": "all"}, {"of": "all"})):
        worker.update_weights(given)
        assert worker.received == received
