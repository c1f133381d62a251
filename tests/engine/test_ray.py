"""Engines whose workers are Ray actors: they do what engines of local processes do.

One cluster of two nodes serves all tests. Its nodes are both on this machine, but nothing of PAT or
vLLM knows that: a rank on the other one is reached over TCP. Its GPUs exist in Ray's books only
(tests/support/ray_on_cpu).
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import pat_vllm
from tests.engine.test_switch import Case, at_steps, batch
from tests.support.engines import OPTIONS, engine, engine_processes, run
from tests.support.faults import assert_a_worker_killed_in_a_switch_ends_the_engine
from tests.support.models import random_model
from tests.support.on_ray import process_id, where
from tests.support.ray_nodes import GONE_WITHIN, ray_nodes, until
from tests.support.ray_on_cpu import ray_on_cpu

ray = pytest.importorskip("ray")

ROOT = Path(__file__).parents[2]
HERE, ELSEWHERE = 4, 2
"""GPUs of the tests' own node, and of the other one."""


@pytest.fixture(scope="module")
def cluster() -> Iterator[str]:
    """Two nodes; this process is on the first, and its children can be."""
    import vllm.envs as envs
    import vllm.platforms.cpu as cpu

    path = [str(ROOT / "tests/support/ray_on_cpu"), str(ROOT), os.environ.get("PYTHONPATH", "")]
    environment: dict[str, Any] = {
        "PYTHONPATH": os.pathsep.join(path),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        # Lets functions of the tests travel to the workers.
        "VLLM_ALLOW_INSECURE_SERIALIZATION": "1",
    }
    with pytest.MonkeyPatch.context() as patch:
        ray_on_cpu.patch(cpu, patch.setattr)
        options: dict[str, Any] = {"cpus": 2, "object_store": 80 << 20, "log_to_driver": False}
        with ray_nodes(HERE, ELSEWHERE, **options, **environment) as address:
            envs.disable_envs_cache()
            yield address


@contextlib.contextmanager
def group_of(bundles: list[dict[str, float]], strategy: str = "PACK") -> Iterator[Any]:
    """A placement group, for a while."""
    group = ray.util.placement_group(bundles, strategy=strategy)
    try:
        assert group.wait(GONE_WITHIN), "the cluster's GPUs are not free"
        yield group
    finally:
        ray.util.remove_placement_group(group)


def ranks_go(elsewhere: bool) -> contextlib.AbstractContextManager[Any]:
    """While it lasts, engines without a placement group start their ranks here or elsewhere."""
    if elsewhere:
        return group_of([{"GPU": 1}] * HERE, "STRICT_PACK")  # leaves no GPU here
    return contextlib.nullcontext()


