"""What speculation costs where it gives nothing: steps without drafts, and switches with drafts.

    python -m benchmarks.speculation off      steps at draft length 0, with earlier responses and
                                              without, against no speculation: at most 1.005
    python -m benchmarks.speculation switch   stalls of switches with drafts in flight, against ones
                                              without: at most 1.05

`python -m benchmarks.overhead --drafts` has a fixed draft length beside stock vLLM's, and
`python -m benchmarks.bench --workloads repeating` what drafts gain.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from benchmarks.common import (
    MODELS,
    Engine,
    Summary,
    awake,
    machine,
    model,
    ngram,
    repeating_prompts,
    table,
    write_results,
)
from benchmarks.paired import Ratio, paired_ratio, turns

OFF_BAR, SWITCH_BAR = 1.005, 1.05
LENGTH = 4
"""Draft tokens of a step."""
_REQUESTS = 8
_MAX_MODEL_LEN = 4096
_STEPS_BETWEEN = 4
"""Before a switch: steps of each request, so that the drafts of the last one are in flight."""
_WARM_UP = 2
"""Steps of each request that are not counted."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("part", choices=["off", "switch"])
    parser.add_argument("--model", default="repeating")
    parser.add_argument(
        "--repeats", type=int, help="batches of each engine; switches there and back"
    )
    parser.add_argument("--steps", type=int, default=64, help="of a batch, for `off`")
    args = parser.parse_args()
    # At tp > 1 vLLM compiles one small function with C++: seconds of start on every side.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    facts = machine()
    if args.part == "off":
        body, text = measure_off(args.model, args.steps, args.repeats or 24)
    else:
        body, text = measure_switches(args.model, args.repeats or 32)
    write_results(f"speculation-{args.part}", facts, body, text)


def _options(name: str, tp: int) -> dict[str, Any]:
    """Of an engine of PAT's that stays in `tp`, on two ranks."""
    pat = {"policy": {"kind": "static", "tp": tp}, "kv_transfer": "migrate"}
    return dict(
        model=model(name),
        dtype=MODELS[name].get("dtype", "float32"),
        enforce_eager=True,
        max_model_len=_MAX_MODEL_LEN,
        max_num_seqs=16,
        kv_cache_memory_bytes=512 << 20,
        tensor_parallel_size=2,
        distributed_executor_backend="pat",
        additional_config={"pat": pat},
    )


def _cells(ratio: Ratio, bar: float | None) -> list[Any]:
    return [ratio.show(3), bar or "-", ratio.verdict(bar) if bar else ""]


# -------------------------------------------------------------------- steps without drafts


def measure_off(name: str, steps: int, repeats: int) -> tuple[dict[str, Any], str]:
    """A draft length of 0 in an engine that could use drafts, against engines that could not.

    What two equal engines differ by is shown by these two.

    Args:
        steps: of a batch.
        repeats: batches of each engine, in turns.

    Returns:
        Values for a file, and Markdown.
    """
    none = _options(name, 2)
    zero = none | ngram(LENGTH)
    without_history = none["additional_config"]["pat"] | {"draft_history_bytes": 0}
    sides = {
        "0 drafts": zero,
        "0 drafts, no history": zero | {"additional_config": {"pat": without_history}},
        "none": none,
    }
    medians: dict[str, list[float]] = {side: [] for side in sides}
    with ExitStack() as stack:
        running = {}
        for side, options in sides.items():
            running[side] = stack.enter_context(Engine(options, "0|1", core_inside=True))
            running[side].wait_until_ready()
            # One after the other, or they would measure themselves while others start.
            running[side].pause()
        for repeat, order in enumerate(turns([*sides], repeats)):
            prompts = repeating_prompts(name, _REQUESTS, seed=repeat)
            for side in order:
                with awake([running[side]]):
                    seconds = running[side].call(take_steps, prompts, steps)
                medians[side].append(statistics.median(seconds))
    rows = []
    body: dict[str, Any] = {"median_steps": medians}
    for ours, theirs, bar in (
        ("0 drafts", "none", OFF_BAR),
        ("0 drafts", "0 drafts, no history", None),
        ("0 drafts, no history", "none", OFF_BAR),
    ):
        ratio = body[f"{ours} / {theirs}"] = paired_ratio(
            medians[ours], medians[theirs], median=True
        )
        milliseconds = [f"{1e3 * statistics.median(medians[side]):.2f}" for side in (ours, theirs)]
        rows.append([f"{ours} / {theirs}", *milliseconds, *_cells(ratio, bar)])
    text = (
        f"Model {name}, {_REQUESTS} live requests, greedy, tp2dp1: a draft length of 0 where up to "
        f"{LENGTH} could be used, against engines without speculation. The median of a batch's "
        f"{steps} decode steps; the engines take turns, {repeats} batches each. The ratio is the "
        "median of those of equal batches, with its 95% interval.\n\n"
    )
    return body, text + table(["", "ours, ms", "theirs, ms", "ratio", "bar", ""], rows)


# -------------------------------------------------------------------- switches with drafts


