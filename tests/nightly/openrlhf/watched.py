"""PAT's rollout actor, which also tells where it is. Importable in Ray's workers."""

from __future__ import annotations

import os
from dataclasses import dataclass

from pat_openrlhf.engines import PatRolloutActor

from tests.support.on_ray import process_id, where


@dataclass(frozen=True)
class Place:
    """Where an engine is, and what it did last.

    Attributes:
        nodes: Ray's ids of the nodes of the actor and of each rank.
        actor: process.
        core: process.
        ranks: their processes.
        responses: of its last rollout.
    """

    nodes: frozenset[str]
    actor: int
    core: int
    ranks: tuple[int, ...]
    responses: int


class WatchedActor(PatRolloutActor):
    async def place(self) -> Place:
        import ray

        nodes = {node for node, *_ in await self.llm.collective_rpc(where)}
        return Place(
            nodes=frozenset(nodes | {ray.get_runtime_context().get_node_id()}),
            actor=os.getpid(),
            core=self.llm.engine_core.resources.engine_manager.processes[0].pid,
            ranks=tuple(await self.llm.collective_rpc(process_id)),
            responses=self._responses,
        )

    async def layout_in_metrics(self) -> tuple[float, float]:
        """Tensor parallelism and replicas, as Prometheus would read them in this process."""
        from prometheus_client import REGISTRY

        values = {
            sample.name: sample.value
            for family in REGISTRY.collect()
            for sample in family.samples
            if sample.name.startswith("vllm:pat_")
        }
        return values["vllm:pat_tensor_parallel_size"], values["vllm:pat_num_replicas"]
