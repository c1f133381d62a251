"""Groups of KV caches: PAT's kinds are what vLLM's managers do."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)

from pat_vllm.layout import Layout
from pat_vllm.models.kinds import NULL_BLOCK
from pat_vllm.scheduler.switching.prefix_cache import num_cached
from pat_vllm.worker.layout_config import kinds_of
from tests.vllm.without_workers import BLOCK_SIZE, kv_cache_config, request_of, spec

FULL = spec(FullAttentionSpec)


def window(tokens: int) -> Any:
    return spec(SlidingWindowSpec, sliding_window=tokens)


def states(drafts: int = 0) -> Any:
    """Of linear attention, one for each block of tokens."""
    return MambaSpec(
        block_size=BLOCK_SIZE,
        shapes=((3 + drafts, 4 * 64), (2, 64, 64)),
        dtypes=(torch.bfloat16, torch.float32),
        mamba_type=MambaAttentionBackendEnum.GDN_ATTN,
        mamba_cache_mode="align",
        num_speculative_blocks=drafts,
    )


GROUPS = {
    "full": [FULL],
    "latent": [replace(spec(MLAAttentionSpec), num_kv_heads=1)],
    "latent in 8 bits": [
        replace(spec(MLAAttentionSpec, cache_dtype_str="fp8"), num_kv_heads=1, dtype=torch.uint8)
    ],
    "windows": [window(40)],
    "chunks": [FULL, spec(ChunkedLocalAttentionSpec, attention_chunk_size=64)],
    "several": [FULL, window(40), window(5), window(40)],
}
# Requests grow otherwise in these.
LINEAR = {"linear": [FULL, states(), states()], "linear, drafts": [FULL, states(2), states(2)]}


def replica_of(name: str, ahead: bool = False) -> Any:
    """What PAT asks of a replica, over a manager of vLLM's; `ahead`: with a drafter that reads
    the next token."""
    config = kv_cache_config(100, (GROUPS | LINEAR)[name])
    # vLLM says of an MTP module which group it is in.
    config.kv_cache_groups[0].is_eagle_group = ahead and name in LINEAR
    manager = KVCacheManager(config, 4096, BLOCK_SIZE, BLOCK_SIZE, use_eagle=ahead, log_stats=False)
    kinds = kinds_of(config, Layout(1, 1), 8, ahead)
    return SimpleNamespace(scheduler=SimpleNamespace(kv_cache_manager=manager), kinds=kinds)


@pytest.fixture(params=GROUPS)
def replica(request: pytest.FixtureRequest) -> Any:
    return replica_of(request.param)


def test_null_blocks_are_those_of_vllm(replica: Any) -> None:
    """Of a request that grows by any steps, before each step's tokens get their blocks."""
    manager = replica.scheduler.kv_cache_manager
    rng = random.Random(0)
    request = request_of("grows", [5] * 600, 1)
    while (computed := request.num_computed_tokens) < 600:
        new = min(rng.randint(1, 50), 600 - computed)
        assert manager.allocate_slots(request, new) is not None
        for kind, ids in zip(replica.kinds, manager.get_block_ids("grows"), strict=True):
            held = kind.held(computed)
            assert [place for place, id_ in enumerate(ids) if id_ != NULL_BLOCK] == [
                *range(held.start, kind.held(computed + new).stop)
            ]
        request.num_computed_tokens += new


def test_refused_drafts_leave_what_the_next_step_reads(replica: Any) -> None:
    """With steps in flight, any of whose drafts may be refused when they have been verified."""
    manager = replica.scheduler.kv_cache_manager
    rng = random.Random(2)
    request, in_flight = request_of("drafts", [5] * 900, 1), list[int]()
    beyond = 0
    while request.num_computed_tokens < 880:
        drafts = rng.randint(0, 6)
        lookahead = rng.randint(0, 6)
        assert (
            manager.allocate_slots(request, 1 + drafts, num_lookahead_tokens=lookahead) is not None
        )
        request.num_computed_tokens += 1 + drafts
        request.num_in_flight_tokens += 1 + drafts
        in_flight.append(drafts)
        while len(in_flight) > rng.randint(0, 2):
            verified = in_flight.pop(0)
            request.num_computed_tokens -= rng.randint(0, verified)
            request.num_in_flight_tokens -= 1 + verified
        certain = request.num_computed_tokens - sum(in_flight)
        for kind, ids in zip(replica.kinds, manager.get_block_ids("drafts"), strict=True):
            held = kind.held(certain)
            assert NULL_BLOCK not in ids[held.start :]
            beyond += len(ids) > kind.held(request.num_computed_tokens).stop
    assert beyond > 20, "no draft had a block of its own"


@pytest.mark.parametrize("name", [*GROUPS, *LINEAR])
def test_hits_are_those_of_vllm(name: str) -> None:
    """While requests with prefixes in common come and go, and blocks are evicted."""
    replica = replica_of(name)

    def check(request: Any, computed: int) -> int:
        cached = num_cached(replica, request.block_hashes[: (request.num_tokens - 1) // BLOCK_SIZE])
        assert cached * BLOCK_SIZE == computed
        return cached

    check_hits(replica, check)


@pytest.mark.parametrize("name", ["full", "windows", "several", "linear, drafts"])
def test_hits_with_a_drafter_that_reads_ahead(name: str) -> None:
    """A block less than what is cached for them. One group alone is looked up without that of the
    last token."""
    replica = replica_of(name, ahead=True)

    def check(request: Any, computed: int) -> int:
        most, hashes = (request.num_tokens - 1) // BLOCK_SIZE, request.block_hashes
        cached = num_cached(replica, hashes if len(replica.kinds) > 1 else hashes[:most])
        assert min(most, max(0, cached - 1)) * BLOCK_SIZE == computed
        return cached

    check_hits(replica, check)


def has_states(replica: Any) -> bool:
    return any(kind.padded for kind in replica.kinds)


def check_hits(replica: Any, check: Callable[[Any, int], int]) -> None:
    """Have `check` compare each request's computed tokens, and return blocks that are cached."""
    manager = replica.scheduler.kv_cache_manager
    rng = random.Random(1)
    prefixes = [[rng.randrange(400) for _ in range(200)] for _ in range(3)]
    lengths = set()
    for i in range(300):
        tokens = rng.choice(prefixes)[: rng.randint(1, 200)] + [i] * rng.randint(1, 30)
        request = request_of(f"{i}", tokens, 1)
        blocks, computed, _ = manager.get_computed_blocks(request)
        lengths.add(check(request, computed))
        # States are kept where a part of a prompt ends, at the end of a block.
        ends = {BLOCK_SIZE * rng.randrange(20) for _ in range(3 * has_states(replica))}
        for end in sorted({end for end in ends if computed < end < len(tokens)} | {len(tokens)}):
            manager.new_step_starts()
            done = max(computed, request.num_computed_tokens)
            hit = () if request.num_computed_tokens else (computed, blocks)
            if manager.allocate_slots(request, end - done, *hit) is None:
                break
            request.num_computed_tokens = end
        if request.num_computed_tokens:
            manager.free(request)
    assert len(lengths) > 5


@pytest.mark.parametrize("name", ["full", "latent", "windows"])
def test_kv_in_8_bits_has_half_the_bytes(name: str) -> None:
    """Of a token; heads, windows and blocks are the same."""
    specs = GROUPS[name]
    (plain,), (halved,) = (
        kinds_of(kv_cache_config(100, of), Layout(1, 1), 8)
        for of in (specs, [replace(each, dtype=torch.uint8) for each in specs])
    )
    assert replace(halved, token_bytes=2 * halved.token_bytes) == plain
