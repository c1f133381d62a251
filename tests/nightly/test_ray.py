"""Ray engines of four ranks, in a caller's placement group, in processes of their own; kills."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import psutil
import pytest

from tests.engine.test_ray import (
    all_gpus_are_free,
    cluster,
    group_of,
    in_bundle,
    ranks_go,
    ray_case,
)
from tests.engine.test_switch import Case
from tests.support.faults import assert_a_dead_worker_is_noticed, die_in_exchange, die_soon
from tests.support.on_ray import Host, where
from tests.support.ray_nodes import GONE_WITHIN, until

ray = pytest.importorskip("ray")
__all__ = ["cluster"]


@pytest.mark.parametrize(
    ("sabotage", "tp", "elsewhere"), [(die_soon, 1, False), (die_in_exchange, 2, True)]
)
def test_a_dead_worker_fails_the_engine_and_leaves_nothing(
    sabotage: Callable[[Any], None],
    tp: int,
    elsewhere: bool,
    cluster: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with ranks_go(elsewhere):
        assert_a_dead_worker_is_noticed({"launcher": "ray"}, sabotage, tp, monkeypatch)
    assert until(all_gpus_are_free)


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


def test_a_caller_s_group_with_bundle_indices_and_parts_of_gpus(cluster: str) -> None:
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
            switches = ray.get(host.report.remote()).switches
            switches = [s for s in switches if s.reason == "policy" and s.num_seqs]
            assert [switch.target.tp for switch in switches] == [2]
            assert switches[0].migrated > 0
            # Alone, it is in the group of two from its start.
            assert ray.get(host.generate.remote([120], first=6)) == [outputs[6]]

            ray.get(host.stop.remote())
            assert ray.util.placement_group_table(group)["state"] == "CREATED"
            # All of the GPU is free again.
            ray.get(in_bundle(group, 2, 1, where), timeout=GONE_WITHIN)
    assert until(all_gpus_are_free)


@pytest.mark.parametrize("victim", ["front end", "engine core"])
def test_a_killed_engine_leaves_nothing(victim: str, cluster: str) -> None:
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


@pytest.fixture(scope="module", params=[("llama_gqa", 2, True), ("llama_few_kv", 4, False)])
def case(request: Any, cluster: str) -> Iterator[Case]:
    with ray_case(*request.param) as case:
        yield case


from tests.engine.test_switch import (  # noqa: E402, F401
    test_a_layout_asked_for_after_a_batch_holds_for_the_next,
    test_an_idle_engine_returns_to_its_base_layout,
    test_every_ordered_pair_of_layouts,
    test_half_prefilled_and_waiting_requests_are_carried,
    test_random_switch_storm,
    test_recomputing_gives_the_same,
    test_single_layouts_agree_and_differ_by_request,
    test_teacher_forced_log_probabilities_after_a_switch,
)
