"""Whether a slow replica delays another: one decodes while the other is in a long prefill.

    python -m benchmarks.free_running

One engine, two replicas of tp=1. A request decodes on one of them; then a long prompt comes to the
other, whose prefill is one step of seconds. Times between the tokens of the first request are
compared with those of when it was alone, and of when another decoded beside it, for replicas share
the memory's bandwidth here. Were they to step together, one of the times would be the prefill's.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from benchmarks.common import Engine, Summary, machine, model, random_prompts, table, write_results

PHASES = ("alone", "beside a decode", "beside a prefill")
_TOKENS = 40


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-100m")
    parser.add_argument("--repeats", type=int, default=5, help="after one that warms up")
    parser.add_argument("--prompt", type=int, default=3000, help="tokens of the long prompt")
    args = parser.parse_args()

    options = dict(
        model=model(args.model),
        dtype="float32",
        tensor_parallel_size=2,
        distributed_executor_backend="pat",
        additional_config={"pat": {"policy": {"kind": "static", "tp": 1}}},
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=4096,
        max_num_batched_tokens=4096,
        max_num_seqs=16,
        kv_cache_memory_bytes=1 << 30,
    )
    facts = machine()
    with Engine(options, bind="0|1") as engine:
        engine.wait_until_ready()
        runs = [engine.call(_run, args.prompt, seed) for seed in range(args.repeats + 1)][1:]
    rows = []
    for phase in PHASES:
        gaps = [gap for run in runs for gap in run[phase]]
        rows.append([phase, len(gaps), Summary.of(gaps).show(1e3, 1), f"{max(gaps) * 1e3:.1f}"])
    prefill = Summary.of([run["prefill"] for run in runs])
    text = (
        f"{args.model}, float32. A prefill of {args.prompt} tokens took {prefill.show(1e3)} ms, "
        "one step of its replica. Median (low-high) of the times between two tokens of the request "
        "on the other replica:\n\n"
    )
    header = ["the request decodes", "tokens", "ms between tokens", "longest, ms"]
    write_results("free-running", facts, {"runs": runs}, text + table(header, rows))


def _run(llm: Any, long: int, seed: int) -> dict[str, Any]:
    """Seconds between the tokens of a request in each phase, and of the prefill."""
    from vllm import SamplingParams

    engine = llm.llm_engine

    def add(name: str, tokens: int, prompt: int) -> None:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False)
        engine.add_request(name, random_prompts(1, prompt, seed)[0], params)

    found: dict[str, Any] = {phase: [] for phase in PHASES}
    add(f"watched {seed}", 10_000, 16)
    last = None
    for phase in PHASES:
        other = f"{phase} {seed}"
        if phase == "beside a decode":
            add(other, _TOKENS, 16)
        elif phase == "beside a prefill":
            add(other, 1, long)
        begun = time.perf_counter()
        ended = False
        while not ended:
            for output in engine.step():
                now = time.perf_counter()
                if output.request_id == other:
                    ended = output.finished
                    continue
                if last is not None:
                    found[phase].append(now - last)
                last = now
            ended = ended or (phase == "alone" and len(found[phase]) >= _TOKENS)
        found["prefill"] = time.perf_counter() - begun
    engine.abort_request([f"watched {seed}"])
    while engine.has_unfinished_requests():
        engine.step()
    return found


if __name__ == "__main__":
    main()
