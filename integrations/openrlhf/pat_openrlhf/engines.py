"""PAT's rollout engines: Ray actors in the place of OpenRLHF's `RolloutRayActor`."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import os
import time
from collections.abc import Iterator
from typing import Any

import ray
from openrlhf.trainer.ray.utils import get_bundle_indices
from openrlhf.trainer.ray.vllm_engine import RolloutRayActor
from openrlhf.utils.agent import SingleTurnAgentExecutor
from vllm.logger import init_logger
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from pat_openrlhf.handle import EngineHandle, TokenizerAtHand
from pat_openrlhf.options import EngineOptions
from pat_openrlhf.placement import check_nodes, gpus_of_bundles
from pat_vllm.api import report_async
from pat_vllm.config import of_one_engine
from pat_vllm.reporting import Report, describe_awaited

logger = init_logger("vllm.pat_openrlhf")  # a child of vLLM's logger, which has the handlers

_CALLS_OF_RAY = 1000
"""Calls that Ray lets an async actor run at once, unless told otherwise."""


class PatRolloutActor(RolloutRayActor.__ray_actor_class__):
    """OpenRLHF's rollout actor over a PAT engine: one engine in the place of N.

    Everything OpenRLHF calls is its own code: generation, weight sync by broadcast or CUDA IPC,
    sleep, pause.
    """

    async def __init__(  # type: ignore[misc]  # Ray awaits it
        self, *args: Any, pat: dict[str, Any], **kwargs: Any
    ) -> None:
        """As OpenRLHF's; `pat` holds the options of the engine's `additional_config["pat"]`."""
        self._running = 0
        self._rollouts = 0
        self._started = 0.0
        self._responses = 0
        self._tokenizer: tuple[str, asyncio.Future[Any]] | None = None
        self._gpus: list[str] | None = None
        if pat.get("launcher") == "mp":
            # Workers that Ray does not place must be shown the GPUs that it gave to this engine.
            self._gpus = await gpus_of_bundles(kwargs["bundle_indices"], kwargs["num_gpus"])
        await super().__init__(
            *args,
            **{
                **kwargs,
                "distributed_executor_backend": "pat",
                "additional_config": {"pat": pat},
            },
        )

    def _configure_device_env(
        self, backend: Any, bundle_indices: list[int], num_gpus: float
    ) -> None:
        super()._configure_device_env("ray", bundle_indices, num_gpus)
        if self._gpus is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(self._gpus)

    async def ready(self) -> None:
        """Returns when the engine runs; fails if it could not start."""

    async def pat_report(self, since: float = -math.inf) -> Report:
        """What the engine has done so far; see `pat_vllm.report`."""
        return await report_async(self.llm, since)

    async def generate(
        self, prompt_token_ids: Any, sampling_params: Any, *args: Any, **kwargs: Any
    ) -> Any:
        """As OpenRLHF's, which takes only the last output of a request."""
        params = copy.copy(sampling_params)
        # Or vLLM makes an output of each token, and wakes the request's task for it.
        params.output_kind = RequestOutputKind.FINAL_ONLY
        # Or this process would detokenize what all ranks generate. Stop strings are sought in text.
        if not (params.stop or self._reads_text()):
            params.detokenize = False
        with _death_told_plainly():
            return await super().generate(prompt_token_ids, params, *args, **kwargs)

    def _reads_text(self) -> bool:
        """Whether the executor may read the text of outputs. OpenRLHF's for single turns does not;
        agents do."""
        return type(self.executor).execute is not SingleTurnAgentExecutor.execute

    async def generate_responses(self, *args: Any, **kwargs: Any) -> Any:
        """As OpenRLHF's. The last responses of a rollout also log what the engine did in it."""
        if not self._running:
            self._started, self._responses = time.monotonic(), 0
        self._running += 1
        try:
            if isinstance(sent := kwargs.get("hf_tokenizer"), TokenizerAtHand):
                kwargs["hf_tokenizer"] = await self._unpacked(sent)
            responses = await super().generate_responses(*args, **kwargs)
            self._responses += len(responses)
        finally:
            self._running -= 1
        if not self._running:
            # Asked for before OpenRLHF may put the engine to sleep.
            self._rollouts += 1
            number, started, count = self._rollouts, self._started, self._responses
            seconds = time.monotonic() - started
            logger.info(
                "PAT rollout %d: %s",
                number,
                await describe_awaited(self.pat_report(started), started, seconds, count),
            )
            with _death_told_plainly():
                await self.llm.check_health()
        return responses

    async def _unpacked(self, sent: TokenizerAtHand) -> Any:
        """A tokenizer that was sent; the last one is kept."""
        name = sent.reference.hex()
        if self._tokenizer is None or self._tokenizer[0] != name:
            # Prompts that come meanwhile wait for the same one.
            self._tokenizer = name, asyncio.ensure_future(sent.reference)
        return await self._tokenizer[1]


@contextlib.contextmanager
def _death_told_plainly() -> Iterator[None]:
    try:
        yield
    except EngineDeadError as error:
        raise RuntimeError(
            "the PAT engine died during a rollout: one of its workers or its core ended. What "
            "ended it is in the log above this error, or in the log of the node's kernel (out "
            "of memory)"
        ) from error


class PatEngines:
    """Makes rollout actors when OpenRLHF's `create_vllm_engines` asks its `RolloutRayActor` to."""

    def __init__(self, options: EngineOptions) -> None:
        """`options` are those of each engine."""
        self._options = options
        self._starting: list[Any] = []

    def options(self, **ray_options: Any) -> _Placed:
        return _Placed(self, ray_options)

    def make(self, ray_options: dict[str, Any], arguments: dict[str, Any]) -> Any:
        """An actor with an engine.

        Raises:
            ValueError: an engine's GPUs are on several nodes.
            ray.exceptions.RayError: an engine could not start.
        """
        count, ranks = self._options.num_engines, arguments["tensor_parallel_size"]
        if not self._starting:
            group = ray_options["scheduling_strategy"].placement_group
            check_nodes(group, [get_bundle_indices(group, index, ranks) for index in range(count)])
        # OpenRLHF sends an engine a call for each prompt, and to one that stands for N engines N
        # times as many. Calls above Ray's limit would wait, weight updates among them.
        calls = _CALLS_OF_RAY * ranks
        actor_class = ray.remote(PatRolloutActor)
        actor = actor_class.options(**ray_options, max_concurrency=calls).remote(
            pat=of_one_engine(self._options.pat, len(self._starting)),
            speculative_config=self._options.speculative_config,
            **arguments,
        )
        self._starting.append(actor.ready.remote())
        if len(self._starting) in (1, count):
            # What is wrong with the options, the model or a node is to show now. OpenRLHF itself
            # would go on, and wait minutes for this engine in the set-up of the weight sync. The
            # first engine starts alone, so that nothing disturbs the profile that it may take.
            ray.get(self._starting)
        return EngineHandle(actor)


class _Placed:
    def __init__(self, engines: PatEngines, ray_options: dict[str, Any]) -> None:
        self._engines = engines
        self._ray_options = ray_options

    def remote(self, **arguments: Any) -> Any:
        return self._engines.make(self._ray_options, arguments)
