"""`python -m benchmarks.gpu [--quick] [--device cuda|cpu] [--engines RANKS]`."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import ceiling, kv_blocks, report
from benchmarks.gpu.timing import Stopwatch, scale_of
from benchmarks.record import RESULTS


def main(arguments: Sequence[str]) -> Path:
    """Measure, and write JSON and Markdown after each part; returns the path of the JSON."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the most important, in a minute")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--engines", type=int, help="also time engines of so many ranks, by vLLM")
    shape_help = "of their model, as of pat-vllm doctor, or a known model's name"
    parser.add_argument("--shape", default="dense", help=shape_help)
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        parser.error("no GPU is at hand; --device cpu runs tiny shapes, to see that it works")

    device = torch.device(given.device)
    scale = scale_of(device, given.quick)
    stopwatch = Stopwatch(device, scale.repeats)
    results: dict[str, Any] = {"machine": report.machine(device)}
    name = "cpu" if given.device == "cpu" else f"gpu{'-quick' if given.quick else ''}"
    stem = given.out / f"{results['machine']['date'][:10]}-{name}"
    given.out.mkdir(parents=True, exist_ok=True)

    begun = time.perf_counter()
    results["copies"] = ceiling.measure(stopwatch, scale)
    rate = results["copies"]["copy_bytes_per_second"]
    parts: dict[str, Callable[[], dict[str, Any]]]
    parts = {"kv": partial(kv_blocks.measure, stopwatch, scale, rate)}
    if given.engines:
        from benchmarks.gpu import engines

        on_cpu = device.type == "cpu"
        parts["engines"] = partial(engines.measure, given.engines, given.shape, on_cpu)
    for part, measure in parts.items():
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        results[part] = measure()
        results["machine"]["seconds"] = round(time.perf_counter() - begun, 1)
        print(f"{part}: done after {results['machine']['seconds']} s", flush=True)
        stem.with_suffix(".json").write_text(json.dumps(results, indent=1) + "\n")
        stem.with_suffix(".md").write_text(report.markdown(results))
    print(report.markdown(results))
    return stem.with_suffix(".json")


if __name__ == "__main__":
    main(sys.argv[1:])
