"""What a switch costs with live requests: the stall by parts, against its physical floor.

    python -m benchmarks.switch_cost
    python -m benchmarks.switch_cost --ranks 8 --model qwen3-tiny --dtypes float32

`stall` is the time in which nothing runs. The whole switch also has `quiesce`, in which the steps
that had begun are finished, and which is therefore up to a step, whatever the switch does.

The floor is what copying the moved bytes (KV, and rows of weights) once would take, at the
bandwidth with which all ranks copy memory at the same time, measured in the same run. Bars: the
stall is at most 1.5 floors and 20 ms, where at least 256 MB of KV are moved; the first decode step
after it takes at most twice a usual one. `fixed` is the stall without any KV moved, by a line
through the measured stalls of two sizes; what a switch takes without live requests is beside it.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.common import Engine, model, random_prompts
from benchmarks.engine_process import PARK_SECONDS, step_until
from benchmarks.record import Summary, machine, table, write_results
from pat_vllm.cli.demo_batch import model_config
from pat_vllm.config import PATConfig
from pat_vllm.models.moe_config import MoEConfig

LIVE = 8
CONTEXT = 512
STEPS_BETWEEN = 3
PARTS = (
    "quiesce",
    "plan",
    "states",
    "kv",
    "weights",
    "activate",
    "rpc",
    "finish",
)
BARS = {"floors": 1.5, "fixed_ms": 20, "caches_ms": 10, "first_step_ratio": 2.0}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-0.6b")
    parser.add_argument("--dtypes", nargs="+", default=["bfloat16", "float32"])
    parser.add_argument("--weights", choices=["inplace", "materialized"], default="inplace")
    kinds = ["both", "tp", "ep"]
    parser.add_argument("--experts", choices=kinds, default="both", help="of a mixture, in place")
    parser.add_argument("--ranks", type=int, default=2, help="all ways between their layouts")
    parser.add_argument("--repeats", type=int, default=7, help="switches each way, first discarded")
    parser.add_argument("--kv-gib", type=float, default=1.5, help="KV memory of a rank")
    args = parser.parse_args()
    checkpoint = model(args.model)
    pat = PATConfig(experts=args.experts if args.weights == "inplace" else "tp")
    mixture = MoEConfig.from_config(model_config(Path(checkpoint)))
    if mixture is None:
        pat = PATConfig()
    base, *others = (str(layout) for layout in pat.resolve_layouts(args.ranks, mixture))
    walk = circuit(base, others)

    facts = machine()
    body: dict[str, Any] = {"model": args.model, "weights": args.weights, "bars": BARS}
    text = (
        f"A switch of {args.ranks} ranks with {LIVE} live requests of {CONTEXT} tokens, "
        f"{args.model}, weights {args.weights}; median (low-high) of {args.repeats - 1}, ms. "
        "`stall` is the switch without `quiesce`, which finishes what had begun. `one block`: "
        "contexts that fit one KV block; `empty`: no requests; `caches`: as many contexts of ended "
        "requests are carried. `fixed`: the stall without moving "
        "KV, by a line through the two sizes.\n\n"
    )
    for dtype in args.dtypes:
        options = dict(
            model=checkpoint,
            dtype=dtype,
            tensor_parallel_size=args.ranks,
            distributed_executor_backend="pat",
            additional_config={
                "pat": {
                    "kv_transfer": "migrate",
                    "weights": args.weights,
                    **({"experts": pat.experts} if mixture else {}),
                    "policy": {"kind": "static", "tp": 1},
                }
            },
            enforce_eager=True,
            max_model_len=1024,
            max_num_seqs=32,
            kv_cache_memory_bytes=int(args.kv_gib * 2**30) * (2 if dtype == "float32" else 1),
        )
        with Engine(options, bind="0|1" if args.ranks == 2 else "nobind") as engine:
            engine.wait_until_ready()
            engine.call(_switch, CONTEXT, walk, 2, 0)  # warm-up
            cases = {
                "512 tokens": engine.call(_switch, CONTEXT, walk, args.repeats, 1),
                "512 tokens, caches": engine.call(_switch, CONTEXT, walk, args.repeats, 4, True),
                "one block": engine.call(_switch, 16, walk, args.repeats, 2),
                "empty": engine.call(_switch, None, walk, args.repeats, 3),
            }
            time.sleep(PARK_SECONDS)
            memcpy = memcpy_bandwidth((0, 1))
        body[dtype] = {"cases": cases, "memcpy_bytes_per_second": memcpy}
        text += f"## {dtype}\n\n" + _table(cases) + "\n" + _verdicts(cases, memcpy) + "\n"
    name = f"switch-cost-{args.model}-{args.weights}"
    write_results(name + (f"-{args.ranks}" if args.ranks > 2 else ""), facts, body, text)


def circuit(start: str, others: Sequence[str]) -> list[str]:
    """Where to go, from `start` on and back to it, to take each way between two layouts once."""
    walk = []
    for i, other in enumerate(others):
        walk += [other, *(circuit(other, others[1:]) if i == 0 else []), start]
    return walk


def _switch(
    llm: Any,
    context: int | None,
    walk: Sequence[str],
    repeats: int,
    seed: int,
    caches: bool = False,
) -> list[dict[str, Any]]:
    """Take a walk over layouts `repeats` times, with one batch of requests; the reports.

    With `caches`, contexts of the batch before are carried beside it.
    """
    from vllm import SamplingParams

    import pat_vllm

    begun = len(pat_vllm.report(llm).switches)
    if not caches:
        assert llm.reset_prefix_cache()
    if context is None:
        for tp in [*walk] * repeats:
            pat_vllm.switch(llm, tp)
    else:
        steps = len(walk) * repeats * STEPS_BETWEEN
        params = SamplingParams(
            temperature=1.0, max_tokens=steps + 40, ignore_eos=True, detokenize=False
        )
        # The last switches happen at `context` tokens, so that blocks are full, not exceeded.
        prompts = random_prompts(LIVE, max(4, context - steps - 40), seed)
        produced = {f"{seed}-{i}": 0 for i in range(LIVE)}
        for name, prompt in zip(produced, prompts, strict=True):
            llm.llm_engine.add_request(name, prompt, params)
        for i, tp in enumerate([*walk] * repeats):
            step_until(llm, produced, STEPS_BETWEEN * (i + 1))
            pat_vllm.switch(llm, tp)
        step_until(llm, produced, None)
    report = pat_vllm.report(llm)
    usual = {layout: steps.median for layout, steps in report.steps.items()}
    return [
        asdict(s) | {"usual_step": usual[s.target], "way": f"{s.source} -> {s.target}"}
        for s in report.switches[begun:]
        if s.reason == "forced"
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
    source = np.ones(_COPIED_BYTES, np.uint8)
    target = np.ones(_COPIED_BYTES, np.uint8)
    while time.monotonic() < begin_at:
        time.sleep(1e-3)
    times = []
    for _ in range(15):
        begun = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begun)
    return _COPIED_BYTES / statistics.median(times)


_COPIED_BYTES = 64 << 20


def _stall(switch: dict[str, Any]) -> float:
    return switch["seconds"] - switch["quiesce"]


def _ways(switches: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    ways: dict[str, list[dict[str, Any]]] = {}
    for switch in switches:
        ways.setdefault(switch["way"], []).append(switch)
    return {way: of_way[1:] for way, of_way in ways.items()}  # the first is a warm-up


def _table(cases: dict[str, list[dict[str, Any]]]) -> str:
    rows = []
    for case, switches in cases.items():
        for way, of_way in _ways(switches).items():
            row = [case, way]
            row.append(Summary.of([s["seconds"] for s in of_way]).show(1e3))
            row.append(Summary.of([_stall(s) for s in of_way]).show(1e3))
            row += [f"{Summary.of([s[p] for s in of_way]).median * 1e3:.2f}" for p in PARTS]
            rows.append(row)
    return table(["case", "switch", "total", "stall", *PARTS], rows)


def _verdicts(cases: dict[str, list[dict[str, Any]]], memcpy: float) -> str:
    rows = []
    full, cached, small, empty = map(_ways, cases.values())
    for way, of_way in full.items():
        moved, moved_small = (switches[0]["kv_bytes"] for switches in (of_way, small[way]))
        weights = of_way[0]["weight_bytes"]
        stall, stall_small = (
            Summary.of([_stall(s) for s in switches]) for switches in (of_way, small[way])
        )
        cached_stall = Summary.of([_stall(s) for s in cached[way]])
        cached_bytes = Summary.of([s["kv_bytes"] for s in cached[way]]).median - moved
        # Between the kinds of one tp no KV moves.
        per_byte = (stall.median - stall_small.median) / max(1, moved - moved_small)
        fixed = stall.median - per_byte * moved
        floor = (moved + weights) / memcpy
        rows.append(
            [
                way,
                f"{moved / 1e6:.0f} + {weights / 1e6:.0f}",
                f"{memcpy / 1e9:.1f}",
                f"{floor * 1e3:.1f}",
                stall.show(1e3),
                f"{stall.median / floor:.1f}",
                f"{(BARS['floors'] * floor + BARS['fixed_ms'] / 1e3) * 1e3:.0f}",
                f"{fixed * 1e3:.1f}",
                f"{(cached_bytes / memcpy) * 1e3 + BARS['caches_ms']:.0f}",
                f"{(cached_stall.median - stall.median) * 1e3:.1f}",
                Summary.of([_stall(s) for s in empty[way]]).show(1e3),
                Summary.of([s["first_step"] / s["usual_step"] for s in of_way]).show(1, 2),
                f"{of_way[0]['usual_step'] * 1e3:.1f}",
            ]
        )
    header = [
        "switch", "KV + weights, MB", "memcpy GB/s", "floor ms", "stall ms", "stall / floor",
        f"bar ms ({BARS['floors']} floors + {BARS['fixed_ms']})", "fixed ms",
        f"bar of caches, ms (bytes + {BARS['caches_ms']})", "caches ms", "empty ms",
        f"first step / usual (bar {BARS['first_step_ratio']:.0f})", "usual step ms",
    ]  # fmt: skip
    return table(header, rows)


if __name__ == "__main__":
    main()