def in_bundle(group: Any, bundle: int, gpus: float, function: Any) -> Any:
    """Run a function as a Ray task."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=bundle)
    return ray.remote(num_cpus=0, num_gpus=gpus, scheduling_strategy=strategy)(function).remote()


def all_gpus_are_free() -> bool:
    return ray.available_resources().get("GPU") == HERE + ELSEWHERE


# ---------------------------------------------------------------- what is chosen, what is refused


def config(backend: Any = "pat", ranks: int = 2, **pat: Any) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(
        model=str(random_model("qwen3")),
        tensor_parallel_size=ranks,
        distributed_executor_backend=backend,
        additional_config={"pat": {"policy": {"kind": "static", "tp": 1}, **pat}},
        **OPTIONS,
    ).create_engine_config()


def executor_of(config: Any) -> Any:
    from vllm.v1.executor.abstract import Executor

    return Executor.get_class(config)


def chosen_inside() -> tuple[str, Any, Any]:
    """Runs in a task in a placement group."""
    from pat_vllm.patches.front_end import noted_ray_address

    inside = config()
    name = executor_of(inside).__name__
    return name, inside.parallel_config.placement_group, noted_ray_address(inside.parallel_config)


def test_the_launcher_is_chosen_by_the_placement_group(cluster: str) -> None:
    assert executor_of(config()) is pat_vllm.PATExecutor
    assert executor_of(config(launcher="ray")) is pat_vllm.PATRayExecutor
    assert executor_of(config("ray", enabled=True)) is pat_vllm.PATRayExecutor

    with group_of([{"GPU": 1}] * 2, "STRICT_PACK") as group:
        cases: list[tuple[dict[str, Any], type]] = [
            ({}, pat_vllm.PATRayExecutor),
            ({"launcher": "mp"}, pat_vllm.PATExecutor),
        ]
        for options, executor in cases:
            given = config(**options)
            given.parallel_config.placement_group = group
            assert executor_of(given) is executor

        name, seen, address = ray.get(in_bundle(group, 0, 0.5, chosen_inside))
        assert name == "PATRayExecutor"
        # The engine core's process, which is not in the group, finds both again by these.
        assert seen == group
        assert address == cluster


@pytest.mark.parametrize(
    "backend", ["class", "pat_vllm.PATRayExecutor", "pat_vllm.executor.ray.PATRayExecutor"]
)
def test_the_class_itself(backend: str, cluster: str) -> None:
    given = config(pat_vllm.PATRayExecutor if backend == "class" else backend)
    assert executor_of(given) is pat_vllm.PATRayExecutor
    assert given.parallel_config.worker_cls == "pat_vllm.worker.cpu_worker.PATCPUWorker"
    with pytest.raises(ValueError, match=r"launcher='mp', but .*=PATRayExecutor"):
        config(pat_vllm.PATRayExecutor, launcher="mp")


def test_ranks_on_several_nodes_are_refused(cluster: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine_processes()
    with group_of([{"GPU": 1}] * 2, "STRICT_SPREAD") as group:
        given = config()
        given.parallel_config.placement_group = group
        # The second time where the front end could not see the group.
        for start in (executor_of, pat_vllm.PATRayExecutor):
            with pytest.raises(ValueError, match=r"at most 1 bundles on one node.*one engine per"):
                start(given)
        for indices, message in {
            "0,1": "INDICES=0,1 names bundles on several nodes",
            "0;1": "INDICES='0;1' must be bundle indices",
        }.items():
            with monkeypatch.context() as patch:
                patch.setenv("VLLM_RAY_BUNDLE_INDICES", indices)
                with pytest.raises(ValueError, match=message):
                    executor_of(given)
        assert ray.util.placement_group_table(group)["state"] == "CREATED"

    wide = config(ranks=8, launcher="ray", layouts=[1, 8])
    with pytest.raises(ValueError, match=r"tensor_parallel_size=8, .*more than 4 GPUs.*one engine"):
        pat_vllm.PATRayExecutor(wide)
    assert until(lambda: not engine_processes(before))
    assert until(all_gpus_are_free)


# ---------------------------------------------------------------- an engine of two ranks elsewhere


@contextlib.contextmanager
def ray_case(model: str, ranks: int, elsewhere: bool) -> Iterator[Case]:
    """As `tests.engine.test_switch.case`, with ranks on one node or on the other.

    As where a trainer names the backend, and PAT is asked for by its option.
    """
    options: dict[str, Any] = {
        "max_num_batched_tokens": 1000,
        "distributed_executor_backend": "ray",
    }
    with ranks_go(elsewhere):
        with engine(model, ranks, {"kv_transfer": "migrate", "enabled": True}, **options) as llm:
            nodes, gpus, shares = zip(*llm.collective_rpc(where), strict=True)
            count = ELSEWHERE if elsewhere else HERE
            assert set(nodes) == {
                node["NodeID"] for node in ray.nodes() if node["Resources"].get("GPU") == count
            }
            assert sorted(gpus) == [[str(rank)] for rank in range(ranks)]
            assert set(shares) == {1}
            # Ray may have started their processes before the engine was made.
            workers = [psutil.Process(pid) for pid in llm.collective_rpc(process_id)]
            sizes = [layout.tp for layout in pat_vllm.report(llm).layouts]
            static = {tp: run(llm, batch(), before_step=at_steps(llm, {0: tp})) for tp in sizes}
            yield Case(llm, sizes, static)
        _, alive = psutil.wait_procs(workers, timeout=GONE_WITHIN)
        assert not alive
    assert until(all_gpus_are_free)


@pytest.fixture(scope="module")
def case(cluster: str) -> Iterator[Case]:
    with ray_case("llama_gqa", 2, elsewhere=True) as case:
        yield case


from tests.engine.test_switch import (  # noqa: E402, F401
    test_every_ordered_pair_of_layouts,
    test_half_prefilled_and_waiting_requests_are_carried,
    test_random_switch_storm,
    test_single_layouts_agree_and_differ_by_request,
)


def test_a_killed_worker_ends_the_engine(case: Case) -> None:
    assert_a_worker_killed_in_a_switch_ends_the_engine(case.llm)
