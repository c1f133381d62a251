"""`pat-vllm demo`: one long-tail batch as replicas, as one group, and switching between them."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from pat_vllm.child import environment
from pat_vllm.cli import random_model
from pat_vllm.cli.command_options import DemoOptions
from pat_vllm.cli.demo_timeline import coloured, draw_timeline
from pat_vllm.cli.engine_run import Batch, RunResult, RunSpec, run
from pat_vllm.config import PATConfig
from pat_vllm.files.reading import name_of, read_json_object
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
_MOST_SPREAD = 0.25
"""Times of the same work that differ by more than this cannot be compared."""


@dataclass(frozen=True)
class Contender:
    """A way to serve the batch.

    Attributes:
        layouts: the active layout, and at how many live requests another one follows.
        way: as in `RunSpec.ways`.
    """

    label: str
    layouts: str
    way: str | None


Runs = Sequence[tuple[Contender, Sequence[RunResult]]]
"""The runs of each contender, by round; the live switch is the last contender."""


def schedule(ranks: int, switch_at: int, mixture: Mixture | None = None) -> dict[int, Layout]:
    """At how many live requests the live switch enters which layout, the narrowest first.

    Args:
        switch_at: live requests at which the last switch, to one group, is made. Layouts in
            between are entered at as many live requests per group.
        mixture: the model's experts. A layout with spread ones is entered half as many requests
            earlier than that with cut ones.
    """
    _, *wider = PATConfig().resolve_layouts(ranks, mixture)
    table = {
        round(switch_at * layout.replicas * (1.5 if layout.experts == "ep" else 1)): layout
        for layout in wider
    }
    return dict(sorted(table.items(), reverse=True))


def engine_options(table: Mapping[int, Layout], mixture: Mixture | None = None) -> dict[str, Any]:
    """`additional_config["pat"]` of an engine that follows a schedule."""
    names = {n: layout.tp if layout.experts == "tp" else str(layout) for n, layout in table.items()}
    # Copies of the weights for each layout are of one kind.
    weights = {} if mixture is None else {"weights": "inplace"}
    return {"policy": {"kind": "schedule", "switch_at": names}, **weights}


def contenders(table: Mapping[int, Layout]) -> tuple[Contender, Contender, Contender]:
    """Static replicas, one static group, and the live switch between them."""
    widest = list(table.values())[-1]
    base = Layout.of(1, widest.world_size)
    entered = [str(base), *(f"{layout} at {n}" for n, layout in table.items())]
    return (
        Contender("replicas", str(base), str(base)),
        Contender("one group", str(widest), str(widest)),
        Contender("live switch", ", ".join(entered), None),
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
    options: Mapping[str, Any],
    batch: Batch,
    warm_up: Batch,
    num_speculative_tokens: int = 0,
    ways: tuple[str | None, ...] = (None,),
    rounds: int = 1,
) -> RunSpec:
    """An engine, and how it serves a batch.

    Args:
        options: `additional_config["pat"]`.
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
        additional_config={"pat": dict(options)},
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
    return RunSpec(engine, batch, warm_up, ways, rounds)


def disagreement(results: Runs) -> str | None:
    """Where outputs differ from the first run's, or None if all agree token by token."""
    reference, (expected, *_) = results[0]
    for contender, result in ((way, one) for way, runs in results for one in runs):
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


