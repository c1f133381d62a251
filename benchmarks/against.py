"""Step and switch times of this code against those of another checkout, engine against engine.

    git worktree add ../before COMMIT
    python -m benchmarks.against ../before

An engine of each lives; they take turns, and one that waits is stopped. In its turn an engine
decodes a batch in each layout and takes a walk of switches with live requests. Both are started
again and again, the one first and then the other, since an engine keeps what its start has made it:
with equal code one is up to several percent slower. A ratio is this code's over the other's, start
by start. Bar: 1.02.
"""

# Engines' processes import this file before the code that they are to run: nothing of PAT here.
from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.engine_process import step_until
from benchmarks.paired import paired_ratio, turns

BAR = 1.02
SIDES = ("this", "other")
LAYOUTS = (1, 2)
SWITCHES = 3
"""Each way, in a turn."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("other", type=Path, help="root of the other checkout")
    parser.add_argument("--this", type=Path, help="another one in the place of this code")
    parser.add_argument("--model", default="qwen3-tiny")
    parser.add_argument("--requests", type=int, default=16)
    parser.add_argument("--context", type=int, default=256, help="tokens of a prompt")
    parser.add_argument("--tokens", type=int, default=64, help="of a response")
    parser.add_argument("--starts", type=int, default=8, help="of each side")
    parser.add_argument("--turns", type=int, default=10, help="of each side in a start")
    arguments = parser.parse_args()

    from benchmarks import common, record

    facts = common.machine()
    options: dict[str, Any] = {
        "model": common.model(arguments.model),
        "dtype": "float32",
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "pat",
        "additional_config": {
            "pat": {"kv_transfer": "migrate", "weights": "inplace", "policy": {"kind": "static"}}
        },
        "enforce_eager": True,
        "max_model_len": 1024,
        "kv_cache_memory_bytes": 128 << 20,
    }
    roots = {"this": (arguments.this or common.ROOT).resolve(), "other": arguments.other.resolve()}
    commits = {side: record.machine("", root)["commit"] for side, root in roots.items()}
    prompts = common.random_prompts(arguments.requests, arguments.context, seed=0)
    found: list[dict[str, list[Mapping[str, float]]]] = []
    for start in range(arguments.starts):
        found.append({side: [] for side in SIDES})
        with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
            engines: dict[str, common.Engine] = {}
            for side in SIDES if start % 2 == 0 else SIDES[::-1]:
                code = Path(folder, side)
                code.mkdir()
                (code / "pat_vllm").symlink_to(roots[side] / "pat_vllm")
                engine = common.Engine(options, bind="0|1", core_inside=True, code=code)
                engines[side] = stack.enter_context(engine)
                engine.wait_until_ready()
                assert engine.call(_code) == str(code / "pat_vllm" / "__init__.py")
                engine.call(_turn, prompts, arguments.tokens)
                engine.pause()
            for order in turns(SIDES, arguments.turns):
                for side in order:
                    with common.awake([engines[side]]):
                        made = engines[side].call(_turn, prompts, arguments.tokens)
                    found[-1][side].append(made)
    rows = []
    for what in found[0]["this"][0]:
        ours, theirs = (
            [statistics.median(turn[what] for turn in start[side]) for start in found]
            for side in SIDES
        )
        ratio = paired_ratio(ours, theirs)
        medians = (f"{1e3 * statistics.median(values):.3f}" for values in (ours, theirs))
        rows.append([what, *medians, ratio.show(3), ratio.verdict(BAR)])
    text = (
        f"{arguments.model}, {arguments.requests} requests of {arguments.context} + "
        f"{arguments.tokens} tokens, float32, weights in place, 2 ranks; {arguments.starts} starts "
        f"of each, {arguments.turns} turns in each. This code is commit {commits['this']}, the "
        f"other is {commits['other']}.\n\n"
    )
    head = ["", "this, ms", "other, ms", "ratio (interval)", f"bar {BAR}"]
    common.write_results(
        f"{commits['this']}-against-{commits['other']}",
        facts,
        {"commits": commits, "starts": found},
        text + common.table(head, rows),
    )


def _code(llm: Any) -> str:
    """Which code an engine runs."""
    import pat_vllm

    return str(pat_vllm.__file__)


def _turn(llm: Any, prompts: Sequence[Any], tokens: int) -> dict[str, float]:
    """Seconds of a decode step in each layout, and of a switch each way, with its planning."""
    import pat_vllm

    seconds = {}
    for tp in LAYOUTS:
        pat_vllm.switch(llm, tp=tp)
        produced = _begin(llm, prompts, tokens)
        step_until(llm, produced, 2)
        begun = time.perf_counter()
        step_until(llm, produced, None)
        seconds[f"step, tp={tp}"] = (time.perf_counter() - begun) / (tokens - 2)
    first = len(pat_vllm.report(llm).switches)
    produced = _begin(llm, prompts, tokens)
    for i, tp in enumerate((2, 1) * SWITCHES):
        step_until(llm, produced, 3 * (i + 1))
        pat_vllm.switch(llm, tp=tp)
    step_until(llm, produced, None)
    made = [one for one in pat_vllm.report(llm).switches[first:] if one.reason == "forced"]
    for source in {str(one.source): None for one in made}:
        of_way = [one for one in made if str(one.source) == source]
        assert len(of_way) == SWITCHES
        stalls = [one.seconds - one.quiesce for one in of_way]
        seconds[f"stall of a switch from {source}"] = statistics.median(stalls)
        plans = [one.plan for one in of_way]
        seconds[f"its planning, from {source}"] = statistics.median(plans)
    return seconds


def _begin(llm: Any, prompts: Sequence[Any], tokens: int) -> dict[str, int]:
    """Add the batch; how many tokens each request has."""
    from vllm import SamplingParams

    assert llm.reset_prefix_cache()
    params = SamplingParams(max_tokens=tokens, ignore_eos=True, temperature=0.0, detokenize=False)
    for i, prompt in enumerate(prompts):
        llm.llm_engine.add_request(str(i), prompt, params)
    return dict.fromkeys(map(str, range(len(prompts))), 0)


if __name__ == "__main__":
    main()
