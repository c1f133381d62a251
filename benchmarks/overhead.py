"""What PAT costs while it does not switch: a static layout against stock vLLM.

    python -m benchmarks.overhead

(a) PAT kept in tp=2 against stock vLLM (`mp`) with tp=2: at most 1.03 times its time.
(b) PAT kept in tp=1, so two replicas in one engine, against two independent stock engines on one
    core each, with half of the requests each, started at the same time: at most 1.05 times.

The engines of a comparison stay alive and take turns, batch by batch; one that waits is parked.
Same model, flags, prompts and lengths, and the same KV memory per core. With `--weights inplace`
the layouts share one copy of the weights, (a) then has its rows where a switch brings them, and the
stock engines keep plain weights, too: vLLM packs them for its CPU kernels otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from typing import Any

from benchmarks.common import (
    PARK_SECONDS,
    Engine,
    Summary,
    busy_cores,
    generate,
    machine,
    model,
    random_prompts,
    ratios,
    stock_limits,
    table,
    write_results,
)

BARS = {"tp2": 1.03, "tp1": 1.05}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-100m")
    parser.add_argument("--only", choices=sorted(BARS))
    parser.add_argument("--repeats", type=int, default=7, help="of each side, after a warm-up")
    parser.add_argument("--weights", choices=["materialized", "inplace"], default="materialized")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=48, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--kv-mib", type=int, default=512, help="KV memory of a core")
    args = parser.parse_args()

    flags = dict(
        model=model(args.model),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=args.kv_mib << 20,
    )
    two = flags | {"tensor_parallel_size": 2}
    pat = two | {"distributed_executor_backend": "pat"}
    sides: dict[str, dict[str, list[tuple[dict[str, Any], str]]]] = {
        "tp2": {
            "pat": [(pat | _static(2, args.weights), "0|1")],
            "stock": [
                (two | stock_limits(flags, tp=2) | {"distributed_executor_backend": "mp"}, "0|1")
            ],
        },
        "tp1": {
            "pat": [(pat | _static(1, args.weights), "0|1")],
            "stock": [(flags, "0"), (flags, "1")],
        },
    }
    facts = machine()
    body: dict[str, Any] = {"arguments": vars(args), "flags": flags, "bars": BARS}
    rows = []
    for name, engines in sides.items():
        if args.only in (None, name):
            seconds, idle = _compare(engines, args)
            ratio = ratios(seconds["pat"], seconds["stock"])
            body[name] = {"seconds": seconds, "ratio": ratio, "idle_busy_cores": idle}
            steps = Summary.of(seconds["stock"]).median / args.new_tokens
            rows.append(
                [
                    f"{name}: {'one group' if name == 'tp2' else 'two replicas / engines'}",
                    Summary.of(seconds["pat"]).show(digits=3),
                    Summary.of(seconds["stock"]).show(digits=3),
                    f"{steps * 1e3:.1f}",
                    ratio.show(digits=3),
                    BARS[name],
                    f"{idle:.2f}",
                ]
            )
    text = (
        f"{args.requests} requests of {args.prompt} + {args.new_tokens} tokens, {args.model}; "
        f"median (low-high) of {args.repeats} alternated batches. The ratio is the median of the "
        "ratios of neighbouring batches.\n\n"
    )
    header = ["", "PAT s", "stock s", "stock ms/step", "ratio", "bar", "cores busy when all wait"]
    name = "overhead" + (f"-{args.model}" if args.model != parser.get_default("model") else "")
    name += f"-{args.only}" if args.only else ""
    name += "-inplace" if args.weights == "inplace" else ""
    write_results(name, facts, body, text + table(header, rows))


def _static(tp: int, weights: str) -> dict[str, Any]:
    pat = {"policy": {"kind": "static", "tp": tp}, "weights": weights}
    return {"additional_config": {"pat": pat}}


def _compare(
    sides: dict[str, list[tuple[dict[str, Any], str]]], args: argparse.Namespace
) -> tuple[dict[str, list[float]], float]:
    """Seconds per batch of each side, and how many cores the engines take when all wait."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    with ExitStack() as stack:
        running: dict[str, list[Engine]] = {}
        for side, options in sides.items():
            plain = side == "stock" and args.weights == "inplace"
            running[side] = [stack.enter_context(Engine(*one, plain=plain)) for one in options]
            for engine in running[side]:
                engine.wait_until_ready()
        for engines in running.values():
            _batch(engines, args, seed=0)
        idle: list[float] = []
        for repeat in range(1, args.repeats + 1):
            order = list(running)
            for side in order if repeat % 2 else reversed(order):
                time.sleep(PARK_SECONDS)
                idle.append(busy_cores(0.3))
                seconds[side].append(_batch(running[side], args, seed=repeat))
    return seconds, statistics.median(idle)


def _batch(engines: list[Engine], args: argparse.Namespace, seed: int) -> float:
    """Seconds from the common start until the last engine is done."""
    prompts = random_prompts(args.requests, args.prompt, seed)
    begin_at = time.monotonic() + 0.2
    for index, engine in enumerate(engines):
        engine.start(generate, prompts[index :: len(engines)], args.new_tokens, begin_at)
    spans = [engine.result() for engine in engines]
    return max(end for _, end in spans) - min(begin for begin, _ in spans)


if __name__ == "__main__":
    main()
