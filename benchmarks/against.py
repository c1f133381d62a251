"""Step and switch times of this code against those of another checkout, engine against engine.

    git worktree add ../before COMMIT
    python -m benchmarks.against ../before
    python -m benchmarks.against stock --model qwen3-100m

An engine of each lives; they take turns, and one that waits is stopped. In its turn an engine
decodes a batch in each layout, and switches there and back while requests run. Both are started
several times, each first in every second start: with equal code one engine can be several percent
slower than another for as long as it lives. With `--batches` they serve the batches of `make bench`
by the default policy instead. A ratio is this code's time over the other's, start by start, and is
to be at most 1.02 (`BAR`). The other side may be `stock` vLLM, with one group of two: what PAT
costs while it does not switch. With drafts, whatever of them is accepted:

    python -m benchmarks.against stock --model mimo-100m --drafts 2
"""

# Engines' processes import this file before the code that they are to run: nothing of PAT here.
from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.engine_process import PATIENCE_SECONDS, EngineProcess, step_until
from benchmarks.paired import paired_ratio, turns

BAR = 1.02
SIDES = ("this", "other")
STOCK = "stock"
"""In place of the other checkout: vLLM without PAT."""
LAYOUTS = (1, 2)
SWITCHES = 3
"""Each way, in a turn."""

Found = Mapping[str, Mapping[str, float]]
"""Of one start: side -> row of the table -> seconds."""

