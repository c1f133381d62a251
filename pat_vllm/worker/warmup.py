"""Warms a layout up with synthetic requests, so that the first steps in it are not slower.

Kernels are compiled for each class of batch size (1, 2, more), and communicators set themselves up
at first use. Both must happen before a layout is entered during generation.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from itertools import count, permutations
from typing import TYPE_CHECKING

from vllm.v1.core.sched.output import SchedulerOutput

from pat_vllm.kv_transfer.plan import BlockMove, plan_moves
from pat_vllm.models.kinds import Kinds, block_size
from pat_vllm.models.kinds import num_blocks as num_blocks_of
from pat_vllm.worker.synthetic import (
    FIRST_BLOCK,
    add_new,
    decode_step,
    draft_slots,
    finish,
    make_requests,
    synthetic_kv,
)

if TYPE_CHECKING:
    from pat_vllm.worker.runtime import LayoutRuntime
    from pat_vllm.worker.worker import PATWorkerMixin

BATCH_SIZES = (1, 2, 3)
"""Decode batches to run; `torch.compile` specializes on 1, and on 2 where it becomes dynamic."""
DECODE_STEPS = 2
PREFILL_TOKENS = 256
"""Length of the prompt whose prefill is timed, where the engine's limits allow it."""
_NUMBERS = count()


def warm_up(worker: PATWorkerMixin, num_blocks: int, kinds: Kinds) -> float:
    """Run prefills and decode steps in the worker's active layout. All ranks of a replica call it.

    Returns:
        Prefill rate, tokens per second, from the second of two equal prefills.
    """
    config = worker.vllm_config
    slots = draft_slots(config)
    limit = min(
        config.scheduler_config.max_num_batched_tokens - slots,
        config.model_config.max_model_len - DECODE_STEPS - 1,
        # Blocks of a step's tokens are given back after it.
        (num_blocks - FIRST_BLOCK) // len(kinds) * block_size(kinds) - DECODE_STEPS,
    )
    long = max(1, min(PREFILL_TOKENS, limit))
    rate = 0.0
    for _ in range(2):
        rate = long / _run(worker, [long], kinds, decode_steps=0)
    for size in BATCH_SIZES:
        short = max(1, min(4, limit // size - slots))
        tokens = short + DECODE_STEPS + 1
        fits = size * num_blocks_of(kinds, tokens, room=tokens) < num_blocks
        if fits and size <= config.scheduler_config.max_num_seqs:
            _run(worker, [short] * size, kinds, decode_steps=DECODE_STEPS)
    if (drafts := config.num_speculative_tokens) and 2 * (2 + drafts) <= limit:
        # The drafter compiles at its first drafts, too.
        _run(worker, [1 + drafts], kinds, decode_steps=1, drafts=drafts)
    return rate


def warm_up_moves(
    runtimes: Iterable[LayoutRuntime],
    kinds: Kinds,
    move: Callable[[LayoutRuntime, LayoutRuntime, Sequence[BlockMove]], None],
) -> None:
    """Move synthetic KV between every two layouts. All ranks call it.

    Args:
        move: moves blocks from one layout to another.
    """
    for source, target in permutations(runtimes, 2):
        assert source.kv_cache_config is not None and target.kv_cache_config is not None
        num_blocks = min(source.kv_cache_config.num_blocks, target.kv_cache_config.num_blocks)
        requests = synthetic_kv(source.layout, target.layout, kinds, num_blocks)
        move(source, target, plan_moves(source.layout, target.layout, kinds, requests))


def _run(
    worker: PATWorkerMixin, prompts: list[int], kinds: Kinds, decode_steps: int, drafts: int = 0
) -> float:
    """Prefill prompts of the given lengths, decode, forget. Returns seconds of the prefill."""
    room = decode_steps + drafts + 1
    # Ids are new ones: vLLM looks for states of linear attention where the last of an id had them.
    prefix = f"pat-warm-up-{next(_NUMBERS)}"
    requests = make_requests(prefix, prompts, room, kinds, decoding=False)
    use_v2 = worker.vllm_config.use_v2_model_runner
    start = time.perf_counter()
    first = add_new(SchedulerOutput.make_empty(), requests, use_v2, DECODE_STEPS + drafts + 1)
    first.num_spec_tokens_to_schedule = drafts
    _step(worker, first)
    seconds = time.perf_counter() - start
    for done in range(1, decode_steps + 1):
        # Nobody counts what a step accepts: one that verifies drafts is the last.
        _step(worker, decode_step(requests, [done] * len(requests), drafts))
    worker.execute_model(finish(requests))
    return seconds


def _step(worker: PATWorkerMixin, step: SchedulerOutput) -> None:
    output = worker.execute_model(step)
    if output is None:
        output = worker.sample_tokens(None)
    if hasattr(output, "get_output"):
        output.get_output()  # waits for the device
