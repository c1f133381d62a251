"""What PAT costs while it does not switch: a static layout against stock vLLM.

    python -m benchmarks.overhead

(a) PAT kept in tp=2 against stock vLLM (`mp`) with tp=2: at most 1.03 times its time.
(b) PAT kept in tp=1, so two replicas in one engine, against two independent stock engines on one
    core each, with half of the requests each, started at the same time: at most 1.05 times.
(c) PAT kept in tp=2 that could draft and does not, against PAT in tp=2 without a
    `speculative_config`: at most 1.005 times; and against the same without asynchronous scheduling,
    which vLLM switches off where there are n-gram drafts.

The engines of a comparison stay alive and take turns, batch by batch; one that waits is stopped.
Batches are compared, and with one group also the median steps in them, which other work on the
machine moves less.
Same model, flags, prompts and lengths, and the same KV memory per core. With `--weights inplace`
the layouts share one copy of the weights, (a) then has its rows where a switch brings them, and the
stock engines keep plain weights, too: vLLM packs them for its CPU kernels otherwise.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from benchmarks.common import Engine, awake, model, random_prompts
from benchmarks.paired import paired_ratio, turns
from benchmarks.record import Summary, machine, table, write_results
from pat_vllm.config import PATConfig
from pat_vllm.layout import Layout
from pat_vllm.predictor.draft_schedule import ngram_config
from pat_vllm.start.limits import Limits, layout_limits

BARS = {"tp2": 1.03, "tp1": 1.05, "k0": 1.005, "k0-sync": 1.005}
NAMES = {
    "tp2": "one group / stock vLLM's",
    "tp1": "two replicas / stock engines",
    "k0": "0 drafts / none",
    "k0-sync": "0 drafts / none, without asynchronous scheduling",
}
OURS, THEIRS = "pat", "other"
_BEGIN_SECONDS = 0.4
"""Until the engines of a side have begun; they wake up before."""

Side = Sequence[tuple[Mapping[str, Any], str]]
"""Engines that share the batches: options of `LLM`, and cores."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="qwen3-100m")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--only", nargs="+", choices=sorted(BARS))
    parser.add_argument("--repeats", type=int, default=7, help="of each side, after a warm-up")
    parser.add_argument("--weights", choices=["materialized", "inplace"], default="materialized")
    parser.add_argument("--requests", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=48, help="tokens")
    parser.add_argument("--new-tokens", type=int, default=96)
    parser.add_argument("--kv-mib", type=int, default=512, help="KV memory of a core")
    args = parser.parse_args()

    facts = machine()
    body: dict[str, Any] = {"arguments": vars(args), "bars": BARS}
    rows = []
    for name, sides in _sides(args).items():
        if args.only and name not in args.only:
            continue
        batches, steps = _compare(sides, args)
        ratio = paired_ratio(batches[OURS], batches[THEIRS], median=True)
        # The steps of replicas in one engine end at times of their own.
        of_step = None if name == "tp1" else paired_ratio(steps[OURS], steps[THEIRS], median=True)
        body[name] = {"seconds": batches, "ratio": ratio, "steps": steps, "of_step": of_step}
        rows.append(
            [
                f"{name}: {NAMES[name]}",
                *(Summary.of(batches[side]).show(digits=3) for side in (OURS, THEIRS)),
                f"{Summary.of(steps[THEIRS]).median * 1e3:.1f}",
                ratio.show(3),
                of_step.show(3) if of_step else "",
                BARS[name],
                "; ".join(figure.verdict(BARS[name]) for figure in (ratio, of_step) if figure),
            ]
        )
    text = (
        f"{args.requests} requests of {args.prompt} + {args.new_tokens} tokens, {args.model}, "
        f"median (low-high) of {args.repeats} batches of each side, in "
        "turns. Ratios are the medians of those of equal batches, with 95% intervals: of the "
        "batches' times, and of the median steps in them.\n\n"
    )
    header = ["", "PAT s", "other s", "other's step, ms", "ratio", "of steps", "bar", ""]
    name = "overhead" + (f"-{args.model}" if args.model != parser.get_default("model") else "")
    name += "".join(f"-{comparison}" for comparison in args.only or ())
    name += "-inplace" if args.weights == "inplace" else ""
    write_results(name, facts, body, text + table(header, rows))


