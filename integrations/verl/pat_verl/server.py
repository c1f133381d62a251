"""The actor that holds a PAT engine and serves verl's requests."""

from __future__ import annotations

import contextlib
import inspect
import logging
import math
import time
from typing import TYPE_CHECKING, Any

from verl.workers.rollout.replica import TokenOutput
from verl.workers.rollout.vllm_rollout.vllm_async_server import vLLMHttpServer
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError

from pat_verl.checks import NAME, check_rollout, plain
from pat_vllm import report_async, speculate_async, switch_async
from pat_vllm.config import of_one_engine
from pat_vllm.models.drafters import has_weights
from pat_vllm.reporting import Report, describe_awaited

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from vllm import RequestOutput, SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

logger = logging.getLogger(__name__)
logger.setLevel(logging.INFO)  # as verl does for its own server


class PatHttpServer(vLLMHttpServer):
    """verl's vLLM server over a PAT engine."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._rollouts = 0
        self._responses = 0
        self._began = self._ended = 0.0

    # ---------------------------------------------------------------- start

    def _validate_configs(self) -> None:
        check_rollout(self.config, self.model_config)
        super()._validate_configs()

    def _preprocess_engine_kwargs(self, engine_kwargs: dict[str, Any]) -> None:
        super()._preprocess_engine_kwargs(engine_kwargs)
        engine_kwargs.setdefault("distributed_executor_backend", NAME)
        # verl writes the engine's command line, and a mapping of OmegaConf is not a dict there.
        for name in ("additional_config", "speculative_config"):
            if name in engine_kwargs:
                engine_kwargs[name] = plain(engine_kwargs[name])
        additional = engine_kwargs.get("additional_config") or {}
        pat = of_one_engine(additional.get("pat") or {}, self.replica_rank)
        # verl's weight push and its GPUs are in this process's environment, which children share.
        pat["launcher"] = "mp"
        engine_kwargs["additional_config"] = {**additional, "pat": pat}

    def _get_worker_extension_cls(self) -> str:
        return "pat_verl.extension.PatWorkerExtension"

    async def run_server(self, args: Any) -> None:
        await super().run_server(args)
        _accept_wait_for_inflight_requests(self.engine)
        _send_first_and_last_outputs(self.engine)

    # ---------------------------------------------------------------- requests

    async def generate(self, *args: Any, **kwargs: Any) -> TokenOutput:
        """As verl's, with a plain word about an engine that has died."""
        self._began = self._began or time.monotonic()
        try:
            return await super().generate(*args, **kwargs)
        except EngineDeadError:
            await self.pat_check_alive()
            raise
        finally:
            self._ended = time.monotonic()
            self._responses += 1

    async def abort_request(
        self, request_id: str, reset_prefix_cache: bool = True
    ) -> dict[str, Any]:
        """As verl's, which seeks the request by a name that vLLM >= 0.32 does not know it by."""
        if request_id not in self.engine.output_processor.external_req_ids:
            return {
                "aborted": False,
                "request_id": request_id,
                "error": f"Request {request_id} not found",
            }
        await self.engine.abort(request_id)
        if reset_prefix_cache:
            await self.clear_kv_cache()
        return {"aborted": True, "request_id": request_id}

    # ---------------------------------------------------------------- each iteration

    async def sleep(self) -> None:
        """As verl's, which calls it when a rollout is complete and before it trains."""
        await self._log_rollout()
        # Or verl would go on with the responses that were complete when the engine died.
        await self.pat_check_alive()
        await super().sleep()

    def _resolve_sleep_level(self) -> int:
        """As verl's, which keeps weights that its updates do not bring; those of any drafter."""
        drafts = self.engine.vllm_config.speculative_config
        return 1 if has_weights(drafts) else super()._resolve_sleep_level()

    async def set_global_steps(self, global_steps: int) -> None:
        """As verl's, which calls it when new weights are in."""
        await self._log_rollout()
        await self.pat_check_alive()
        await super().set_global_steps(global_steps)

    async def _log_rollout(self) -> None:
        """Log what the engine did since the last time, if it made responses."""
        if not self._responses:
            return
        count, began, ended = self._responses, self._began, self._ended
        self._responses, self._began = 0, 0.0
        self._rollouts += 1
        logger.info(
            "PAT rollout %d of replica %d, weights of step %s: %s",
            self._rollouts,
            self.replica_rank,
            self.global_steps,
            await describe_awaited(self.pat_report(began), began, ended - began, count),
        )

    # ---------------------------------------------------------------- for users

    async def pat_report(self, since: float = -math.inf) -> Report:
        """What the engine has done so far; see `pat_vllm.report`."""
        return await report_async(self.engine, since)

    async def pat_switch(self, tp: int) -> bool:
        """Switch the engine now; see `pat_vllm.switch`."""
        return await switch_async(self.engine, tp)

    async def pat_speculate(self, num_speculative_tokens: int | None) -> None:
        """Change the number of draft tokens now; see `pat_vllm.speculate`."""
        await speculate_async(self.engine, num_speculative_tokens)

    async def pat_check_alive(self) -> None:
        """Raise if the engine has died.

        Raises:
            RuntimeError: it has.
        """
        try:
            await self.engine.check_health()
        except Exception as error:
            raise RuntimeError(
                f"the PAT engine of rollout replica {self.replica_rank} has died. What ended it is "
                "further up in the log, in the lines of EngineCore and of its workers."
            ) from error


_NEVER = 1 << 30
"""Tokens between two outputs of a request: more than any request has."""


def _send_first_and_last_outputs(engine: AsyncLLM) -> None:
    """Have an engine's cumulative outputs be two: a request's first token, and then all of it.

    verl looks at the first output, by which it knows that the request is in the engine, and at the
    last. vLLM would make one for each token, with a copy of all tokens so far, and wake the caller.

    They have no text. verl reads token ids and log-probabilities, and this process would detokenize
    what all ranks generate. Only stop strings are sought in the text.
    """
    original = engine.generate

    async def generate(
        prompt: Any, sampling_params: SamplingParams, *args: Any, **kwargs: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        joined = sampling_params.output_kind == RequestOutputKind.CUMULATIVE
        if joined:
            sampling_params.output_kind = RequestOutputKind.DELTA
            sampling_params.stream_interval = _NEVER
            if not sampling_params.stop:
                sampling_params.detokenize = False
        whole: RequestOutput | None = None
        outputs = original(prompt, sampling_params, *args, **kwargs)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                if whole is None or not joined:
                    whole = output
                else:
                    whole.add(output, aggregate=True)
                yield whole

    engine.generate = generate  # type: ignore[method-assign]


def _accept_wait_for_inflight_requests(engine: AsyncLLM) -> None:
    """Let an engine's `pause_generation` take the argument that verl gives it.

    Without it: `abort_all_requests` fails with vLLM >= 0.32, where `mode` has replaced
    `wait_for_inflight_requests`. Not needed any more when verl knows the new one.
    """
    original = engine.pause_generation
    if "wait_for_inflight_requests" in inspect.signature(original).parameters:
        return

    async def pause_generation(
        *, wait_for_inflight_requests: bool | None = None, **kwargs: Any
    ) -> None:
        if wait_for_inflight_requests is not None:
            kwargs["mode"] = "wait" if wait_for_inflight_requests else "abort"
        await original(**kwargs)

    engine.pause_generation = pause_generation  # type: ignore[method-assign]