def measure_switches(name: str, switches: int) -> tuple[dict[str, Any], str]:
    """Stalls of one engine's switches with drafts in flight and without, in turns.

    Args:
        switches: there and back, with drafts and as many without.

    Returns:
        Values for a file, and Markdown.
    """
    with Engine(_options(name, 1) | ngram(LENGTH), "0|1") as engine:
        engine.wait_until_ready()
        prompts = repeating_prompts(name, _REQUESTS, seed=0)
        engine.call(take_switches, prompts, 2)  # warm-up
        taken, accepted = engine.call(take_switches, prompts, switches)
    body: dict[str, Any] = {"switches": taken, "accepted": accepted}
    values: defaultdict[tuple[str, str], dict[bool, list[float]]] = defaultdict(
        lambda: {True: [], False: []}
    )
    for one in taken:
        stall = one["seconds"] - one["quiesce"]
        for quantity, value in (("stall", stall), *((n, one[n]) for n in ("seconds", "quiesce"))):
            values[quantity, one["way"]][one["drafts"]].append(value)
    rows = []
    for (quantity, way), of_way in values.items():
        ratio = body[f"{quantity} {way}"] = paired_ratio(of_way[True], of_way[False], median=True)
        shown = [Summary.of(of_way[drafts]).show(1e3) for drafts in (True, False)]
        bar = SWITCH_BAR if quantity == "stall" else None
        rows.append([quantity, way, *shown, *_cells(ratio, bar)])
    text = (
        f"Model {name}, {_REQUESTS} live requests, in turns with a draft length of {LENGTH} and of "
        f"0; {switches} switches there and back of each; ms, median (low-high). The stall is the "
        "switch without `quiesce`, which finishes the step in flight. The ratio is the median of "
        f"those of neighbours, with its 95% interval. {accepted:.0%} of drafts were accepted. A "
        f"switch drops those in flight; it comes every {_STEPS_BETWEEN} steps.\n\n"
    )
    return body, text + table(["", "switch", "with drafts", "without", "ratio", "bar", ""], rows)


# -------------------------------------------------------------------- in the engine's process


class Live:
    """A batch that an engine decodes, taken step by step."""

    def __init__(self, llm: Any, prompts: Sequence[Any]) -> None:
        """Begin, and take outputs until all requests decode."""
        from vllm import SamplingParams

        self._engine = llm.llm_engine
        params = SamplingParams(
            temperature=0.0, max_tokens=_MAX_MODEL_LEN, ignore_eos=True, detokenize=False
        )
        self._steps: dict[str, int] = {}
        for index, prompt in enumerate(prompts):
            request_id = f"{time.monotonic()}-{index}"
            self._engine.add_request(request_id, prompt, params)
            self._steps[request_id] = 0
        self.take(_WARM_UP)

    def take(self, steps: int) -> None:
        """Take outputs of that many further steps of each request."""
        target = {one: done + steps for one, done in self._steps.items()}
        while any(done < target[one] for one, done in self._steps.items()):
            for output in self._engine.step():
                assert not output.finished, "the context is too short for so many steps"
                self._steps[output.request_id] += 1

    def abort(self) -> None:
        """End all requests."""
        self._engine.abort_request([*self._steps])
        while self._engine.has_unfinished_requests():
            self._engine.step()


def take_steps(llm: Any, prompts: Sequence[Any], steps: int) -> list[float]:
    """Seconds of the steps of a batch that decodes without drafts."""
    import pat_vllm

    if llm.llm_engine.engine_core.engine_core.vllm_config.speculative_config is not None:
        pat_vllm.speculate(llm, 0)
    live, seconds = Live(llm, prompts), []
    for _ in range(steps):
        begun = time.perf_counter()
        llm.llm_engine.step()
        seconds.append(time.perf_counter() - begun)
    live.abort()
    return seconds


def take_switches(
    llm: Any, prompts: Sequence[Any], there_and_back: int
) -> tuple[list[dict[str, Any]], float]:
    """Switch there and back with drafts in flight, and as often without, in turns.

    Returns:
        The reports, each with its way and whether there were drafts; the accepted share of drafts.
    """
    import pat_vllm

    began = time.monotonic()
    live, with_drafts = Live(llm, prompts), []
    for turn in range(2 * there_and_back):
        drafts = turn % 4 in (0, 3)
        pat_vllm.speculate(llm, LENGTH if drafts else 0)
        for tp in (2, 1):
            live.take(_STEPS_BETWEEN)
            assert pat_vllm.switch(llm, tp)
            with_drafts.append(drafts)
    live.take(_STEPS_BETWEEN)
    report = pat_vllm.report(llm, since=began)
    live.abort()
    accepted = sum(sample.accepted for sample in report.drafts)
    assert accepted, "no draft was accepted"
    taken = [
        vars(one) | {"way": f"{one.source} -> {one.target}", "drafts": drafts}
        for one, drafts in zip(
            (one for one in report.switches if one.reason == "forced"), with_drafts, strict=True
        )
    ]
    return taken, accepted / sum(sample.drafted for sample in report.drafts)


if __name__ == "__main__":
    main()
