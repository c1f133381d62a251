"""What users call on a running engine."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from pat_vllm.config import runs_pat
from pat_vllm.executor.rpc import REPORT_COMMAND, SPECULATE_COMMAND, SWITCH_COMMAND
from pat_vllm.reporting import Report

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.entrypoints.llm import LLM
    from vllm.v1.engine.async_llm import AsyncLLM


def switch(llm: LLM, tp: int) -> bool:
    """Switch an `LLM` to another layout now, mid-generation too.

    May be called from another thread while `generate` runs, or between `step()`s. The layout
    holds, whatever the policy says, until the batch is over: until no request is left and caches
    are reset, weights change, or none has come for 5 s (`idle_seconds` of the policy).

    Args:
        llm: a `vllm.LLM` that runs with PAT.
        tp: of the layout.

    Returns:
        Whether the engine is in that layout; False when the switch was refused, which the report
        explains.

    Raises:
        ValueError: the engine runs without PAT, or does not keep that layout ready (from the
            engine's process this arrives as vLLM's exception for a failed call).
    """
    _check_runs_pat(llm.llm_engine.vllm_config)
    return llm.collective_rpc(SWITCH_COMMAND, args=(tp,))[0]


def speculate(llm: LLM, num_speculative_tokens: int | None) -> None:
    """Have an `LLM` propose and verify that many draft tokens a request and step from now on.

    May be called from another thread while `generate` runs, or between `step()`s. No step waits
    for it: drafts that were made before are still verified. It holds, whatever the policy or
    `speculative_config` says, until the batch is over, as in `switch`.

    Args:
        llm: a `vllm.LLM` that runs with PAT and has a `speculative_config`.
        num_speculative_tokens: 0 (no speculation, at no cost), a power of two, or the
            `num_speculative_tokens` of `speculative_config`, or a number in its
            `num_speculative_tokens_per_batch_size`. None: what holds without this call.

    Raises:
        ValueError: the engine runs without PAT, or does not keep that number ready (from the
            engine's process this arrives as vLLM's exception for a failed call).
    """
    _check_runs_pat(llm.llm_engine.vllm_config)
    llm.collective_rpc(SPECULATE_COMMAND, args=(num_speculative_tokens,))


def report(llm: LLM, since: float = -math.inf) -> Report:
    """What an `LLM` with PAT has done: switches, what they moved and cost, unfinished requests.

    May be called from another thread while `generate` runs, or between `step()`s.

    Args:
        llm: a `vllm.LLM` that runs with PAT.
        since: seconds on the engine's monotonic clock, which is `time.monotonic()` of the machine.
            The report then holds the switches, refused switches, timeline samples and decisions of
            that time or later. Totals always count from the start of the engine. By default the
            report holds all that the engine has kept.

    Raises:
        ValueError: the engine runs without PAT.
    """
    _check_runs_pat(llm.llm_engine.vllm_config)
    return Report.from_json(llm.collective_rpc(REPORT_COMMAND, args=(since,))[0])


async def switch_async(llm: AsyncLLM, tp: int) -> bool:
    """`switch` for an `AsyncLLM`."""
    _check_runs_pat(llm.vllm_config)
    return (await llm.collective_rpc(SWITCH_COMMAND, args=(tp,)))[0]


async def speculate_async(llm: AsyncLLM, num_speculative_tokens: int | None) -> None:
    """`speculate` for an `AsyncLLM`."""
    _check_runs_pat(llm.vllm_config)
    await llm.collective_rpc(SPECULATE_COMMAND, args=(num_speculative_tokens,))


async def report_async(llm: AsyncLLM, since: float = -math.inf) -> Report:
    """`report` for an `AsyncLLM`."""
    _check_runs_pat(llm.vllm_config)
    return Report.from_json((await llm.collective_rpc(REPORT_COMMAND, args=(since,)))[0])


def _check_runs_pat(vllm_config: VllmConfig) -> None:
    if not runs_pat(vllm_config):
        backend = vllm_config.parallel_config.distributed_executor_backend
        raise ValueError(
            f"this engine runs without PAT: distributed_executor_backend={backend!r}; make it "
            'with distributed_executor_backend="pat"'
        )
