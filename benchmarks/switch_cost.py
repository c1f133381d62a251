"""What a switch costs with live requests: the stall by parts, against its physical floor.

    python -m benchmarks.switch_cost
    python -m benchmarks.switch_cost --ranks 8 --model qwen3-tiny --dtypes float32

`stall` is the time in which nothing runs. The whole switch also has `quiesce`, in which the steps
that had begun are finished, and which is therefore up to a step, whatever the switch does.

The floor is what copying the moved bytes (KV, and rows of weights) once would take, at the
bandwidth with which all ranks copy memory at the same time, measured in the same run. Bars: where
requests have 512 tokens, a stall is at most 1.5 floors and 20 ms, and 10 ms more where as many
cached prefixes come along; the first decode step after it takes at most twice a usual one.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from operator import itemgetter
from typing import Any

from benchmarks.common import Engine, checkpoint, random_prompts
from benchmarks.engine_process import PARK_SECONDS, step_until
from benchmarks.record import Summary, machine, table, write_results

LIVE = 8
CONTEXT = 512
STEPS_BETWEEN = 3
PARTS = ("quiesce", "plan", "states", "kv", "weights", "activate", "rpc", "finish")
BARS = {"floors": 1.5, "fixed_ms": 20.0, "caches_ms": 10.0, "first_step_ratio": 2.0}
CASES: Mapping[str, tuple[int | None, bool]] = {
    f"{CONTEXT} tokens": (CONTEXT, False),
    f"{CONTEXT} tokens, caches": (CONTEXT, True),
    "one block": (16, False),
    "empty": (None, False),
}
"""Tokens of a live request, None without any, and whether cached prefixes come along."""
FP8: Mapping[str, Any] = {
    "worker_extension_cls": "tests.support.fp8_updates.UpdatesByLayer",
    "max_num_batched_tokens": 512,
    "enable_prefix_caching": False,
}
"""Options of engines with fp8 weights on CPU, whose products are replaced (tests/support)."""
_COPIED_BYTES = 64 << 20


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--weights", choices=["inplace", "materialized"], default="inplace")
    parser.add_argument(
        "--experts", choices=["auto", "tp", "ep"], default="auto", help="of a mixture"
    )
    parser.add_argument("--ranks", type=int, default=2, help="all ways between their layouts")
    parser.add_argument("--repeats", type=int, default=7, help="switches each way, first discarded")
    parser.add_argument("--quantization", help="of weights, by vLLM: fp8_per_channel, ...")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=[*CASES])
    parser.add_argument("--kv-gib", type=float, default=1.5, help="KV memory of a rank")
    args = parser.parse_args()
    pat = {"kv_transfer": "migrate", "weights": args.weights, "policy": {"kind": "static", "tp": 1}}
    if args.experts != parser.get_default("experts"):
        pat["experts"] = args.experts

    facts = machine()
    body: dict[str, Any] = {"arguments": vars(args), "bars": BARS}
    text = (
        f"A switch of {args.ranks} ranks with {LIVE} live requests, {args.model}, weights "
        f"{args.weights}; median (low-high) of {args.repeats - 1}, ms. `stall` is the switch "
        "without `quiesce`, which finishes what had begun. `caches`: cached prefixes of as many "
        "requests that have ended come along; `one block`: contexts that fit one KV block; "
        f"`empty`: no requests. The bar is {BARS['floors']} floors and {BARS['fixed_ms']:.0f} ms, "
        f"with caches {BARS['caches_ms']:.0f} ms more; of the first step, as a multiple of a "
        f"usual one, {BARS['first_step_ratio']:.0f}.\n\n"
    )
    for dtype in args.dtypes:
        options = dict(
            model=str(checkpoint(args.model)),
            dtype=dtype,
            tensor_parallel_size=args.ranks,
            distributed_executor_backend="pat",
            additional_config={"pat": pat},
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=32,
            kv_cache_memory_bytes=int(args.kv_gib * 2**30) * (2 if dtype == "float32" else 1),
        )
        if args.quantization is not None:
            options |= dict(quantization=args.quantization, **FP8)
        with Engine(options, bind="0|1" if args.ranks == 2 else "nobind") as engine:
            engine.wait_until_ready()
            context = max((CASES[name][0] or 0 for name in args.cases), default=0)
            engine.call(switches, context or None, 2, 0, False)  # warm-up
            cases = {
                name: engine.call(switches, context, args.repeats, seed, caches)
                for seed, (name, (context, caches)) in enumerate(CASES.items(), 1)
                if name in args.cases
            }
            time.sleep(PARK_SECONDS)
            memcpy = memcpy_bandwidth((0, 1))
        body[dtype] = {"cases": cases, "memcpy_bytes_per_second": memcpy}
        text += f"## {dtype}\n\nMemory is copied at {memcpy / 1e9:.1f} GB/s.\n\n"
        text += _table(cases, memcpy) + "\n"
    name = f"switch-cost-{args.model}-{args.quantization or args.weights}"
    write_results(name + (f"-{args.ranks}" if args.ranks > 2 else ""), facts, body, text)


def circuit(start: int, others: Sequence[int]) -> list[int]:
    """Where to go, from `start` on and back to it, to take each way between two layouts once."""
    walk = []
    for i, other in enumerate(others):
        walk += [other, *(circuit(other, others[1:]) if i == 0 else []), start]
    return walk


def switches(
    llm: Any, context: int | None, repeats: int, seed: int, caches: bool
) -> list[dict[str, Any]]:
    """Take each way between two layouts `repeats` times, with one batch of requests; the reports.

    With `caches`, prefixes of the batch before come along.
    """
    from vllm import SamplingParams

    import pat_vllm

    report = pat_vllm.report(llm)
    begun = len(report.switches)
    base, *others = (layout.tp for layout in report.layouts)
    walk = circuit(base, others) * repeats
    if not caches:
        assert llm.reset_prefix_cache()
    produced: dict[str, int] = {}
    if context is not None:
        steps = len(walk) * STEPS_BETWEEN + 40
        params = SamplingParams(
            temperature=1.0, max_tokens=steps, ignore_eos=True, detokenize=False
        )
        # The last switches happen at `context` tokens, so that blocks are full, not exceeded.
        prompts = random_prompts(LIVE, max(4, context - steps), seed)
        produced = {f"{seed}-{i}": 0 for i in range(LIVE)}
        for name, prompt in zip(produced, prompts, strict=True):
            llm.llm_engine.add_request(name, prompt, params)
    for i, tp in enumerate(walk):
        step_until(llm, produced, STEPS_BETWEEN * (i + 1))
        pat_vllm.switch(llm, tp)
    step_until(llm, produced, None)
    report = pat_vllm.report(llm)
    usual = {layout: steps.median for layout, steps in report.steps.items()}
    return [
        asdict(switch)
        | {"way": f"{switch.source} -> {switch.target}"}
        | {"usual_step": usual.get(switch.target)}
        for switch in report.switches[begun:]
        if switch.reason == "forced"
    ]


def memcpy_bandwidth(cores: Sequence[int]) -> float:
    """Bytes per second that one copying process per core moves, all at the same time."""
    begin_at = time.monotonic() + 3.0
    with multiprocessing.get_context("spawn").Pool(len(cores)) as pool:
        rates = pool.starmap(_copy_rate, [(core, begin_at) for core in cores], 1)
    return sum(rates)


def _copy_rate(core: int, begin_at: float) -> float:
    import numpy as np

    os.sched_setaffinity(0, {core})
    source, target = (np.ones(_COPIED_BYTES, np.uint8) for _ in range(2))
    while time.monotonic() < begin_at:
        time.sleep(1e-3)
    times = []
    for _ in range(15):
        begun = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begun)
    return _COPIED_BYTES / statistics.median(times)


def _table(cases: Mapping[str, Sequence[dict[str, Any]]], memcpy: float) -> str:
    rows = []
    for case, of_case in cases.items():
        for name, group in groupby(sorted(of_case, key=itemgetter("way")), itemgetter("way")):
            _, *of_way = group  # the first is a warm-up
            kv = statistics.median(switch["kv_bytes"] for switch in of_way)
            weights = of_way[0]["weight_bytes"]
            floor = (kv + weights) / memcpy
            bar = BARS["floors"] * floor * 1e3 + BARS["fixed_ms"]
            bar += BARS["caches_ms"] * CASES[case][1]
            first = [s["first_step"] / s["usual_step"] for s in of_way if s["first_step"]]
            rows.append(
                [
                    case,
                    name,
                    f"{kv / 1e6:.0f} + {weights / 1e6:.0f}",
                    f"{floor * 1e3:.1f}",
                    Summary.of([s["seconds"] - s["quiesce"] for s in of_way]).show(1e3),
                    f"{bar:.0f}",
                    *(f"{statistics.median(s[part] for s in of_way) * 1e3:.2f}" for part in PARTS),
                    Summary.of(first).show(1, 2) if first else "-",
                ]
            )
    head = ["case", "switch", "KV + weights, MB", "floor", "stall", "bar", *PARTS, "first step"]
    return table(head, rows)


if __name__ == "__main__":
    main()
