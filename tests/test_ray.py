"""Engines whose workers are Ray actors: they do what engines of local processes do.

One cluster of two nodes serves all tests. Its nodes are both on this machine, but nothing of PAT or
vLLM knows that: a rank on the other one is reached over TCP. Its GPUs exist in Ray's books only
(tests/support/ray_on_cpu).
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import pat_vllm
from tests import test_faults
from tests.engines import OPTIONS, engine_processes
from tests.models import random_model
from tests.support.on_ray import Host, process_id, where
from tests.support.ray_on_cpu import ray_on_cpu
from tests.test_switch import make_case

ray = pytest.importorskip("ray")

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parent.parent
HERE, ELSEWHERE = 4, 2
"""GPUs of the tests' own node, and of the other one."""
GONE_WITHIN = test_faults.GONE_WITHIN


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    """Two nodes; this process is on the first, and its children can be."""
    import vllm.envs as envs
    import vllm.platforms.cpu as cpu
    from ray.cluster_utils import Cluster

    support = ROOT / "tests" / "support" / "ray_on_cpu"
    path = [str(support), str(ROOT), os.environ.get("PYTHONPATH", "")]
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(prefix="pr") as scratch:
        patch.setenv("PYTHONPATH", os.pathsep.join(path))
        patch.setenv("RAY_USAGE_STATS_ENABLED", "0")
        # Ray would end workers when other programs use up the memory.
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        patch.setenv("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        # Lets functions of the tests travel to the workers.
        patch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
        for name in ("RAY_ADDRESS", "VLLM_RAY_BUNDLE_INDICES", "VLLM_RAY_PER_WORKER_GPUS"):
            patch.delenv(name, raising=False)
        ray_on_cpu.patch(cpu, patch.setattr)
        envs.disable_envs_cache()
        # `Cluster` writes down where it is for every Ray program of this user. Not so here: the
        # address is hidden from others, and from engines, which have to know it by themselves.
        hidden = {"RAY_TMPDIR": scratch}
        node = {"num_cpus": 2, "include_dashboard": False, "object_store_memory": 80 << 20}
        with environment(hidden):
            cluster = Cluster(initialize_head=True, head_node_args={**node, "num_gpus": HERE})
        try:
            with environment(hidden):
                cluster.add_node(**node, num_gpus=ELSEWHERE)
            ray.init(address=cluster.address, log_to_driver=False)
            yield cluster
        finally:
            ray.shutdown()
            with environment(hidden):
                cluster.shutdown()


@contextlib.contextmanager
def environment(variables: dict[str, str]) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield


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


def node_ids(elsewhere: bool) -> set[str]:
    gpus = ELSEWHERE if elsewhere else HERE
    return {node["NodeID"] for node in ray.nodes() if node["Resources"].get("GPU") == gpus}


def until(condition: Any) -> bool:
    """Whether a condition comes to hold in good time."""
    give_up = time.monotonic() + GONE_WITHIN
    while not condition():
        if time.monotonic() > give_up:
            return False
        time.sleep(0.2)
    return True


def all_gpus_are_free() -> bool:
    return ray.available_resources().get("GPU") == HERE + ELSEWHERE


# ---------------------------------------------------------------- the same tests


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(("llama_gqa", 2, True), id="two-on-another-node"),
        pytest.param(("llama_few_kv", 4, False), id="four", marks=pytest.mark.nightly),
    ],
)
def case(request: Any, cluster: Any) -> Iterator[Any]:
    model, ranks, elsewhere = request.param
    with ranks_go(elsewhere):
        with make_case(model, ranks, launcher="ray") as case:
            nodes, gpus, shares = zip(*case[0].collective_rpc(where), strict=True)
            assert set(nodes) == node_ids(elsewhere)
            assert sorted(gpus) == [[str(rank)] for rank in range(ranks)]
            assert set(shares) == {1}
            # Ray may have started their processes before the engine was made.
            workers = [psutil.Process(pid) for pid in case[0].collective_rpc(process_id)]
            yield case
        _, alive = psutil.wait_procs(workers, timeout=GONE_WITHIN)
        assert not alive
    assert until(all_gpus_are_free)


