"""The GPU worker's life on an imitated device: start, steps, switches, sleep, updates, shutdown."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.distributed import parallel_state
from vllm.distributed.device_communicators.custom_all_reduce import CustomAllreduce
from vllm.v1.executor import multiproc_executor
from vllm.v1.worker.gpu_worker import Worker

from pat_vllm.worker.gpu_worker import PATGPUWorker
from pat_vllm.worker.late_memory import staged_by_switches
from tests.gpuless.device_memory import DeviceMemory
from tests.gpuless.gpu_engine import Engine, engine_config, imitate_gpus, load_worker, start_worker
from tests.gpuless.gpu_runner import LAYOUTS, NUM_LAYERS, RUNNERS, TABLES, Needs, Runner
from tests.gpuless.replaced import replace

MiB = 1 << 20
SEEDS = range(2)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[DeviceMemory]:
    with DeviceMemory(monkeypatch) as device:
        yield device


@pytest.fixture
def needs(request: pytest.FixtureRequest) -> Needs:
    """What layouts take of the device's memory."""
    return getattr(request, "param", Needs())


@pytest.fixture(params=RUNNERS)
def engine(
    request: pytest.FixtureRequest,
    device: DeviceMemory,
    monkeypatch: pytest.MonkeyPatch,
    needs: Needs,
) -> Engine:
    """An engine with each of vLLM's model runners."""
    imitate_gpus(monkeypatch, device, request.param)
    monkeypatch.setattr(Runner, "needs", needs)
    return Engine(start_worker())


def models(engine: Engine) -> dict[int, Any]:
    """By tp."""
    return {layout.tp: runtime.runner.model for layout, runtime in engine.worker._runtimes.items()}


NEEDS = {
    "the base layout's steps": Needs(),
    "the widest layout's steps": Needs(activations={1: MiB, 2: 2 * MiB, 4: 4 * MiB}),
    "switches": Needs(activations=dict.fromkeys((1, 2, 4), MiB)),
    "nothing": Needs(*[dict.fromkeys((1, 2, 4), 0)] * 4),
}
"""By what takes most."""


def allowed_by(worker: Any) -> int:
    """Bytes. vLLM does not count what a runner allocates with its KV cache."""
    return int(worker.requested_memory) + 4 * TABLES + Runner.needs.workspace[1]


@pytest.mark.parametrize("needs", NEEDS.values(), ids=NEEDS, indirect=True)
def test_what_an_engine_does_fits(device: DeviceMemory, engine: Engine) -> None:
    """Steps and switches of every layout fit in what the user allows, and KV gets the rest."""
    worker = engine.worker
    assert worker._active.layout == worker._setup.default_layout == LAYOUTS[0]
    assert parallel_state._TP is worker._active.group
    allowed = allowed_by(worker)
    assert device.most_used <= allowed
    engine.step()
    for source, target in itertools.permutations(LAYOUTS, 2):
        for layout in (source, target):
            if layout != engine.layout:
                engine.switch_to(layout)
            assert parallel_state._TP is worker._active.group
            engine.step()
    assert device.most_used <= allowed
    assert torch.cuda.graph_pool_handle() != torch.cuda.graph_pool_handle(), "pools are new again"
    block = device.used("kv_cache") // worker._base.kv_cache_config.num_blocks
    left = allowed - device.most_used
    assert left <= 2 * block, "memory that nothing ever takes"
    kv = worker._buffer.buffer.nbytes
    assert device.used("kv_cache") == kv, "one buffer for all layouts"
    for layout, runtime in worker._runtimes.items():
        assert runtime.kv_cache_config.num_blocks == kv * layout.tp // block
        views = runtime.connector.kv_caches.values()
        assert len(views) == NUM_LAYERS and sum(view.nbytes for view in views) == kv


