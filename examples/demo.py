"""One long-tail batch on CPU: in each static layout, and with PAT, whose policy decides.

    python examples/demo.py [--model mixture] [--speculate]

One engine serves the batch in these ways in turn, so that all of them suffer alike where the load
of the machine changes. Prints the times of each round and whether all tokens agree, and draws the
last round.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pat_vllm.cli.random_model import RandomModelOptions, write_model
from pat_vllm.doctor.child import environment
from pat_vllm.predictor.draft_schedule import ngram_config
from pat_vllm.reporting import Run

if TYPE_CHECKING:
    from vllm import LLM

# On a CPU all ranks share the memory, so replicas gain nothing while reading weights is what takes
# the time; they gain at sampling, which each rank of a TP group does for the whole batch. With a
# large vocabulary that decides a large batch's step, and reading the output head, which a TP group
# divides, decides a small one's: the same crossover as on GPUs, for another reason.
SHAPE: dict[str, Any] = dict(
    hidden=512, layers=4, heads=8, kv_heads=4, head_dim=64, intermediate=1536, vocab=151_936
)
MODELS: dict[str, dict[str, Any]] = {
    "dense": SHAPE,  # 169M parameters
    "mixture": SHAPE | dict(experts=16, experts_per_token=4, expert_intermediate=256),
    # Its text repeats a phrase, with interruptions, so that n-gram drafts are accepted.
    "repeating": SHAPE | dict(repeat=1.5),
}
KV_BYTES = 2 << 20
"""For a request: two of vLLM's blocks of 128 tokens on CPU. Few responses are longer than one."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--model", default="dense", help=f"{', '.join(MODELS)}, or a checkpoint's folder")
    add("--models-dir", type=Path, default=Path(".models"), help="where these are made and kept")
    add("--requests", type=int, default=64)
    add("--max-tokens", type=int, default=320, help="longest response")
    add("--rounds", type=int, default=3, help="the first one warms up")
    add("--speculate", action="store_true", help="n-gram drafts of up to 4 tokens")
    add("--output", type=Path, default=Path("demo.png"), help="picture")
    options = parser.parse_args()

    os.environ.update(environment(2))  # a core for each of two ranks
    from vllm import LLM

    import pat_vllm
    from pat_vllm.reporting.report_plot import plot_runs

    llm = LLM(
        str(checkpoint(options.model, options.models_dir)),
        tensor_parallel_size=2,
        distributed_executor_backend="pat",
        # In bfloat16 rounding differs with the layout, and after a while so does the text.
        dtype="float32",
        enforce_eager=True,
        max_num_seqs=options.requests,
        max_model_len=options.max_tokens + 64,
        kv_cache_memory_bytes=options.requests * KV_BYTES,
        speculative_config=ngram_config(4) if options.speculate else None,
    )
    batch = requests(options.requests, options.max_tokens, drafts=options.speculate)
    print(f"{options.requests} requests at once, {sum(p.max_tokens for _, p in batch)} tokens")

    ways = {"replicas": 1, "one group": 2, "PAT": None}
    outputs: list[list[list[int]]] = []
    runs: list[tuple[str, Run]] = []
    for number in range(options.rounds):
        runs = []
        for way, tp in ways.items():
            llm.reset_prefix_cache()  # the batch before is over, and the layout that it was held in
            if tp and not pat_vllm.switch(llm, tp):
                raise RuntimeError(f"the engine refused to switch to tp={tp}")
            began = time.monotonic()
            outputs.append(generate(llm, batch))
            seconds = time.monotonic() - began
            runs.append((way, Run(pat_vllm.report(llm, since=began), began, seconds)))
        times = ", ".join(f"{way} {run.seconds:.2f} s" for way, run in runs)
        print(f"round {number + 1} of {options.rounds}{'' if number else ', warming up'}: {times}")

    for switch in runs[-1][1].switches:
        print(f"PAT's switch {switch.source} -> {switch.target}: {switch.num_seqs} live requests,")
        print(f"  {switch.seconds * 1e3:.0f} ms, {switch.reason}")
    title = f"{options.requests} requests, {sum(map(len, outputs[0]))} tokens, two ranks on CPU"
    plot_runs(title, [(way, said(run), run) for way, run in runs], options.output)
    print(f"picture: {options.output}")
    if any(output != outputs[0] for output in outputs):
        print("DIFFERENT TOKENS")
        return 1
    print("The tokens of all runs agree.")
    return 0


def checkpoint(name: str, folder: Path) -> Path:
    """A model of `MODELS`, made on the first call, or the folder that is named."""
    if name not in MODELS:
        return Path(name)
    path = folder / f"demo-{name}"
    if not path.exists():
        folder.mkdir(exist_ok=True)
        # Renamed when complete, so that an interrupted run leaves no half of a model behind.
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            made = Path(scratch, "model")
            write_model(made, RandomModelOptions(**MODELS[name]))
            made.rename(path)
    return path


def requests(count: int, longest: int, drafts: bool) -> list[tuple[Any, Any]]:
    """Prompts of random tokens. As in reasoning, most responses are short, around a thirteenth of
    the longest, and each eleventh ends in the last third or at the limit."""
    from vllm import SamplingParams, TokensPrompt

    rng = random.Random(0)
    lengths = [
        rng.randint(2 * longest // 3, longest)
        if number % 11 == 0
        else max(4, round(longest / 13 * rng.lognormvariate(0, 0.6)))
        for number in range(count)
    ]
    lengths[0] = longest
    return [
        (
            TokensPrompt(prompt_token_ids=[rng.randrange(3, 500) for _ in range(20)]),
            SamplingParams(
                # What a request samples depends on its drafts, which a switch drops.
                temperature=0.0 if drafts else 1.0,
                seed=number,
                max_tokens=min(length, longest),
                ignore_eos=True,
                detokenize=False,
            ),
        )
        for number, length in enumerate(lengths)
    ]


def generate(llm: LLM, batch: list[tuple[Any, Any]]) -> list[list[int]]:
    """Token ids of the responses."""
    prompts, params = zip(*batch, strict=True)
    answers = llm.generate(list(prompts), list(params), use_tqdm=False)
    return [list(answer.outputs[0].token_ids) for answer in answers]


def said(run: Run) -> str:
    """What the picture says of a run."""
    drafts = f", {run.acceptance:.0%} of drafts accepted" if run.drafted else ""
    return f"{run.seconds:.1f} s{drafts}"


if __name__ == "__main__":
    sys.exit(main())