@pytest.mark.parametrize(
    ("sabotage", "tp", "elsewhere"),
    [
        pytest.param(test_faults.die_soon, 1, False, marks=pytest.mark.nightly),
        pytest.param(test_faults.die_in_exchange, 2, True, marks=pytest.mark.nightly),
    ],
)
def test_a_dead_worker_fails_the_engine_and_leaves_nothing(
    sabotage: Any, tp: int, elsewhere: bool, cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with ranks_go(elsewhere):
        pat = {"launcher": "ray"}
        test_faults.assert_a_dead_worker_is_noticed(pat, sabotage, tp, monkeypatch)
    assert until(all_gpus_are_free)


# ---------------------------------------------------------------- in a caller's placement group


@contextlib.contextmanager
def host_in(group: Any, bundle: int, **environment: str) -> Iterator[Any]:
    """A `Host` on a bundle, of which it leaves most to workers."""
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

    strategy = PlacementGroupSchedulingStrategy(
        group, placement_group_bundle_index=bundle, placement_group_capture_child_tasks=True
    )
    options = {"num_cpus": 0, "num_gpus": 0.2, "scheduling_strategy": strategy}
    host = ray.remote(Host).options(**options).remote(environment)
    try:
        yield host
    finally:
        ray.kill(host)


@pytest.mark.nightly
def test_a_caller_s_group_with_bundle_indices_and_parts_of_gpus(cluster: Any) -> None:
    """As OpenRLHF starts engines: beside a trainer's processes, on chosen bundles of its group.

    The policy decides on switches here, and the launcher is chosen by where the engine is made.
    """
    environment = {"VLLM_RAY_BUNDLE_INDICES": "2,1", "VLLM_RAY_PER_WORKER_GPUS": "0.3"}
    with group_of([{"GPU": 1, "CPU": 0.1}] * 3, "STRICT_PACK") as group:
        expected = [ray.get(in_bundle(group, bundle, 0.3, where)) for bundle in (2, 1)]
        with host_in(group, 1, **environment) as host:
            policy = {"kind": "schedule", "switch_at": {"4": 2}}
            assert ray.get(host.start.remote(2, {"policy": policy}))["workers"] == expected

            lengths = [20] * 6 + [120] * 2
            outputs = ray.get(host.generate.remote(lengths))
            assert [len(output) for output in outputs] == lengths
            made = [s for s in ray.get(host.report.remote()).switches if s.reason == "policy"]
            assert [s.target.tp for s in made if s.num_seqs] == [2]
            assert made[0].migrated > 0
            # Alone, it is in the group of two from its start.
            assert ray.get(host.generate.remote([120], first=6)) == [outputs[6]]

            ray.get(host.stop.remote())
            assert ray.util.placement_group_table(group)["state"] == "CREATED"
            # All of the GPU is free again.
            ray.get(in_bundle(group, 2, 1, where), timeout=GONE_WITHIN)
    assert until(all_gpus_are_free)


@pytest.mark.parametrize(
    "victim", [pytest.param("front end", marks=pytest.mark.nightly), "engine core"]
)
def test_a_killed_engine_leaves_nothing(victim: str, cluster: Any) -> None:
    """Its front end, an actor here, or its core, which owns the workers' actors."""
    with group_of([{"GPU": 1, "CPU": 0.1}] * 2) as group:
        with host_in(group, 0, VLLM_RAY_PER_WORKER_GPUS="0.5") as host:
            started = ray.get(host.start.remote(2, {}))
            front, core = (psutil.Process(started[name]) for name in ("pid", "core"))
            processes = [front, core, *map(psutil.Process, started["ranks"])]
            working = host.generate.remote([480] * 4)
            if victim == "front end":
                front.kill()
                with pytest.raises(ray.exceptions.ActorDiedError):
                    ray.get(working, timeout=GONE_WITHIN)
            else:
                core.kill()
                processes.remove(front)
                with pytest.raises(ray.exceptions.RayTaskError, match="EngineDeadError"):
                    ray.get(working, timeout=GONE_WITHIN)
            _, alive = psutil.wait_procs(processes, timeout=GONE_WITHIN)
            assert not alive
    assert until(all_gpus_are_free)


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

    made = config()
    name = executor_of(made).__name__
    return name, made.parallel_config.placement_group, noted_ray_address(made.parallel_config)


def test_the_launcher_is_chosen_by_the_placement_group(cluster: Any) -> None:
    assert executor_of(config()) is pat_vllm.PATExecutor
    assert executor_of(config(launcher="ray")) is pat_vllm.PATRayExecutor

    with group_of([{"GPU": 1}] * 2, "STRICT_PACK") as group:
        given = config()
        given.parallel_config.placement_group = group
        assert executor_of(given) is pat_vllm.PATRayExecutor
        given = config(launcher="mp")
        given.parallel_config.placement_group = group
        assert executor_of(given) is pat_vllm.PATExecutor

        name, found, address = ray.get(in_bundle(group, 0, 0.5, chosen_inside))
        assert name == "PATRayExecutor"
        # The engine core's process, which is not in the group, finds both again by these.
        assert found == group
        assert address == cluster.address


@pytest.mark.parametrize(
    "backend", ["class", "pat_vllm.PATRayExecutor", "pat_vllm.executor.ray.PATRayExecutor"]
)
def test_the_class_itself(backend: str, cluster: Any) -> None:
    given = config(pat_vllm.PATRayExecutor if backend == "class" else backend)
    assert executor_of(given) is pat_vllm.PATRayExecutor
    assert given.parallel_config.worker_cls == "pat_vllm.worker.cpu_worker.PATCPUWorker"
    with pytest.raises(ValueError, match=r"launcher='mp', but .*=PATRayExecutor"):
        config(pat_vllm.PATRayExecutor, launcher="mp")


def test_ranks_on_several_nodes_are_refused(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = engine_processes()
    with group_of([{"GPU": 1}] * 2, "STRICT_SPREAD") as group:
        given = config()
        given.parallel_config.placement_group = group
        apart = r"at most 1 bundles on one node.*one engine per node"
        with pytest.raises(ValueError, match=apart):
            executor_of(given)
        # Where the front end could not see the group.
        with pytest.raises(ValueError, match=apart):
            pat_vllm.PATRayExecutor(given)
        for indices, message in {
            "0,1": "INDICES=0,1 names bundles on several nodes",
            "0;1": "INDICES='0;1' must be bundle indices",
        }.items():
            monkeypatch.setenv("VLLM_RAY_BUNDLE_INDICES", indices)
            with pytest.raises(ValueError, match=message):
                executor_of(given)
        assert ray.util.placement_group_table(group)["state"] == "CREATED"
    monkeypatch.delenv("VLLM_RAY_BUNDLE_INDICES")

    wide = config(ranks=8, launcher="ray", layouts=[1, 8])
    with pytest.raises(ValueError, match=r"tensor_parallel_size=8, .*more than 4 GPUs.*one engine"):
        pat_vllm.PATRayExecutor(wide)
    assert until(lambda: not engine_processes(before))
    assert until(all_gpus_are_free)


# ---------------------------------------------------------------- the same tests, with other cases
# At the end, for tests run in the order in which they are found, and the last engine stays.

from tests.test_switch import (  # noqa: E402, F401
    test_a_layout_asked_for_after_a_batch_holds_for_the_next,
    test_an_idle_engine_returns_to_its_base_layout,
    test_every_ordered_pair_of_layouts,
    test_half_prefilled_and_waiting_requests_are_carried,
    test_random_switch_storm,
    test_recomputing_gives_the_same,
    test_single_layouts_agree_and_differ_by_request,
    test_teacher_forced_log_probabilities_after_a_switch,
)


def test_a_killed_worker_ends_the_engine(case: Any) -> None:
    """The last test of an engine. The other ranks wait for the killed one in a collective."""
    from vllm import SamplingParams

    llm, *_ = case
    llm.collective_rpc(test_faults.die_in_exchange)
    sampling = SamplingParams(max_tokens=200, ignore_eos=True)
    for name in ("one", "two"):
        llm.llm_engine.add_request(name, {"prompt_token_ids": [5, 6, 7]}, sampling)
    for _ in range(3):
        llm.llm_engine.step()
    with pytest.raises(RuntimeError, match=r"failed|died"):
        pat_vllm.switch(llm, tp=2)
    with pytest.raises(RuntimeError, match="Executor failed"):
        llm.llm_engine.step()
