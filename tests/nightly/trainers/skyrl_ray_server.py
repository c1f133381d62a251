"""SkyRL's server in its Ray actor: `-m tests.nightly.trainers.skyrl_ray_server --NAME VALUE`.

The arguments are vLLM's, by way of SkyRL's `engine_init_kwargs`. A cluster of one node, whose GPUs
exist in Ray's books only, is started with it.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from tests.support.serve import know_the_cpu_build

# Here and in the actor.
know_the_cpu_build()
importlib.import_module("tests.nightly.trainers.skyrl_on_cpu")  # its stand-ins come first
from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import (  # noqa: E402
    VLLMServerActor,
    _build_standalone_cli_args,
)

ROOT = Path(__file__).parents[3]


class Actor(VLLMServerActor):
    """SkyRL's, of this module, so that its process has the stand-ins."""


def main(*arguments: str) -> None:
    """Serve, as SkyRL's `create_inference_servers` starts one of its engines."""
    import ray
    import vllm.platforms.cpu as cpu
    from skyrl.backends.skyrl_train.inference_servers.server_group import ServerGroup
    from skyrl.backends.skyrl_train.inference_servers.utils import build_vllm_cli_args
    from skyrl.train.config import SkyRLTrainConfig
    from skyrl.train.utils.utils import ResolvedPlacementGroup

    from tests.nightly.trainers import skyrl_ray_server  # by a name that the actor can import
    from tests.support.ray_nodes import ray_nodes
    from tests.support.ray_on_cpu import ray_on_cpu

    parsed = vars(_build_standalone_cli_args([*arguments]))
    given = {argument[2:].replace("-", "_") for argument in arguments if argument.startswith("--")}
    options = {name: parsed[name] for name in given}

    config = SkyRLTrainConfig()
    config.trainer.placement.colocate_all = False
    config.trainer.policy.model.path = options.pop("model")
    engine = config.generator.inference_engine
    ranks = engine.tensor_parallel_size = options.pop("tensor_parallel_size")
    engine.distributed_executor_backend = options.pop("distributed_executor_backend")
    port = options.pop("port")
    engine.engine_init_kwargs = options

    support = str(ROOT / "tests/support/ray_on_cpu")
    environment: dict[str, Any] = {
        "PYTHONPATH": os.pathsep.join([support, str(ROOT), os.environ.get("PYTHONPATH", "")]),
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
        "RAY_DEDUP_LOGS": "0",
    }
    ray_on_cpu.patch(cpu)
    with ray_nodes(ranks, cpus=ranks, object_store=80 << 20, **environment):
        placed = ray.util.placement_group([{"GPU": 1, "CPU": 1}] * ranks)
        group = ServerGroup(
            cli_args=build_vllm_cli_args(config),
            num_servers=config.generator.inference_engine.data_parallel_size,
            placement_group=ResolvedPlacementGroup(placed),
            start_port=port,
            distributed_executor_backend=engine.distributed_executor_backend,
            enable_ray_prometheus_stats=engine.enable_ray_prometheus_stats,
            use_expandable_segments=engine.use_expandable_segments,
            server_actor_cls=skyrl_ray_server.Actor,
        )
        try:
            group.start()
            signal.pause()
        except KeyboardInterrupt:
            group.get_pool().shutdown()


if __name__ == "__main__":
    main(*sys.argv[1:])
