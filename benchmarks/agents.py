"""Trajectories of several turns with tools between them, on an engine of this machine.

    python -m benchmarks.agents

The loop is closed: a trajectory's next turn comes when its tool is done. Sides alternate on one
engine: each static layout, the policy that predicts, and a switch between every two turns of each
trajectory. What is compared: prompt tokens that were computed, of those that were asked for, and
the time of a batch. Caches are reset between batches, as where training begins.
"""

from __future__ import annotations

import argparse
import heapq
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.common import Engine, checkpoint
from benchmarks.paired import turns
from benchmarks.record import Summary, machine, table, write_results

PROMPT, RESPONSE, APPENDED = (150, 400), (20, 60), (20, 80)
"""Fewest and most tokens, of the first prompt, of a response and of what a tool appends."""
TOOL = (0.5, 2.5)
"""Least and most seconds of a tool."""
FORCED = 0.4
"""Seconds between forced switches: less than the least of a tool."""
REASONS = ("policy", "idle", "forced")
"""Of switches."""
BARS = {"computed": 1.02, "time": 1.00, "time, skewed": 0.95}


@dataclass(frozen=True)
class Turn:
    """Tokens to generate, tokens that the tool appends, seconds that it takes."""

    tokens: int
    appended: tuple[int, ...]
    tool: float


Trajectory = tuple[tuple[int, ...], tuple[Turn, ...]]
"""The first prompt, and the turns."""


def drawn(seed: int, count: int, skewed: bool) -> list[Trajectory]:
    """A batch: four turns each, or, if skewed, two, and of a few ten."""
    draw = random.Random(seed)

    def tokens(bounds: tuple[int, int]) -> tuple[int, ...]:
        return tuple(draw.randrange(300, 4000) for _ in range(draw.randint(*bounds)))

    def turns(index: int) -> int:
        return (10 if index < max(1, count // 8) else 2) if skewed else 4

    return [
        (
            tokens(PROMPT),
            tuple(
                Turn(draw.randint(*RESPONSE), tokens(APPENDED), draw.uniform(*TOOL))
                for _ in range(turns(index))
            ),
        )
        for index in range(count)
    ]


def serve(
    llm: Any, batch: Sequence[Trajectory], name: str, tp: int | None, forced: bool
) -> dict[str, float]:
    """Serve a batch; the layout of `tp` is asked for at its beginning.

    Returns:
        Seconds, prompt tokens asked for and computed, and switches by policy and of an idle engine.
    """
    from vllm import SamplingParams

    import pat_vllm

    engine = llm.llm_engine
    llm.reset_prefix_cache()
    begun = len(pat_vllm.report(llm).switches)
    sizes = [layout.tp for layout in pat_vllm.report(llm).layouts]
    if tp is not None:
        pat_vllm.switch(llm, tp)
    asked = computed = 0
    held = [list(prompt) for prompt, _ in batch]
    # When, and of which trajectory, the next turn comes.
    due = [(0.0, index, 0) for index in range(len(batch))]
    began, switched = time.monotonic(), 0
    while due or engine.has_unfinished_requests():
        now = time.monotonic() - began
        if forced and now > FORCED * (switched + 1):
            switched += 1
            pat_vllm.switch(llm, sizes[switched % len(sizes)])
        while due and due[0][0] <= now:
            _, index, turn = heapq.heappop(due)
            params = SamplingParams(
                temperature=1.0,
                max_tokens=batch[index][1][turn].tokens,
                ignore_eos=True,
                detokenize=False,
            )
            prompt = {"prompt_token_ids": list(held[index])}
            engine.add_request(f"{name}-{index}-{turn}", prompt, params)
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, min(due[0][0] - (time.monotonic() - began), 0.05)))
            continue
        for output in engine.step():
            if not output.finished:
                continue
            index, turn = map(int, output.request_id.split("-")[-2:])
            done = batch[index][1][turn]
            asked += len(output.prompt_token_ids)
            computed += len(output.prompt_token_ids) - (output.num_cached_tokens or 0)
            held[index] += [*output.outputs[0].token_ids, *done.appended]
            if turn + 1 < len(batch[index][1]):
                heapq.heappush(due, (time.monotonic() - began + done.tool, index, turn + 1))
    seconds = time.monotonic() - began
    switches = pat_vllm.report(llm).switches[begun:]
    return {
        "seconds": seconds,
        "asked": asked,
        "computed": computed,
        **{why: sum(switch.reason == why for switch in switches) for why in REASONS},
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-tiny")
    parser.add_argument("--trajectories", type=int, default=10)
    parser.add_argument("--repeats", type=int, default=4)
    parser.add_argument("--skewed", action="store_true", help="few turns of most, ten of few")
    parser.add_argument("--block-size", type=int, default=32)
    args = parser.parse_args()
    options = dict(
        model=str(checkpoint(args.model)),
        skip_tokenizer_init=True,
        dtype="float32",
        tensor_parallel_size=2,
        distributed_executor_backend="pat",
        additional_config={"pat": {"kv_transfer": "migrate", "layouts": [1, 2]}},
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=4 * args.trajectories,
        block_size=args.block_size,
        kv_cache_memory_bytes=1 << 29,
    )
    sides: list[tuple[str, int | None, bool]] = [
        ("static tp1dp2", 1, False),
        ("static tp2dp1", 2, False),
        ("PAT", None, False),
        ("PAT, switch between turns", 1, True),
    ]
    results: dict[str, list[dict[str, float]]] = {name: [] for name, *_ in sides}
    with Engine(options, bind="0|1") as engine:
        engine.wait_until_ready()
        # The first two are learnt from.
        for repeat, order in enumerate(turns(sides, args.repeats + 2)):
            batch = drawn(repeat, args.trajectories, args.skewed)
            for name, tp, forced in order:
                key = f"{repeat}-{len(results[name])}"
                result = engine.call(serve, batch, f"{name}-{key}", tp, forced)
                if repeat > 1:
                    results[name].append(result)
                print(repeat, name, {field: round(value, 2) for field, value in result.items()})
    _write(args, results)


def _write(args: argparse.Namespace, batches: dict[str, list[dict[str, float]]]) -> None:
    static = [name for name in batches if name.startswith("static")]
    best = min(static, key=lambda name: sum(batch["seconds"] for batch in batches[name]))
    sums = {
        name: {key: sum(batch[key] for batch in results) for key in results[0]}
        for name, results in batches.items()
    }
    fewest = min(sums[name]["computed"] for name in static)
    rows = []
    for name, results in batches.items():
        pairs = zip(results, batches[best], strict=True)
        rows.append(
            [
                name,
                Summary.of([batch["seconds"] for batch in results]).show(),
                Summary.of([this["seconds"] / that["seconds"] for this, that in pairs]).show(1, 3),
                *(f"{sums[name][key]:.0f}" for key in ("asked", "computed")),
                f"{sums[name]['computed'] / fewest:.3f}",
                *(f"{sums[name][why]:.0f}" for why in REASONS),
            ]
        )
    head = ["side", "seconds", f"by {best}", "prompt tokens asked for", "computed"]
    head += ["by the better static", *(f"switches, {why}" for why in REASONS)]
    name = "agents-skewed" if args.skewed else "agents"
    facts, body = {**machine(), **vars(args)}, {"batches": batches, "bars": BARS}
    write_results(name, facts, body, table(head, rows))


if __name__ == "__main__":
    main()