def _sides(args: argparse.Namespace) -> dict[str, dict[str, Side]]:
    flags = dict(
        model=model(args.model),
        dtype=args.dtype,
        enforce_eager=True,
        max_model_len=512,
        max_num_seqs=64,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=args.kv_mib << 20,
    )
    two = flags | {"tensor_parallel_size": 2}
    # As many requests as PAT's layout runs.
    limits = Limits(flags["max_num_seqs"], flags["max_num_batched_tokens"])
    of_group = layout_limits(Layout(2, 1), limits, PATConfig())

    def pat(tp: int, **more: Any) -> Side:
        options = {"policy": {"kind": "static", "tp": tp}, "weights": args.weights}
        own = {"distributed_executor_backend": "pat", "additional_config": {"pat": options}}
        return [(two | own | more, "0|1")]

    stock = two | vars(of_group) | {"distributed_executor_backend": "mp"}
    drafts = ngram_config(4) | {"num_speculative_tokens_per_batch_size": [[1, 1, 0]]}
    silent = pat(2, speculative_config=drafts)
    return {
        "tp2": {OURS: pat(2), THEIRS: [(stock, "0|1")]},
        "tp1": {OURS: pat(1), THEIRS: [(flags, "0"), (flags, "1")]},
        "k0": {OURS: silent, THEIRS: pat(2)},
        "k0-sync": {OURS: silent, THEIRS: pat(2, async_scheduling=False)},
    }


def _compare(
    sides: Mapping[str, Side], args: argparse.Namespace
) -> tuple[dict[str, list[float]], dict[str, list[float]]]:
    """By side, of each batch: seconds from the common start until the last engine is done, and
    seconds of the median step."""
    batches: dict[str, list[float]] = {side: [] for side in sides}
    steps: dict[str, list[float]] = {side: [] for side in sides}
    with ExitStack() as stack:
        running: dict[str, list[Engine]] = {side: [] for side in sides}
        for side, engines in sides.items():
            plain = "additional_config" not in engines[0][0] and args.weights == "inplace"
            for options, cores in engines:
                engine = stack.enter_context(Engine(options, cores, plain=plain))
                engine.wait_until_ready()
                # One after the other, or they would measure themselves while others start.
                engine.pause()
                running[side].append(engine)
        for repeat, order in enumerate(turns([*sides], args.repeats + 1)):
            for side in order:
                seconds, step = _serve(running[side], args, repeat)
                if repeat:  # the first one warms up
                    batches[side].append(seconds)
                    steps[side].append(step)
    return batches, steps


def _serve(engines: Sequence[Engine], args: argparse.Namespace, seed: int) -> tuple[float, float]:
    prompts = random_prompts(args.requests, args.prompt, seed)
    with awake(engines):
        begin_at = time.monotonic() + _BEGIN_SECONDS
        for index, engine in enumerate(engines):
            engine.start(generate, prompts[index :: len(engines)], args.new_tokens, begin_at)
        times = [engine.result() for engine in engines]
    began, ended, step = zip(*times, strict=True)
    return max(ended) - min(began), statistics.mean(step)


def generate(
    llm: Any, prompts: Sequence[Any], new_tokens: int, begin_at: float
) -> tuple[float, float, float]:
    """Serve a batch of fixed lengths, in the engine's process, after a short one that wakes it.

    Args:
        begin_at: wait for this moment, so that several engines begin together.

    Returns:
        When it began and ended, on the monotonic clock, and the median time between two steps'
        outputs, seconds.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    def serve(prompts: Sequence[Any], tokens: int) -> list[float]:
        params = SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        engine, lengths, outputs_at = llm.llm_engine, [], []
        for number, prompt in enumerate(prompts):
            engine.add_request(f"{begin_at}-{tokens}-{number}", prompt, params)
        while engine.has_unfinished_requests():
            outputs = engine.step()
            outputs_at.append(time.monotonic())
            lengths += [len(output.outputs[0].token_ids) for output in outputs if output.finished]
        assert lengths == [tokens] * len(prompts)
        return outputs_at

    serve([{"prompt_token_ids": [7, 8, 9]}], 2)
    while (left := begin_at - time.monotonic()) > 0:
        time.sleep(min(left, 1e-3))
    began = time.monotonic()
    outputs_at = serve(prompts, new_tokens)
    return began, outputs_at[-1], statistics.median(np.diff(outputs_at).tolist())


if __name__ == "__main__":
    main()
