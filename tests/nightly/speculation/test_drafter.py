"""vLLM's own n-gram drafter drafts what the checks of steps expect."""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from types import SimpleNamespace
from typing import Any

import numpy as np

from tests.support.ngram import propose
from tests.vllm.scheduler.protocol import LONGEST, MOST, SHORTEST, SPECULATIVE


def test_vllms_drafter_ends_at_the_longest_context() -> None:
    """In a process of its own: no engine starts in one where numba has threads."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        assert pool.submit(compare_with_vllms_drafter).result(timeout=600) > 300


def compare_with_vllms_drafter() -> int:
    """How many tokens both drafters have drafted, alike."""
    from vllm.v1.spec_decode.ngram_proposer import NgramProposer

    longest = 40
    config: Any = SimpleNamespace(
        speculative_config=SimpleNamespace(**SPECULATIVE),
        model_config=SimpleNamespace(max_model_len=longest),
        scheduler_config=SimpleNamespace(max_num_seqs=2),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
    )
    drafter = NgramProposer(config)
    rng = np.random.default_rng(1)
    total = 0
    for _ in range(300):
        tokens = rng.integers(0, 4, size=(2, longest), dtype=np.int32)
        lengths = rng.integers(1, longest + 1, size=2, dtype=np.int32)
        k = int(rng.integers(1, MOST + 1))
        drafts = drafter.propose(k, [[1], [1]], lengths, tokens)
        for row, length, draft in zip(tokens, lengths, drafts, strict=True):
            expected = propose(row[:length].tolist(), SHORTEST, LONGEST, min(k, longest - length))
            assert draft == expected
            total += len(draft)
    return total
