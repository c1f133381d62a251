"""A rollout replica of verl: one PAT engine, which makes its own replicas inside."""

from __future__ import annotations

from typing import Any

import ray
from verl.workers.rollout.replica import CONTROL_METHOD_CONCURRENCY
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMReplica

from pat_verl.checks import asks_for_pat, check_rollout
from pat_verl.server import PatHttpServer

_CALLS_OF_RAY = 1000
"""Calls that Ray lets an async actor run at once, unless told otherwise."""


class PatReplica(vLLMReplica):
    """verl's replica for vLLM, with a PAT server. Without PAT it is verl's own."""

    def __init__(
        self,
        replica_rank: int,
        config: Any,
        model_config: Any,
        gpus_per_node: int = 8,
        *args: Any,
        **kwargs: Any,
    ) -> None:
        self._pat = asks_for_pat(config)
        if self._pat:
            check_rollout(config, model_config, gpus_per_node=gpus_per_node)
        super().__init__(replica_rank, config, model_config, gpus_per_node, *args, **kwargs)
        if self._pat:
            self.server_class = ray.remote(PatHttpServer)

    @property
    def max_concurrency(self) -> int:
        """Calls that the server's actor takes at once.

        Where verl has N servers, each takes Ray's 1000 calls or what its engine runs. This one
        stands for all N. Calls above the limit would wait behind rollouts, weight pushes and
        aborts among them. In the base layout an engine runs `max_num_seqs` for each of the N
        ranks; no layout takes more in all.
        """
        if not self._pat:
            return super().max_concurrency
        running = self.config.max_num_seqs * self.world_size
        return max(
            super().max_concurrency,
            _CALLS_OF_RAY * self.world_size,
            running + CONTROL_METHOD_CONCURRENCY,
        )

    def _get_server_name_prefix(self) -> str:
        # What the adapters look for.
        return f"{self.config.name}_"
