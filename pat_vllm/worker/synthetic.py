"""Synthetic requests: steps as vLLM's scheduler would send them, to warm up and to measure.

The values in the KV cache do not change how long a step takes, so a synthetic request need not
compute its KV. One that decodes at once claims that all tokens but its last are computed, as a
request with a cached prompt does.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

from pat_vllm.kv_transfer.plan import RequestBlocks
from pat_vllm.layout import Layout
from pat_vllm.models.kinds import NULL_BLOCK, Kinds

if TYPE_CHECKING:
    from vllm.config import VllmConfig

FIRST_BLOCK = NULL_BLOCK + 1
"""Id of the first KV block that a request may have: vLLM keeps the null block before it."""


@dataclass(frozen=True)
class SyntheticRequest:
    """A synthetic request.

    Attributes:
        tokens: number of tokens that the runner knows before the request's first step.
        computed: how many of them have KV.
        blocks: ids of KV blocks for all its steps, by group; null ones in front where a group, as
            one with a sliding window, keeps no KV of its first tokens.
        vocabulary: its tokens count down through so many ids, so that none of its n-grams repeats
            (unless it has more tokens than that). 0: its tokens are equal, so that all do.
    """

    request_id: str
    tokens: int
    computed: int
    blocks: tuple[tuple[int, ...], ...]
    vocabulary: int = 0

    @property
    def token_ids(self) -> list[int]:
        """The tokens that the runner knows before the first step."""
        if not self.vocabulary:
            return [1] * self.tokens
        return [-place % self.vocabulary for place in range(1, 1 + self.tokens)]


def make_requests(
    prefix: str,
    lengths: Sequence[int],
    room: int,
    kinds: Kinds,
    decoding: bool,
    first_block: int = FIRST_BLOCK,
    vocabulary: int = 0,
) -> list[SyntheticRequest]:
    """Requests with blocks of their own.

    Args:
        prefix: prefix of their ids.
        lengths: number of tokens of each request.
        room: most tokens by which a request will grow.
        kinds: kinds of the groups of KV caches.
        decoding: whether their first step decodes; otherwise it computes the whole prompt.
        first_block: id of the first block to use.
        vocabulary: as in `SyntheticRequest`.
    """
    requests = []
    for index, length in enumerate(lengths):
        computed = length - 1 if decoding else 0
        blocks = []
        for kind in kinds:
            null = kind.held(computed).start
            count = kind.held(length + room).stop - null + kind.drafts
            blocks.append((NULL_BLOCK,) * null + tuple(range(first_block, first_block + count)))
            first_block += count
        requests.append(
            SyntheticRequest(f"{prefix}-{index}", length, computed, tuple(blocks), vocabulary)
        )
    return requests


def draft_slots(vllm_config: VllmConfig) -> int:
    """Slots of each request in the tokens of a step, beside its own, as vLLM's scheduler counts."""
    speculative = vllm_config.speculative_config
    return speculative.max_num_new_slots_for_drafting if speculative is not None else 0


def next_block(requests: Sequence[SyntheticRequest]) -> int:
    """The first block that `make_requests` left free."""
    return requests[-1].blocks[-1][-1] + 1 if requests else FIRST_BLOCK


def add_new(
    step: SchedulerOutput, requests: Iterable[SyntheticRequest], use_v2: bool, max_tokens: int
) -> SchedulerOutput:
    """Add the first step of requests to `step`, and return it.

    Args:
        use_v2: whether it is for vLLM's Model Runner V2, which takes the prompt in another field.
        max_tokens: tokens that each request may generate.
    """
    tokens_of: dict[tuple[int, int], list[int]] = {}
    # Random sampling touches more kernels than greedy decoding, and is what rollouts do.
    sampling = SamplingParams(temperature=1.0, max_tokens=max_tokens)
    for request in requests:
        # Shared by requests of one length, so that the message stays short.
        key = request.tokens, request.vocabulary
        tokens = tokens_of[key] = tokens_of.get(key) or request.token_ids
        step.scheduled_new_reqs.append(
            NewRequestData(
                req_id=request.request_id,
                prompt_token_ids=tokens,
                mm_features=[],
                sampling_params=sampling,
                pooling_params=None,
                block_ids=tuple(list(blocks) for blocks in request.blocks),
                num_computed_tokens=request.computed,
                lora_request=None,
                prefill_token_ids=tokens if use_v2 else None,
            )
        )
        scheduled = request.tokens - request.computed
        step.num_scheduled_tokens[request.request_id] = scheduled
        step.total_num_scheduled_tokens += scheduled
    return step


def decode_step(
    requests: Sequence[SyntheticRequest], generated: Sequence[int], drafts: int = 0
) -> SchedulerOutput:
    """A decode step of requests that have had a step before.

    Args:
        generated: number of tokens that each request has generated, at least one. A step that is
            still in flight counts with all that it may generate, as in vLLM's scheduler.
        drafts: number of draft tokens of each request that the step verifies.
    """
    step = SchedulerOutput.make_empty()
    ids = [request.request_id for request in requests]
    step.scheduled_cached_reqs = CachedRequestData(
        req_ids=ids,
        resumed_req_ids=set(),
        new_token_ids=[],
        all_token_ids={},
        new_block_ids=[None] * len(ids),
        num_computed_tokens=[
            request.tokens + count - 1 for request, count in zip(requests, generated, strict=True)
        ],
        num_output_tokens=list(generated),
    )
    step.num_scheduled_tokens = dict.fromkeys(ids, 1 + drafts)
    step.total_num_scheduled_tokens = len(ids) * (1 + drafts)
    if drafts:
        step.scheduled_spec_decode_tokens = {request_id: [1] * drafts for request_id in ids}
    return step


def finish(requests: Iterable[SyntheticRequest]) -> SchedulerOutput:
    """A step that tells a runner that requests have ended, and computes nothing."""
    step = SchedulerOutput.make_empty()
    step.finished_req_ids = {request.request_id for request in requests}
    return step


def synthetic_kv(
    source: Layout, target: Layout, kinds: Kinds, num_blocks: int
) -> list[RequestBlocks]:
    """Moves for a warm-up: in each group, a block of KV from every replica of `source`, and one to
    every replica of `target`.

    Args:
        num_blocks: number of KV blocks that a replica of either layout has at least.
    """
    blocks = []
    # Several moves may read one block; each writes a block of its own.
    for i, group in product(range(max(source.replicas, target.replicas)), range(len(kinds))):
        taken, block = FIRST_BLOCK + group, FIRST_BLOCK + i // target.replicas * len(kinds) + group
        if block < num_blocks:
            where = i % source.replicas, (taken,), i % target.replicas, (block,), group
            blocks.append(RequestBlocks(f"pat-warm-up-{i}", *where))
    return blocks
