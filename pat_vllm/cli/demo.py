"""`pat-vllm demo`: one long-tail batch as replicas, as one group, and switching between them."""

from __future__ import annotations

import hashlib
import json
import math
import random
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pat_vllm.child import environment
from pat_vllm.cli import random_model
from pat_vllm.cli.demo_timeline import coloured, draw_timeline
from pat_vllm.cli.engine_run import Batch, RunResult, RunSpec, run
from pat_vllm.config import PATConfig
from pat_vllm.files.reading import name_of, read_json_object
from pat_vllm.files.writing import forgotten
from pat_vllm.layout import Layout
from pat_vllm.mixture import Mixture
from pat_vllm.model_size import size_of

# On a CPU all ranks share the memory, so replicas gain nothing while reading weights is what takes
# the time; they gain at sampling, which each rank of a TP group does for the whole batch. With a
# large vocabulary that decides a large batch's step, and reading the output head, which a TP group
# divides, decides a small one's: the same crossover as on GPUs, for another reason.
MODEL = dict(
    arch="qwen3",
    hidden=512,
    layers=4,
    heads=8,
    kv_heads=4,
    head_dim=64,
    intermediate=1536,
    vocab=151_936,
    dtype="float32",
)
"""Shape of the demo's own model: 169M parameters."""

OWN_MODELS: Mapping[str, Mapping[str, Any]] = {
    # Text repeats a phrase, with interruptions, so that most drafts are accepted.
    "repeating": {**MODEL, "repeat": 1.5},
    # A mixture of experts: 184M parameters, 25M of them in experts.
    "moe": {
        **MODEL,
        "arch": "qwen3_moe",
        "experts": 16,
        "experts_per_token": 4,
        "expert_intermediate": 256,
    },
}
"""Others of the demo's own, by the name that stands for a checkpoint."""
_NGRAMS = dict(method="ngram", prompt_lookup_min=2, prompt_lookup_max=4)

PROMPT_TOKENS = (8, 32)
MIN_LENGTH = 4
# Lengths are log-normal: a twelfth of the longest in the middle, a third of them e times that.
MEDIAN_SHARE = 1 / 12
SIGMA = 1.0
WARM_UP_SHARE = 1 / 16
"""Length of a warm-up request relative to its counterpart."""

_NEEDED = ("vocab_size", "num_attention_heads", "hidden_size", "num_hidden_layers")
_FLOAT32_BYTES = 4
_KV_BLOCK_TOKENS = 128
"""vLLM's block size on CPUs; smaller on other platforms."""


@dataclass(frozen=True)
class Contender:
    """A policy to run the batch with.

    Attributes:
        layouts: the active layout, and at how many live requests another one follows.
        options: `additional_config["pat"]`.
    """

    label: str
    layouts: str
    options: dict[str, Any]


def contenders(
    ranks: int, switch_at: int, mixture: Mixture | None = None
) -> tuple[Contender, Contender, Contender]:
    """Static replicas, one static group, and the live switch between them.

    Args:
        switch_at: live requests at which the last switch, to one group, is made. Layouts in
            between are entered at as many live requests per group.
        mixture: the model's experts, which are cut in the static group. The live switch enters a
            layout with spread ones half as many requests earlier than that with cut ones.
    """
    base, *wider = PATConfig().resolve_layouts(ranks, mixture)
    table = {
        round(switch_at * layout.replicas * (1.5 if layout.experts == "ep" else 1)): layout
        for layout in wider
    }
    widest = table[switch_at]
    table = dict(sorted(table.items(), reverse=True))
    # Copies of the weights for each layout are of one kind.
    weights = {} if mixture is None else {"weights": "inplace"}

    def static(layout: Layout) -> dict[str, Any]:
        return {"policy": {"kind": "static", "tp": layout.tp}, **weights}

    names = {n: layout.tp if layout.experts == "tp" else str(layout) for n, layout in table.items()}
    return (
        Contender("replicas", str(base), static(base)),
        Contender("one group", str(widest), static(widest)),
        Contender(
            "live switch",
            ", ".join([str(base), *(f"{layout} at {n}" for n, layout in table.items())]),
            {"policy": {"kind": "schedule", "switch_at": names}, **weights},
        ),
    )


def response_lengths(requests: int, longest: int, seed: int) -> tuple[int, ...]:
    """Tokens that each request generates: heavy-tailed, at most `longest`, which one reaches."""
    rng = random.Random(f"lengths/{seed}")
    drawn = [longest * MEDIAN_SHARE * rng.lognormvariate(0, SIGMA) for _ in range(requests)]
    lengths = [min(longest, max(MIN_LENGTH, round(length))) for length in drawn]
    lengths[max(range(requests), key=lengths.__getitem__)] = longest
    return tuple(lengths)