Measure = Callable[[Mapping[str, Path], ExitStack], Found]
"""Starts an engine of each side, in the order of the mapping (side -> folder with its `pat_vllm`),
and has them take turns. They end with the stack."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="root of the other checkout, or `stock`")
    parser.add_argument("--this", type=Path, help="root of a checkout to measure as this code")
    parser.add_argument("--starts", type=int, default=8, help="of each side")
    parser.add_argument("--batches", action="store_true", help="serve the batches of `make bench`")
    parser.add_argument("--repeats", type=int, default=3, help="--batches: of each workload")
    parser.add_argument("--turns", type=int, default=10, help="of each side in a start")
    parser.add_argument("--model", default="qwen3-tiny")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--context", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of a response")
    parser.add_argument("--drafts", type=int, default=0, help="of the model's MTP module, a step")
    arguments = parser.parse_args()

    from benchmarks.record import ROOT, commit_of, machine, table, write_results

    facts = machine()
    this, stock = (arguments.this or ROOT).resolve(), str(arguments.other) == STOCK
    roots = {"this": this, "other": this if stock else arguments.other.resolve()}
    commits = {side: commit_of(root) for side, root in roots.items()}
    if stock:
        commits["other"] = STOCK
    if stock and arguments.batches:
        parser.error("--batches needs another checkout")
    what, measure = _batches(arguments) if arguments.batches else _steps(arguments, stock)
    starts: list[Found] = []
    for start in range(arguments.starts):
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            codes = {}
            for side in SIDES if start % 2 == 0 else SIDES[::-1]:
                codes[side] = Path(folder, side)
                codes[side].mkdir()
                # Of a checkout only this differs; the benchmark is this one's on both sides.
                (codes[side] / "pat_vllm").symlink_to(roots[side] / "pat_vllm")
            starts.append(measure(codes, stack))
        print(f"start {start + 1} of {arguments.starts}: {starts[-1]}", flush=True)
    rows = []
    for name in starts[0]["other"]:
        ours, theirs = ([start[side][name] for start in starts] for side in SIDES)
        ratio = paired_ratio(ours, theirs)
        medians = (f"{1e3 * statistics.median(values):.3f}" for values in (ours, theirs))
        rows.append([name, *medians, ratio.show(3), ratio.verdict(BAR)])
    text = (
        f"{what} {arguments.starts} starts of each. This code is commit {commits['this']}, the "
        f"other is {commits['other']}.\n\n"
    )
    head = ["", "this, ms", "other, ms", "ratio (interval)", f"bar {BAR}"]
    kind = "batches-" if arguments.batches else ""
    write_results(
        f"{kind}{commits['this']}-against-{commits['other']}",
        facts,
        {"commits": commits, "starts": starts},
        text + table(head, rows),
    )


def _started(engine: EngineProcess, stack: ExitStack, code: Path) -> EngineProcess:
    """An engine that is ready, and runs the code that is in a folder."""
    stack.enter_context(engine)
    engine.wait_until_ready()
    assert engine.call(_code) == str(code / "pat_vllm" / "__init__.py")
    return engine


def _steps(arguments: argparse.Namespace, stock: bool) -> tuple[str, Measure]:
    """What is measured of steps and switches, and how."""
    from benchmarks import common

    engine_options: dict[str, Any] = {
        "model": str(common.checkpoint(arguments.model)),
        "dtype": "float32",
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "enforce_eager": True,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 128 << 20,
    }
    if arguments.drafts:
        drafter = {"method": "mtp", "num_speculative_tokens": arguments.drafts}
        engine_options["speculative_config"] = drafter
    pat = {
        "kv_transfer": "migrate",
        "weights": "inplace",
        "layouts": [*LAYOUTS],
        "base_tp": LAYOUTS[0],
        "policy": {"kind": "static", "tp": LAYOUTS[0]},
    }
    ours = {"distributed_executor_backend": "pat", "additional_config": {"pat": pat}}
    prompts = common.random_prompts(arguments.requests, arguments.context, seed=0)

    def measure(codes: Mapping[str, Path], stack: ExitStack) -> Found:
        engines: dict[str, EngineProcess] = {}
        for side, code in codes.items():
            plain = stock and side == "other"
            options = {**engine_options, **({} if plain else ours)}
            # Weights in place are plain, which vLLM would pack for its CPU kernels.
            engine = common.Engine(options, bind="0|1", plain=plain, core_inside=True, code=code)
            engines[side] = _started(engine, stack, code)
            engine.call(_turn, prompts, arguments.tokens)  # warms up
            engine.pause()
        results: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
        for order in turns(SIDES, arguments.turns):
            for side in order:
                with common.awake([engines[side]]):
                    turn = engines[side].call(
                        _turn, prompts, arguments.tokens, timeout=PATIENCE_SECONDS
                    )
                    results[side].append(turn)
        return {
            side: {name: statistics.median(turn[name] for turn in of_side) for name in of_side[0]}
            for side, of_side in results.items()
        }

    text = (
        f"{arguments.model}, {arguments.requests} requests of {arguments.context} + "
        f"{arguments.tokens} tokens, {arguments.drafts} drafts a step, float32, weights in place, "
        f"2 ranks; {arguments.turns} turns in each of"
    )
    return text, measure


def _batches(arguments: argparse.Namespace) -> tuple[str, Measure]:
    """What is measured of the batches of `make bench`, and how."""
    from benchmarks.batch import serve_batch
    from benchmarks.bench.engines import BenchSettings, engine_options, environment_of, sides
    from benchmarks.bench.runs import PAT
    from benchmarks.bench.workloads import WORKLOADS
    from benchmarks.common import awake, checkpoint

    workloads = tuple(WORKLOADS.values())
    settings = BenchSettings(checkpoint("qwen3-170m"), 2, workloads, arguments.repeats)
    # Of `make bench`'s sides, static and adaptive, both are the adaptive one here.
    options = engine_options(settings, sides(settings)[PAT])

    def measure(codes: Mapping[str, Path], stack: ExitStack) -> Found:
        engines: dict[str, EngineProcess] = {}
        for side, code in codes.items():
            engine = EngineProcess(options, environment_of(2, code), code / "log", code)
            engines[side] = _started(engine, stack, code)
            engine.pause()
        seconds = {side: {workload.name: 0.0 for workload in workloads} for side in SIDES}
        for workload in workloads:
            for repeat, order in enumerate(turns(SIDES, arguments.repeats + 1)):
                requests = settings.requests(settings.trace(workload, repeat), repeat)
                for side in order:
                    name = f"{workload.name}-{repeat}"
                    with awake([engines[side]]):
                        began, ended, tokens = engines[side].call(
                            serve_batch, requests, name, timeout=PATIENCE_SECONDS
                        )
                    assert tokens == [request.length for request in requests]
                    if repeat:  # the first one warms up
                        seconds[side][workload.name] += max(ended) - began
        return {
            side: {**of_side, "all": sum(of_side.values())} for side, of_side in seconds.items()
        }

    text = (
        f"{arguments.repeats} batches of each workload of `make bench` by the default policy, "
        "after one that warms up, in each of"
    )
    return text, measure


def _code(llm: Any) -> str:
    """Which code an engine runs."""
    import pat_vllm

    return str(pat_vllm.__file__)


def _turn(llm: Any, prompts: Sequence[Any], tokens: int) -> dict[str, float]:
    """Mean seconds of a decode step in each layout, and the median of a switch each way, without
    the wait for steps in flight; then how much of that its planning takes. Of stock vLLM only a
    step of its one group."""
    import pat_vllm

    seconds = {}
    with_pat = "pat" in llm.llm_engine.vllm_config.additional_config
    for tp in LAYOUTS if with_pat else LAYOUTS[-1:]:
        assert llm.reset_prefix_cache()  # the batch before is over, and its layout
        if with_pat:
            pat_vllm.switch(llm, tp=tp)
        produced = _begin(llm, prompts, tokens)
        step_until(llm, produced, 2)
        begun = time.perf_counter()
        steps = step_until(llm, produced, None) * tp // LAYOUTS[-1]  # of a replica
        seconds[f"step, tp={tp}"] = (time.perf_counter() - begun) / steps
    if not with_pat:
        return seconds
    first = len(pat_vllm.report(llm).switches)
    assert llm.reset_prefix_cache()  # the engine goes back to tp=1
    produced = _begin(llm, prompts, tokens)
    for i, tp in enumerate((2, 1) * SWITCHES):
        step_until(llm, produced, 3 * (i + 1))
        pat_vllm.switch(llm, tp=tp)
    step_until(llm, produced, None)
    forced = [
        switch for switch in pat_vllm.report(llm).switches[first:] if switch.reason == "forced"
    ]
    for source in {str(switch.source): None for switch in forced}:
        of_way = [switch for switch in forced if str(switch.source) == source]
        assert len(of_way) == SWITCHES
        stalls = [switch.seconds - switch.quiesce for switch in of_way]
        seconds[f"stall of a switch from {source}"] = statistics.median(stalls)
        plans = [switch.plan for switch in of_way]
        seconds[f"its planning, from {source}"] = statistics.median(plans)
    return seconds


def _begin(llm: Any, prompts: Sequence[Any], tokens: int) -> dict[str, int]:
    """Add the batch. Returns how many tokens each request has so far: none."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False)
    for i, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(i), prompt, params)
    return dict.fromkeys(map(str, range(len(prompts))), 0)


if __name__ == "__main__":
    main()
