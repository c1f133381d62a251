"""Runs made-up requests through a layout, so that no first step of a user pays for it.

Kernels are compiled for each class of batch size (1, 2, more) and communicators set themselves up
at first use; a layout entered in mid-generation must have that behind it.
"""

from __future__ import annotations

import time
from typing import Any

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

BATCH_SIZES = (1, 2, 3)
"""Decode batches to run; `torch.compile` specializes on 1, and on 2 where it becomes dynamic."""
DECODE_STEPS = 2
PREFILL_TOKENS = 256
"""Length of the prompt whose prefill is timed, where the engine's limits allow it."""


def warm_up(worker: Any, num_blocks: int, block_size: int, use_v2: bool) -> float:
    """Run prefills and decode steps in the worker's active layout. All ranks of a replica call it.

    Returns:
        Prefill rate, tokens per second, from the second of two equal prefills.
    """
    config = worker.vllm_config
    limit = min(
        config.scheduler_config.max_num_batched_tokens,
        config.model_config.max_model_len - DECODE_STEPS - 1,
        (num_blocks - 1) * block_size - DECODE_STEPS,
    )
    long = max(1, min(PREFILL_TOKENS, limit))
    rate = 0.0
    for _ in range(2):
        rate = long / _run(worker, [long], block_size, use_v2, decode_steps=0)
    for size in BATCH_SIZES:
        short = max(1, min(4, limit // size))
        fits = size * (1 + (short + DECODE_STEPS) // block_size) < num_blocks
        if fits and size <= config.scheduler_config.max_num_seqs:
            _run(worker, [short] * size, block_size, use_v2, decode_steps=DECODE_STEPS)
    return rate


def _run(
    worker: Any, prompts: list[int], block_size: int, use_v2: bool, decode_steps: int
) -> float:
    """Prefill prompts of the given lengths, decode, forget. Returns seconds of the prefill."""
    blocks: list[list[int]] = []
    next_block = 1  # block 0 is vLLM's null block
    for length in prompts:
        count = 1 + (length + decode_steps) // block_size
        blocks.append(list(range(next_block, next_block + count)))
        next_block += count
    ids = [f"pat-warm-up-{i}" for i in range(len(prompts))]

    start = time.perf_counter()
    _step(worker, _prefill(ids, prompts, blocks, use_v2))
    seconds = time.perf_counter() - start
    for done in range(decode_steps):
        _step(worker, _decode(ids, [length + done for length in prompts], done + 1))

    end = SchedulerOutput.make_empty()
    end.finished_req_ids = set(ids)
    worker.execute_model(end)
    return seconds


def _step(worker: Any, step: SchedulerOutput) -> None:
    output = worker.execute_model(step)
    if output is None:
        output = worker.sample_tokens(None)
    if hasattr(output, "get_output"):
        output.get_output()  # waits for the device


def _prefill(
    ids: list[str], prompts: list[int], blocks: list[list[int]], use_v2: bool
) -> SchedulerOutput:
    step = SchedulerOutput.make_empty()
    for request_id, length, block_ids in zip(ids, prompts, blocks, strict=True):
        tokens = [1] * length
        step.scheduled_new_reqs.append(
            NewRequestData(
                req_id=request_id,
                prompt_token_ids=tokens,
                mm_features=[],
                # Random sampling touches more kernels than greedy decoding.
                sampling_params=SamplingParams(temperature=1.0, max_tokens=DECODE_STEPS + 1),
                pooling_params=None,
                block_ids=(block_ids,),
                num_computed_tokens=0,
                lora_request=None,
                prefill_token_ids=list(tokens) if use_v2 else None,
            )
        )
        step.num_scheduled_tokens[request_id] = length
    step.total_num_scheduled_tokens = sum(prompts)
    return step


def _decode(ids: list[str], computed: list[int], num_output: int) -> SchedulerOutput:
    step = SchedulerOutput.make_empty()
    step.scheduled_cached_reqs = CachedRequestData(
        req_ids=list(ids),
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None] * len(ids),
        num_computed_tokens=list(computed),
        num_output_tokens=[num_output] * len(ids),
    )
    step.num_scheduled_tokens = dict.fromkeys(ids, 1)
    step.total_num_scheduled_tokens = len(ids)
    return step
