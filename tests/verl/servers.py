"""verl's own rollout server and weight push, driven without a trainer."""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import uuid
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

RANKS = 2
_VLLM = "engine_kwargs.vllm"


@dataclass(frozen=True)
class Response:
    """What came back for one request."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: str
    global_steps: int | None


class Pictured(list[int]):
    """A prompt's token ids as verl's agent loops send them, with its images.

    Each token of an image has its place.
    """

    def __init__(self, token_ids: Iterable[int], images: Sequence[Any]) -> None:
        super().__init__(token_ids)
        self.images = list(images)


class Server:
    """verl's `LLMServerManager` and its weight push.

    Attributes:
        config: verl's, of the trainer that it stands in for.
    """

    def __init__(self, manager: Any, config: Any) -> None:
        self.manager = manager
        self.config = config
        self.replica = manager.get_replicas()[0]
        self.actor = manager.server_handles[0]
        self._loop = asyncio.new_event_loop()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run a coroutine to its end."""
        return self._loop.run_until_complete(work)

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the server's actor."""
        import ray

        return ray.get(getattr(self.actor, method).remote(*args))

    async def generate(
        self, prompt: Sequence[int], client: Any = None, **sampling: Any
    ) -> Response:
        """One request through verl's client."""
        client = client or self.manager.get_client()
        output = await client.generate(
            uuid.uuid4().hex,
            prompt_ids=list(prompt),
            image_data=prompt.images if isinstance(prompt, Pictured) else None,
            sampling_params={"temperature": 0.0, "logprobs": True} | sampling,
        )
        return Response(
            tuple(output.token_ids),
            tuple(output.log_probs or ()),
            output.stop_reason,
            output.extra_fields.get("global_steps"),
        )

    def generate_all(self, prompts: Sequence[Sequence[int]], **sampling: Any) -> list[Response]:
        """A batch."""

        async def all_of_them() -> list[Response]:
            return await asyncio.gather(*[self.generate(p, **sampling) for p in prompts])

        return self.do(all_of_them())

    async def push(self, model: Path, step: int) -> None:
        """Send the weights of a checkpoint as verl's checkpoint engine does, one copy per rank."""
        workers = [w for replica in self.manager.get_replicas() for w in replica.workers]
        await asyncio.gather(*[w.__ray_call__.remote(_offer_weights, str(model)) for w in workers])
        await asyncio.gather(*[w.update_weights.remote(global_steps=step) for w in workers])


def _offer_weights(worker: Any, model: str) -> None:
    from safetensors import safe_open

    def weights() -> Iterator[tuple[str, Any]]:
        with safe_open(f"{model}/model.safetensors", "pt") as file:
            for name in file.keys():  # noqa: SIM118
                yield name, file.get_tensor(name)

    worker.checkpoint_engine.send_weights(weights())


@contextlib.contextmanager
def ray_cluster(gpus: int = RANKS) -> Iterator[None]:
    """A Ray of its own, on this machine."""
    import ray

    # A short path: Ray's sockets are in it.
    with tempfile.TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as scratch:
        ray.init(
            address="local",
            num_cpus=4 * gpus,
            num_gpus=gpus,
            include_dashboard=False,
            object_store_memory=200 << 20,
            _temp_dir=scratch,
        )
        try:
            yield
        finally:
            ray.shutdown()


def start(
    model: Path,
    *overrides: str,
    first_replica: int = 0,
    tp: int = RANKS,
    of_model: Mapping[str, Any] = MappingProxyType({}),
    **options: Any,
) -> Server:
    """Start a server, or one for each `tp` of `RANKS` ranks, in the Ray cluster that runs.

    Args:
        overrides: additions to `actor_rollout_ref.rollout`, in Hydra's syntax.
        first_replica: of verl's numbers of replicas, which must differ among servers.
        of_model: options of `actor_rollout_ref.model`, beside its path.
        options: of `actor_rollout_ref.rollout`.
    """
    import verl
    from hydra import compose, initialize_config_dir
    from verl.workers.rollout.llm_server import LLMServerManager

    chosen = {
        "name": "pat",
        "nnodes": 1,
        "n_gpus_per_node": RANKS,
        "tensor_model_parallel_size": tp,
        "load_format": "auto",
        "dtype": "float32",
        "enforce_eager": "true",
        "max_model_len": 512,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 512,
        "prompt_length": 64,
        "response_length": 256,
        "checkpoint_engine.update_weights_bucket_megabytes": 4,
        **options,
    }
    rollout = "actor_rollout_ref.rollout"
    with initialize_config_dir(
        config_dir=str(Path(verl.__file__).parent / "trainer" / "config"), version_base=None
    ):
        config = compose(
            "ppo_trainer",
            overrides=[
                f"actor_rollout_ref.model.path={model}",
                *[f"actor_rollout_ref.model.{name}={value}" for name, value in of_model.items()],
                *[f"{rollout}.{name}={value}" for name, value in chosen.items()],
                f"++{rollout}.enable_sleep_mode=false",
                *[f"+{rollout}.{override}" for override in overrides],
            ],
        )
    manager = LLMServerManager.create(config=config, start_rank=first_replica)
    return Server(manager, config)


@contextlib.contextmanager
def server(model: Path, *overrides: str, **options: Any) -> Iterator[Server]:
    """A server with PAT over `RANKS` ranks, in a Ray cluster of its own. See `start`."""
    with ray_cluster():
        yield start(model, *overrides, f"{_VLLM}.kv_cache_memory_bytes={32 << 20}", **options)
