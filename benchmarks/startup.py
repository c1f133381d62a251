"""How long PAT with two layouts takes to start, against stock vLLM (`mp`) with tp=2.

    python -m benchmarks.startup

Bar: at most 60 % longer. Same model and flags, sides alternated; the time is that of `LLM(...)`,
after the imports.
"""

from __future__ import annotations

import argparse
from typing import Any

from benchmarks.common import Engine, Summary, machine, model, ratios, table, write_results

BAR = 1.60


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--repeats", type=int, default=3, help="of each side, after a warm-up")
    args = parser.parse_args()

    flags = dict(
        model=model(args.model),
        dtype="bfloat16",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=64,
        kv_cache_memory_bytes=1 << 30,
        tensor_parallel_size=2,
    )
    seconds: dict[str, list[float]] = {"pat": [], "mp": []}
    for repeat in range(args.repeats + 1):
        for backend, times in seconds.items() if repeat % 2 else reversed(seconds.items()):
            with Engine(flags | {"distributed_executor_backend": backend}, bind="0|1") as engine:
                took = engine.wait_until_ready()
            print(f"{backend}: {took:.1f} s{'' if repeat else ' (warm-up)'}", flush=True)
            if repeat:
                times.append(took)
    ratio = ratios(seconds["pat"], seconds["mp"])
    facts = machine()
    body: dict[str, Any] = {"flags": flags, "seconds": seconds, "ratio": ratio, "bar": BAR}
    rows = [
        [
            args.model,
            Summary.of(seconds["pat"]).show(),
            Summary.of(seconds["mp"]).show(),
            ratio.show(digits=2),
            BAR,
        ]
    ]
    header = ["model", "PAT, 2 layouts, s", "stock tp=2, s", "ratio", "bar"]
    text = f"Start-up; median (low-high) of {args.repeats} alternated starts.\n\n"
    write_results("startup", facts, body, text + table(header, rows))


if __name__ == "__main__":
    main()