def typical(runs: Sequence[RunResult]) -> RunResult:
    """The run whose time is the median; of an even number, the faster of the two."""
    return sorted(runs, key=lambda one: one.seconds)[(len(runs) - 1) // 2]


def spread(runs: Sequence[RunResult]) -> float:
    """By how much the times of the same work differ, relative to the typical one."""
    seconds = [one.seconds for one in runs]
    return (max(seconds) - min(seconds)) / typical(runs).seconds


def table_rows(results: Runs) -> list[tuple[str, ...]]:
    """Cells of the table: label, layouts, seconds, spread, relative time, switches, stall."""
    best_static = min(typical(runs).seconds for _, runs in results[:2])
    return [
        (
            contender.label,
            contender.layouts,
            f"{one.seconds:.2f}",
            f"{spread(runs):.0%}",
            f"{one.seconds / best_static:.2f}",
            str(len(switches)),
            f"{1e3 * sum(one.seconds for one in switches):.0f}" if switches else "-",
        )
        for contender, runs in results
        for one in (typical(runs),)
        for switches in (one.run.switches,)
    ]


def verdict(results: Runs) -> str:
    """In a sentence, whether switching paid, as far as the figures can say."""
    *static, (_, switching) = results
    best, of_best = min(static, key=lambda one: typical(one[1]).seconds)
    ours, theirs = typical(switching), typical(of_best)
    if not ours.run.switches:
        return "The live switch did not happen: the batch never came down to the threshold."
    busiest, runs = max(results, key=lambda one: spread(one[1]))
    if spread(runs) > _MOST_SPREAD:
        seconds = [one.seconds for one in runs]
        return (
            f"The machine was busy with other work: '{busiest.label}' took {min(seconds):.2f} to "
            f"{max(seconds):.2f} s for the same batch. These figures cannot be compared; try again "
            "when the machine is idle."
        )
    change = 1 - ours.seconds / theirs.seconds
    text = (
        f"The live switch took {ours.seconds:.2f} s, {abs(change):.1%} "
        f"{'less' if change > 0 else 'more'} than the best static layout "
        f"('{best.label}', {theirs.seconds:.2f} s): "
    )
    noise = max(spread(switching), spread(of_best))
    if abs(change) <= noise:
        return (
            f"{text}equal within the noise, as the times of one way differ by up to {noise:.1%} "
            "between rounds."
        )
    return f"{text}it {'paid' if change > 0 else 'did not pay'}."


def speed(result: RunResult) -> str:
    """What the picture says of a run."""
    text = f"{result.seconds:.1f} s, {result.tokens / result.seconds:.0f} tokens/s"
    run = result.run
    return text + (f", {run.acceptance:.0%} of drafts accepted" if run.drafted else "")


def drafts_of(results: Runs) -> str:
    """In a sentence, how long drafts were in each way, and how many were accepted."""
    shown = [(contender, typical(runs).run) for contender, runs in results]
    lengths = {sample.num_speculative_tokens for _, one in shown for sample in one.drafts}
    accepted = ", ".join(
        f"'{contender.label}' {one.acceptance:.0%} of {one.drafted}" for contender, one in shown
    )
    ks = ", ".join(map(str, sorted(lengths)))
    return f"n-gram drafts, k = {ks}: accepted in {accepted} tokens."


def show(console: Console, results: Runs) -> None:
    """Print the table and the timeline of the last contender."""
    table = Table(box=box.SIMPLE, collapse_padding=True, pad_edge=False)
    table.add_column("run", no_wrap=True)
    table.add_column("layout", min_width=10)
    for heading in ("seconds", "spread", "vs static", "switches", "stall ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in table_rows(results):
        table.add_row(*row)
    console.print(table)
    console.print("Same batch and engine, taking turns. seconds: generation, median of the rounds;")
    console.print(
        "spread: from the fastest to the slowest round; vs static: relative to the faster"
    )
    console.print("static layout; stall: while switching.")
    last, runs = results[-1]
    if any(one.run.drafts for one in runs):
        console.print(drafts_of(results))
    console.print(f"\nLive requests in run '{last.label}':")
    for line in draw_timeline(typical(runs).run):
        console.print(coloured(line), soft_wrap=True)


def demo_model(directory: Path, name: str | None = None) -> Path:
    """A model of the demo's own in `directory`, made on the first call.

    Args:
        name: one of `OWN_MODELS`; None: of the shape `MODEL`.

    Returns:
        The checkpoint's directory.
    """
    return random_model.kept_model(directory, "demo", OWN_MODELS[name] if name else MODEL)


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


def demo(console: Console, options: DemoOptions) -> bool:
    """Serve the batch in three ways in turn, print and plot what was measured.

    Returns:
        Whether all outputs agree token by token.

    Raises:
        ValueError: an option does not fit the model.
        RunFailed: an engine failed.
    """
    from pat_vllm.reporting.plot import plot_runs

    model, ranks, requests, seed = options.model, options.ranks, options.requests, options.seed
    own = None if model is None else str(model)
    if own is None or own in OWN_MODELS:
        with console.status("making a random model"):
            model = demo_model(options.models_dir, own)
    assert model is not None
    config = model_config(model)
    vocab = config["vocab_size"]
    lengths = response_lengths(requests, options.max_tokens, seed)
    batch = make_batch(lengths, vocab, options.sampled_at, seed)
    short = [max(2, round(length * WARM_UP_SHARE)) for length in lengths]
    warm_up = make_batch(short, vocab, options.sampled_at, seed + 1)
    mixture = Mixture.from_config(config)
    table = schedule(ranks, options.switch_at, mixture)
    ways = contenders(table)
    spec = run_spec(
        model,
        ranks,
        engine_options(table, mixture),
        batch,
        warm_up,
        options.drafts,
        tuple(one.way for one in ways),
        options.rounds,
    )

    console.print(f"model {model}, float32, {ranks} ranks ({_placement(ranks)})", soft_wrap=True)
    ordered = sorted(lengths, reverse=True)
    console.print(
        f"{requests} requests at once, {batch.tokens} tokens: median {ordered[requests // 2]}, "
        f"longest {', '.join(map(str, ordered[:3]))}; "
        f"temperature {options.sampled_at:g}, seed {seed}"
    )
    results: list[tuple[Contender, list[RunResult]]] = [(one, []) for one in ways]
    made = 0
    with console.status("starting an engine and warming up") as status:

        def take(result: RunResult) -> None:
            nonlocal made
            number, way = divmod(made, len(ways))
            made += 1
            if made == 1:
                console.print(f"  engine started in {result.start_seconds:.0f} s")
            results[way][1].append(result)
            if way + 1 == len(ways):
                seconds = [f"{one.label} {runs[-1].seconds:.2f} s" for one, runs in results]
                console.print(f"  round {number + 1} of {options.rounds}: {', '.join(seconds)}")
            upcoming = ways[made % len(ways)].label
            status.update(f"round {made // len(ways) + 1} of {options.rounds}: {upcoming}")

        run(spec, take)
    console.print()
    show(console, results)

    title = (
        f"One long-tail batch, {len(results)} ways: {len(batch.prompts)} requests, "
        f"{batch.tokens:,} tokens, {ranks} ranks"
    )
    shown = [(one.label, typical(runs)) for one, runs in results]
    plot_runs(title, [(name, speed(result), result.run) for name, result in shown], options.output)
    console.print(f"\nplot: {options.output}", soft_wrap=True)
    console.print(verdict(results))
    if problem := disagreement(results):
        console.print(f"[bold red]DIFFERENT OUTPUTS:[/] {problem}")
        return False
    console.print(f"Outputs of all runs agree, token by token ({batch.tokens} tokens).")
    return True


def _placement(ranks: int) -> str:
    bind = environment(ranks)["VLLM_CPU_OMP_THREADS_BIND"]
    return "not bound to cores" if bind == "nobind" else f"on cores {bind}"