@pytest.mark.parametrize("runner", RUNNERS)
def test_graphs_that_are_measured_give_peers_no_memory(
    device: DeviceMemory, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """By custom all-reduce, which registers what other graphs read."""
    imitate_gpus(monkeypatch, device, runner)
    stock, capture, registers = CustomAllreduce.all_reduce, device.capture, []

    def noted(*args: Any) -> int:
        registers.append(CustomAllreduce.all_reduce is stock)
        return capture(*args)

    monkeypatch.setattr(device, "capture", noted)
    start_worker()
    assert registers and not any(registers)
    assert CustomAllreduce.all_reduce is stock


@pytest.mark.parametrize("runner", RUNNERS)
def test_kv_cache_as_a_user_says(
    device: DeviceMemory, monkeypatch: pytest.MonkeyPatch, runner: str
) -> None:
    """Without an estimate for CUDA graphs, in so many bytes, or in all that one layout leaves."""
    imitate_gpus(monkeypatch, device, runner)
    worker = load_worker()
    available = {}
    for estimate in "01":
        monkeypatch.setenv("VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS", estimate)
        available[estimate] = worker.determine_available_memory()
    graphs, staged = max(Runner.needs.graphs.values()), staged_by_switches(worker._runtimes)
    tables = 4 * TABLES * len(LAYOUTS)  # which stay
    assert graphs / (1 + staged) - 1 <= available["0"] - available["1"] <= graphs + tables
    setup = worker._setup
    options = setup.options.model_copy(update={"kv_transfer": "recompute"})
    worker._setup = dataclasses.replace(setup, options=options)
    monkeypatch.setattr("pat_vllm.worker.gpu_worker.staged_by_switches", lambda of: 1 / 0)
    assert worker.determine_available_memory() >= available["1"], "no switch stages KV"
    worker.cache_config.kv_cache_memory_bytes = MiB
    assert worker.determine_available_memory() == MiB
    worker.cache_config.kv_cache_memory_bytes = 1
    worker._setup = dataclasses.replace(setup, chosen={"more_room": "name pat.base_tp=2"})
    with pytest.raises(ValueError, match=r"=1 leaves 0.00 GiB .* For more room name pat.base_tp=2"):
        worker.determine_available_memory()
    worker._base.config.model_config.original_max_model_len = -1
    assert worker.determine_available_memory() == 1
    worker.cache_config.kv_cache_memory_bytes = None
    worker._runtimes = {worker._base.layout: worker._base}
    assert worker.determine_available_memory() == Worker.determine_available_memory(worker)


def test_what_layouts_share_is_there_once(device: DeviceMemory, engine: Engine) -> None:
    """No pool keeps what was freed when layouts took the widest one's, which is the largest."""
    needed = sum(t.nbytes for model in models(engine).values() for t in model.state_dict().values())
    needed += 4 * engine.worker._base.runner.counters * LAYOUTS[-1].tp
    assert device.used("weights") == needed
    weights = sum(model.weight.nbytes for model in models(engine).values())
    assert engine.worker._base.runner.model_memory_usage == weights
    kept = device.used("runtime") + device.used("cudagraph")
    engine.sleep(level=1)
    backed = [data.cpu_backup_tensor for data in device.allocator.pointer_to_data.values()]
    assert sum(backup.nbytes for backup in backed if backup is not None) == needed + kept


def test_a_process_is_titled_by_its_rank_among_all(
    device: DeviceMemory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As vLLM does it between `init_device` and `load_model`."""
    imitate_gpus(monkeypatch, device)
    named: list[str] = []
    alone = SimpleNamespace(world_size=1, rank_in_group=0)
    for name in ("_PP", "_DP", "_PCP", "_DCP"):
        replace(parallel_state, name, alone, monkeypatch.setattr)
    for name in ("set_process_title", "decorate_logs"):
        replace(multiproc_executor, name, lambda name: named.append(name), monkeypatch.setattr)
    worker: Any = PATGPUWorker(engine_config(), 0, 0, "", is_driver_worker=True)
    worker.init_device()
    multiproc_executor.WorkerProc.setup_proc_title_and_log_prefix(enable_ep=False)
    assert named == ["Worker_TP0"] * 2


def test_parameters_that_survive_a_sleep_are_the_base_layout_s(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other layouts' are derived from them, whichever layout is active."""
    seen: list[Any] = []

    def save(self: Any, model: Any) -> None:
        seen.append(model)
        self._sleep_saved_parameters = {"weight": model.weight.clone()}

    def restore(self: Any, model: Any) -> None:
        seen.append(model)
        model.weight.copy_(self._sleep_saved_parameters.pop("weight"))

    worker = engine.worker
    engine.switch_to(LAYOUTS[1])
    with monkeypatch.context() as patched:
        replace(Worker, "_save_sleep_parameters", save, patched.setattr)
        replace(Worker, "_restore_sleep_parameters", restore, patched.setattr)
        engine.sleep(2)
        engine.wake_up(None)
    assert seen == [worker._base.runner.model] * 2
    assert worker._active.layout == LAYOUTS[1]
    assert worker.model_runner is worker._active.runner
    engine.step()


def addresses(engine: Engine) -> list[int]:
    """Of what CUDA graphs have captured: weights, buffers and KV of every layout."""
    runtimes = engine.worker._runtimes.values()
    views = [view for runtime in runtimes for view in runtime.connector.kv_caches.values()]
    weights = [each for model in models(engine).values() for each in model.state_dict().values()]
    return [tensor.data_ptr() for tensor in (*views, *weights)]


def any_order(device: DeviceMemory, engine: Engine, seed: int) -> None:
    """What vLLM allows, in any order: what is awake is whole, and what sleeps takes no memory.

    KV memory may go before any sleep, as for `release_kv_cache_memory`. Any wake-up brings back
    what runners have beside weights and KV.
    """
    rng = random.Random(seed)
    worker = engine.worker
    tags = ("weights", "kv_cache")
    captured = addresses(engine)
    used = {tag: device.used(tag) for tag in tags}
    kept = {tag: device.used(tag) for tag in ("runtime", "cudagraph")}
    assert kept["runtime"] == 4 * TABLES * len(LAYOUTS) + Runner.needs.workspace[1]
    updates, lost, deep = 0, False, False  # updates; weights are lost; nothing has woken up yet
    for _ in range(200):
        asleep = frozenset(engine.sleeping_tags)
        do = rng.choice(["sleep", "sleep", "wake", "wake", "discard", "update", "switch", "step"])
        if do == "sleep":
            level = rng.choice([1, 2])
            engine.sleep(level)
            if "weights" not in asleep:
                deep, lost = True, lost or level == 2
        elif do == "wake":
            engine.wake_up(rng.choice([None, ["weights"], ["kv_cache"], ["kv_cache", "weights"]]))
            deep = deep and asleep == engine.sleeping_tags
        elif do == "discard":
            engine.discard(("kv_cache",))
        elif do == "update" and "weights" not in asleep and not deep:
            updates, lost = updates + 1, False
            engine.update(updates)
        elif do == "switch" and not asleep:
            engine.switch_to(rng.choice([layout for layout in LAYOUTS if layout != engine.layout]))
        elif do == "step" and not asleep and not lost:
            engine.step()

        for tag, size in used.items():
            assert device.used(tag) == (0 if tag in engine.sleeping_tags else size), (do, tag)
        for tag, size in kept.items():
            assert device.used(tag) == (0 if deep else size), (do, tag)
        if "weights" not in engine.sleeping_tags:
            assert all(
                bool((model.cache == 10.0 + tp).all()) for tp, model in models(engine).items()
            )
            base = worker._base.runner
            assert lost or bool((base.model.weight == base.expected).all()), do
        else:
            assert worker._weights.arranged == LAYOUTS[0].tp
        assert worker._active.layout == engine.layout, do
        assert addresses(engine) == captured, do
        assert worker.model_runner is worker._active.runner
    assert device.most_used <= allowed_by(worker)


@pytest.mark.parametrize("seed", SEEDS)
def test_sleep_wake_up_discard_update_switch_and_step(
    device: DeviceMemory, engine: Engine, seed: int
) -> None:
    any_order(device, engine, seed)


@pytest.mark.parametrize("active", range(len(LAYOUTS)))
def test_shutdown(
    device: DeviceMemory, engine: Engine, monkeypatch: pytest.MonkeyPatch, active: int
) -> None:
    """Every layout's runner is shut down once, and no tensor lies in a pool that is released.

    Every layout's group is destroyed in its place, and vLLM's own is left to vLLM.
    """
    worker = engine.worker
    if active:
        engine.switch_to(LAYOUTS[active])
    runners = [runtime.runner for runtime in worker._runtimes.values()]
    *groups, own = (runtime.group for runtime in worker._runtimes.values())
    at_release: list[Any] = []

    def release() -> None:
        at_release.append([runner.is_shut_down for runner in runners])
        at_release.append([list(group.destroyed) for group in groups])
        at_release.append(device.referred_to("kv_cache"))

    monkeypatch.setattr(device.allocator, "release_pools", release)
    assert device.referred_to("kv_cache")
    worker.shutdown()
    assert at_release == [[1, 1, 1], [[], []], 0]
    assert [group.destroyed for group in groups] == [[group] for group in groups]
    assert parallel_state._TP is own and not own.destroyed


def test_a_worker_that_has_no_device_yet_is_shut_down(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[Any] = []
    replace(Worker, "shutdown", lambda worker: ended.append(worker), monkeypatch.setattr)
    worker: Any = PATGPUWorker.__new__(PATGPUWorker)
    worker.shutdown()
    assert ended == [worker]