def make_batch(lengths: Sequence[int], vocab: int, temperature: float, seed: int) -> Batch:
    """Requests of these lengths with random prompts."""
    rng = random.Random(f"prompts/{seed}")
    first = min(len(random_model.SPECIAL_TOKENS), vocab - 1)
    prompts = tuple(
        tuple(rng.randrange(first, vocab) for _ in range(rng.randint(*PROMPT_TOKENS)))
        for _ in lengths
    )
    return Batch(prompts, tuple(lengths), temperature, seed)


def run_spec(
    model: Path,
    ranks: int,
    contender: Contender,
    batch: Batch,
    warm_up: Batch,
    num_speculative_tokens: int = 0,
) -> RunSpec:
    """The engine of a contender: they differ in the policy and in nothing else.

    Args:
        num_speculative_tokens: draft tokens a request and step; 0 is no speculative decoding.

    Raises:
        ValueError: the model's context is too short for the batch.
    """
    config = model_config(model)
    limit = size_of(config, "max_position_embeddings", batch.longest)
    if batch.longest > limit:
        raise ValueError(
            f"--max-tokens makes a context of {batch.longest} tokens, but {model} allows {limit}; "
            f"use --max-tokens {limit - PROMPT_TOKENS[1]} or less"
        )
    heads = size_of(config, "num_key_value_heads", config["num_attention_heads"])
    head_dim = size_of(config, "head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = config["num_hidden_layers"] * heads * head_dim * 2 * _FLOAT32_BYTES
    drafts = num_speculative_tokens
    contexts = (len(p) + n + drafts for p, n in zip(batch.prompts, batch.lengths, strict=True))
    # Room for all requests in one replica, so that no run preempts any.
    blocks = 8 + sum(math.ceil(context / _KV_BLOCK_TOKENS) for context in contexts)
    engine = dict(
        model=str(model),
        tensor_parallel_size=ranks,
        distributed_executor_backend="pat",
        additional_config={"pat": contender.options},
        # In bfloat16 rounding differs with the layout, and after a while so does the text.
        dtype="float32",
        enforce_eager=True,
        max_model_len=batch.longest,
        max_num_seqs=len(batch.lengths),
        kv_cache_memory_bytes=blocks * _KV_BLOCK_TOKENS * token_bytes,
        skip_tokenizer_init=True,
    )
    if drafts:
        engine["speculative_config"] = {**_NGRAMS, "num_speculative_tokens": drafts}
    return RunSpec(engine, batch, warm_up)


def disagreement(results: Sequence[tuple[Contender, RunResult]]) -> str | None:
    """Where outputs differ from the first run's, or None if all agree token by token."""
    (reference, expected), *others = results
    for contender, result in others:
        pairs = list(enumerate(zip(expected.outputs, result.outputs, strict=True)))
        if differing := [(i, a, b) for i, (a, b) in pairs if a != b]:
            request, a, b = differing[0]
            at = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), None)
            if at is None:
                where = f"request {request} has {len(a)} and {len(b)} tokens"
            else:
                where = f"request {request} differs first at token {at}: {a[at]} and {b[at]}"
            return (
                f"the outputs of '{reference.label}' and '{contender.label}' differ in "
                f"{len(differing)} of {len(pairs)} requests; {where}"
            )
    return None


def table_rows(results: Sequence[tuple[Contender, RunResult]]) -> list[tuple[str, ...]]:
    """Cells of the table: label, layouts, seconds, tokens/s, relative time, switches, stall."""
    best_static = min(result.seconds for _, result in results[:2])
    return [
        (
            contender.label,
            contender.layouts,
            f"{result.seconds:.2f}",
            f"{result.tokens / result.seconds:.0f}",
            f"{result.seconds / best_static:.2f}",
            str(len(result.switches)),
            f"{1e3 * sum(s.seconds for s in result.switches):.0f}" if result.switches else "-",
        )
        for contender, result in results
    ]


def verdict(results: Sequence[tuple[Contender, RunResult]]) -> str:
    """In a sentence, whether switching paid."""
    *static, (_, switching) = results
    best, result = min(static, key=lambda one: one[1].seconds)
    if not switching.switches:
        return "The live switch did not happen: the batch never came down to the threshold."
    change = 1 - switching.seconds / result.seconds
    return (
        f"The live switch took {switching.seconds:.2f} s, {abs(change):.1%} "
        f"{'less' if change > 0 else 'more'} than the best static layout "
        f"('{best.label}', {result.seconds:.2f} s): it {'paid' if change > 0 else 'did not pay'}."
    )


def drafts_of(results: Sequence[tuple[Contender, RunResult]]) -> str:
    """In a sentence, how long drafts were in each run, and how many were accepted."""
    lengths = {sample.num_speculative_tokens for _, run in results for sample in run.drafts}
    runs = ", ".join(
        f"'{contender.label}' {run.acceptance:.0%} of {run.drafted}" for contender, run in results
    )
    return f"n-gram drafts, k = {', '.join(map(str, sorted(lengths)))}: accepted in {runs} tokens."


