"""A batch with given lengths, served in an engine's process. Nothing of PAT here."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Request:
    """A request: prompt token ids, tokens to generate, seconds after the beginning."""

    prompt: tuple[int, ...]
    length: int
    arrival: float


def serve_batch(
    llm: Any, requests: Sequence[Request], name: str
) -> tuple[float, list[float], list[int]]:
    """Serve requests as they arrive, neither less nor more tokens than each wants.

    Args:
        name: of the batch, for the requests' ids.

    Returns:
        When it began and when each request ended, on the monotonic clock, and the tokens of each.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    engine = llm.llm_engine
    # Like rollouts: at temperature 1 and unseeded. Only lengths have to be the same on all sides.
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=request.length,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for request in requests
    ]
    waiting = sorted(range(len(requests)), key=lambda i: requests[i].arrival, reverse=True)
    ended = [math.nan] * len(requests)
    tokens = [0] * len(requests)
    index: dict[str, int] = {}
    began = time.monotonic()
    while waiting or engine.has_unfinished_requests():
        now = time.monotonic() - began
        while waiting and requests[waiting[-1]].arrival <= now:
            i = waiting.pop()
            index[f"{name}-{i}"] = i
            prompt = {"prompt_token_ids": list(requests[i].prompt)}
            engine.add_request(f"{name}-{i}", prompt, params[i])
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, requests[waiting[-1]].arrival - (time.monotonic() - began)))
            continue
        for output in engine.step():
            if output.finished:
                i = index[output.request_id]
                ended[i] = time.monotonic()
                tokens[i] = len(output.outputs[0].token_ids)
    return began, ended, tokens
