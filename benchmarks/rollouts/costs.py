"""What keeping earlier responses costs the engine core, without an engine."""

from __future__ import annotations

import random
import time
from types import SimpleNamespace
from typing import Any

from vllm import SamplingParams
from vllm.v1.engine import FinishReason

from pat_vllm.predictor.state import Turn
from pat_vllm.scheduler.draft_rows import DraftRows

REQUESTS, SAMPLES, TOKENS, EPOCHS = 256, 8, 2000, 4


def costs() -> str:
    """Text: what one replica's rollouts take, by epoch."""
    rng = random.Random(0)
    prompts = [_tokens(rng, 200) for _ in range(REQUESTS // SAMPLES)]
    rows = DraftRows(max_bytes=1 << 30, num_ranks=1, max_num_seqs=REQUESTS)
    lines = []
    for epoch in range(EPOCHS):
        requests: list[Any] = [
            SimpleNamespace(
                request_id=f"{epoch}/{number}",
                prompt_token_ids=prompts[number // SAMPLES],
                output_token_ids=_tokens(rng, TOKENS),
                cache_salt=None,
                sampling_params=SamplingParams(),
            )
            for number in range(REQUESTS)
        ]
        names = [one.request_id for one in requests]
        step: Any = SimpleNamespace(num_scheduled_tokens=dict.fromkeys(names, 1))
        turns = [Turn(epoch * REQUESTS + number, 0, 0) for number in range(REQUESTS)]
        began = time.perf_counter()
        for one, turn in zip(requests, turns, strict=True):
            rows.arrived(one, turn)
        arrived = time.perf_counter()
        rows.update(step, names, [0])
        first = time.perf_counter()
        for _ in range(1000):
            rows.update(step, names, [0])
        idle = time.perf_counter()
        assert {one for one in names if one in rows.repeated} == ({*names} if epoch else set())
        apart = time.perf_counter()
        for one in requests:
            rows.ended(one, FinishReason.STOP)
        ended = time.perf_counter()
        made = REQUESTS * TOKENS
        lines.append(
            f"epoch {epoch}: {1e6 * (arrived - began) / REQUESTS:.1f} us a request when it comes, "
            f"{1e6 * (ended - apart) / made:.3f} us a token when it ends, "
            f"{1e3 * (first - arrived):.1f} ms in the first step, {1e3 * (idle - first):.2f} us in "
            f"another, {1e6 * (apart - idle):.0f} us to tell requests apart; "
            f"{rows.num_bytes / (made * (epoch + 1)):.2f} bytes a token"
        )
    return "\n".join(lines)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(150_000) for _ in range(count)]