def show(console: Console, results: Sequence[tuple[Contender, RunResult]]) -> None:
    """Print the table and the timeline of the last run."""
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    table.add_column("run", no_wrap=True)
    table.add_column("layout")
    for heading in ("seconds", "tokens/s", "vs static", "switches", "stall ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in table_rows(results):
        table.add_row(*row)
    console.print(table)
    console.print("Same batch, same flags, each run in a new process. seconds: generation;")
    console.print("vs static: relative to the faster static layout; stall: while switching.")
    if any(run.drafts for _, run in results):
        console.print(drafts_of(results))
    console.print(f"\nLive requests in run '{results[-1][0].label}':")
    for line in draw_timeline(results[-1][1]):
        console.print(coloured(line), soft_wrap=True)


def demo_model(directory: Path, name: str | None = None) -> Path:
    """A model of the demo's own in `directory`, made on the first call.

    Args:
        name: one of `OWN_MODELS`; None: of the shape `MODEL`.

    Returns:
        The checkpoint's directory.
    """
    shape: Mapping[str, Any] = MODEL if name is None else OWN_MODELS[name]
    key = json.dumps(shape, sort_keys=True).encode() + Path(random_model.__file__).read_bytes()
    target = directory.resolve() / f"demo-{hashlib.sha256(key).hexdigest()[:12]}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    # Renamed when complete, so that an interrupted demo leaves no half of a model behind.
    scratch = Path(tempfile.mkdtemp(prefix=".demo-", dir=target.parent))
    for left in target.parent.glob(".demo-*"):
        if forgotten(left, scratch.stat().st_mtime):
            shutil.rmtree(left, ignore_errors=True)
    try:
        random_model.make_model(scratch, **shape)
        scratch.rename(target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def model_config(model: Path) -> dict[str, Any]:
    """A checkpoint's config.json.

    Raises:
        ValueError: the directory has none, or one without the sizes that the demo needs.
    """
    try:
        config = read_json_object(model / "config.json", "model config")
        missing = [name for name in _NEEDED if not size_of(config, name)]
    except ValueError as error:
        raise ValueError(
            f"--model {name_of(model)} is no directory with a checkpoint: {error}"
        ) from None
    if missing:
        raise ValueError(f"--model {name_of(model)}: its config has no {', '.join(missing)}")
    return config


def demo(
    console: Console,
    *,
    model: Path | None,
    models_dir: Path,
    ranks: int,
    requests: int,
    max_tokens: int,
    switch_at: int,
    num_speculative_tokens: int,
    temperature: float,
    seed: int,
    output: Path,
) -> bool:
    """Run the batch three times, print and plot what was measured.

    Args:
        model: None and `OWN_MODELS` are the demo's own.

    Returns:
        Whether the three outputs agree token by token.

    Raises:
        ValueError: an option does not fit the model.
        RunFailed: an engine failed.
    """
    from pat_vllm.cli.demo_plot import plot

    if num_speculative_tokens and temperature:
        raise ValueError(
            f"--temperature {temperature:g} does not go with --speculate: what a request samples "
            "depends on its drafts, which a switch drops. Leave it out"
        )
    own = None if model is None else str(model)
    if own is None or own in OWN_MODELS:
        with console.status("making a random model"):
            model = demo_model(models_dir, own)
    assert model is not None
    config = model_config(model)
    vocab = config["vocab_size"]
    lengths = response_lengths(requests, max_tokens, seed)
    batch = make_batch(lengths, vocab, temperature, seed)
    short = [max(2, round(length * WARM_UP_SHARE)) for length in lengths]
    warm_up = make_batch(short, vocab, temperature, seed + 1)
    runs = [
        (contender, run_spec(model, ranks, contender, batch, warm_up, num_speculative_tokens))
        for contender in contenders(ranks, switch_at, Mixture.from_config(config))
    ]

    console.print(f"model {model}, float32, {ranks} ranks ({_placement(ranks)})", soft_wrap=True)
    ordered = sorted(lengths, reverse=True)
    console.print(
        f"{requests} requests at once, {batch.tokens} tokens: median {ordered[requests // 2]}, "
        f"longest {', '.join(map(str, ordered[:3]))}; temperature {temperature:g}, seed {seed}"
    )
    results: list[tuple[Contender, RunResult]] = []
    for contender, spec in runs:
        with console.status(f"{contender.label}: starting an engine, then generating"):
            result = run(spec)
        console.print(
            f"  {contender.label}: engine started in {result.start_seconds:.0f} s, "
            f"generated in {result.seconds:.2f} s"
        )
        results.append((contender, result))
    console.print()
    show(console, results)

    plot([(c.label, result) for c, result in results], output)
    console.print(f"\nplot: {output}", soft_wrap=True)
    console.print(verdict(results))
    if problem := disagreement(results):
        console.print(f"[bold red]DIFFERENT OUTPUTS:[/] {problem}")
        return False
    console.print(f"Outputs of all three runs agree, token by token ({batch.tokens} tokens).")
    return True


def _placement(ranks: int) -> str:
    bind = environment(ranks)["VLLM_CPU_OMP_THREADS_BIND"]
    return "not bound to cores" if bind == "nobind" else f"on cores {bind}"
