"""The trainer's side: what each training rank uses to push its weights."""

from __future__ import annotations

import os
from typing import Any

import ray
import verl
from verl.workers.rollout.vllm_rollout.vllm_rollout import ServerAdapter

from pat_verl.checks import asks_for_pat, check_rollout, check_verl_version


class PatServerAdapter(ServerAdapter):
    """verl's adapter for vLLM, talking to a PAT server. Without PAT it is verl's own."""

    def __init__(self, config: Any, model_config: Any, *args: Any, **kwargs: Any) -> None:
        self._pat = asks_for_pat(config)
        if self._pat:
            # The first of PAT that runs in a trainer, before the servers are started.
            check_verl_version(verl.__version__)
            check_rollout(
                config,
                model_config,
                gpus_per_node=int(os.environ["RAY_LOCAL_WORLD_SIZE"]),
                world_size=int(os.environ["WORLD_SIZE"]),
            )
        super().__init__(config, model_config, *args, **kwargs)

    async def update_weights(self, weights: Any, *args: Any, **kwargs: Any) -> None:
        """Push weights, unless there is nobody to receive them.

        Without the question: when the engine has died, verl's sender waits for ever for a worker
        to take its first bucket.
        """
        if self._pat:
            name = f"{self._get_server_name_prefix()}server_{self.replica_rank}_{self.node_rank}"
            await ray.get_actor(name).pat_check_alive.remote()
        await super().update_weights(weights, *args, **kwargs)
