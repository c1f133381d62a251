"""What calls of worker methods cost an engine that generates: one each second.

    python -m benchmarks.worker_calls

Sides: no calls, one that is known to read, and one that PAT does not know and therefore takes for
a weight update. They take turns on one engine; a ratio is of the seconds of the same batch, repeat
by repeat. Weights are in place, as on GPUs; the layout is not the base layout, so that rows of
weights trade places for each update.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.common import Engine, machine, model, random_prompts, table, write_results
from benchmarks.paired import paired_ratio, turns

SIDES = ("none", "reads", "unknown")
CALLS = {"reads": "check_health", "unknown": "report_something"}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-100m")
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=160)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between calls")
    parser.add_argument("--repeats", type=int, default=8)
    arguments = parser.parse_args()
    facts = machine()
    options: dict[str, Any] = {
        "model": model(arguments.model),
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "pat",
        "additional_config": {"pat": {"weights": "inplace", "policy": {"kind": "static"}}},
        "worker_extension_cls": "benchmarks.worker_calls.Extension",
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 128 << 20,
    }
    with Engine(options, bind="0|1", plain=True, core_inside=True) as engine:
        engine.wait_until_ready()
        shape = (arguments.requests, arguments.tokens, arguments.every)
        for side in SIDES:
            engine.call(_batch, side, *shape)
        seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        stalls: dict[str, list[float]] = {side: [] for side in SIDES}
        for order in turns(SIDES, arguments.repeats):
            for side in order:
                took, of_calls = engine.call(_batch, side, *shape)
                seconds[side].append(took)
                stalls[side] += of_calls
    rows = [
        (
            side,
            f"{statistics.median(seconds[side]):.2f}",
            paired_ratio(seconds[side], seconds["none"]).show(3),
            f"{1e3 * statistics.median(stalls[side]):.1f}" if stalls[side] else "",
        )
        for side in SIDES
    ]
    head = ("a call each second", "batch, s", "/ none (interval)", "call and next step, ms")
    write_results("worker-calls", facts, {"seconds": seconds, "stalls": stalls}, table(head, rows))


class Extension:
    """Of the workers."""

    def report_something(self) -> int:
        """What PAT cannot know to read only."""
        return 0


def _batch(
    llm: Any, side: str, requests: int, tokens: int, every: float
) -> tuple[float, Sequence[float]]:
    """Seconds of a batch in one group, and of each call with the step after it."""
    from vllm import SamplingParams

    import pat_vllm

    pat_vllm.switch(llm, tp=2)
    engine = llm.llm_engine
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0)
    for i, prompt in enumerate(random_prompts(requests, 64, seed=0)):
        engine.add_request(f"{side}{i}", prompt, params)
    stalls: list[float] = []
    begun = last = time.perf_counter()
    while engine.has_unfinished_requests():
        called = side in CALLS and time.perf_counter() - last >= every
        if called:
            last = time.perf_counter()
            llm.collective_rpc(CALLS[side])
        engine.step()
        if called:
            stalls.append(time.perf_counter() - last)
    return time.perf_counter() - begun, stalls


if __name__ == "__main__":
    main()
