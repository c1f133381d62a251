"""Engines on two nodes of a Ray cluster, behind verl's own servers and weight push."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Iterator
from typing import Any

import psutil
import pytest

pytest.importorskip("verl")

import ray

from tests.support.engines import engine_processes
from tests.support.ray_nodes import GONE_WITHIN, assert_gone, ray_nodes
from tests.verl.models import few_tokens
from tests.verl.servers import Server, start

ARCH = "qwen3"
PROMPT = [5, 6, 7, 8]


@pytest.fixture(scope="module")
def before() -> Iterator[list[psutil.Process]]:
    """What runs on the nodes without engines."""
    with ray_nodes(2, 2):
        yield engine_processes()


@pytest.fixture(scope="module")
def servers(before: Any) -> Server:
    """Two engines of two ranks."""
    return start(
        few_tokens(ARCH, 0), f"engine_kwargs.vllm.kv_cache_memory_bytes={32 << 20}", nnodes=2
    )


def place(server: Any) -> tuple[str, int, int, list[int]]:
    """Runs in a server's actor: its node, its process, the engine core's, and the ranks'."""
    core = server.engine.engine_core.resources.engine_manager.processes[0].pid
    ranks = [child.pid for child in psutil.Process(core).children() if _is_rank(child)]
    return ray.get_runtime_context().get_node_id(), os.getpid(), core, ranks


def _is_rank(process: psutil.Process) -> bool:
    return "VLLM::" in " ".join(process.cmdline())


def places(servers: Server) -> list[tuple[str, int, int, list[int]]]:
    return ray.get([actor.__ray_call__.remote(place) for actor in servers.manager.server_handles])


def test_an_engine_on_each_node(servers: Server) -> None:
    """Beside the processes whose GPUs it has."""
    nodes = [node for node, *_ in places(servers)]
    assert len(set(nodes)) == 2
    assert all(len(ranks) == 2 for *_, ranks in places(servers))
    for replica, node in zip(servers.manager.get_replicas(), nodes, strict=True):
        calls = [worker.__ray_call__.remote(_node) for worker in replica.workers]
        assert set(ray.get(calls)) == {node}


def _node(worker: Any) -> str:
    return ray.get_runtime_context().get_node_id()


def responses_of(servers: Server) -> list[int]:
    """How many each server has made since its last weights."""
    actors = servers.manager.server_handles
    return ray.get([actor.__ray_call__.remote(_responses) for actor in actors])


def _responses(server: Any) -> int:
    return server._responses


def test_prompts_and_weights_reach_both(servers: Server) -> None:
    old = servers.generate_all([PROMPT] * 8, max_tokens=24, ignore_eos=True)
    assert responses_of(servers) == [4, 4]
    assert len({response.token_ids for response in old}) == 1

    servers.do(servers.push(few_tokens(ARCH, 1), step=1))
    new = servers.generate_all([PROMPT] * 8, max_tokens=24, ignore_eos=True)
    assert responses_of(servers) == [4, 4]
    assert len({response.token_ids for response in new}) == 1
    assert new[0].token_ids != old[0].token_ids
    assert {response.global_steps for response in new} == {1}


def test_a_dead_engine_is_named(servers: Server, before: list[psutil.Process]) -> None:
    """The last test: its processes are killed in a rollout, and then another's actor."""
    (_, other, _, _), (_, _, core, ranks) = places(servers)
    victims = [psutil.Process(pid) for pid in (core, *ranks)]
    victims[-1].suspend()

    async def rollout() -> list[Any]:
        requests = [servers.generate(PROMPT, max_tokens=200, ignore_eos=True) for _ in range(8)]
        return await asyncio.gather(*requests, return_exceptions=True)

    def bounded(work: Any) -> Any:
        return servers.do(asyncio.wait_for(work, GONE_WITHIN))

    threading.Timer(3, lambda: [process.kill() for process in victims]).start()
    errors = [str(result) for result in bounded(rollout()) if isinstance(result, Exception)]
    assert len(errors) == 4
    assert all("the PAT engine of rollout replica 1 has died" in text for text in errors), errors

    # What verl's trainer does next.
    dead = servers.manager.get_replicas()[1]
    dies = r"replica 1 has died|EngineDeadError"
    for work in (dead.sleep(), servers.push(few_tokens(ARCH, 0), step=2)):
        with pytest.raises(ray.exceptions.RayTaskError, match=dies):
            bounded(work)

    psutil.Process(other).kill()
    with pytest.raises(ray.exceptions.ActorDiedError, match="PatHttpServer"):
        ray.get(servers.actor.pat_check_alive.remote(), timeout=GONE_WITHIN)
    for actor in servers.manager.server_handles:
        ray.kill(actor)
    for replica in servers.manager.get_replicas():
        for worker in replica.workers:
            ray.kill(worker)
    ray.kill(servers.manager.global_load_balancer)
    assert_gone(before)
