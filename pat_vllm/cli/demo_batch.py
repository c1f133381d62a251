"""The demo's models and batch, the ways to serve it, and the engine that does."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pat_vllm.cli import random_model
from pat_vllm.cli.engine_run import Batch, RunSpec
from pat_vllm.config import PATConfig
from pat_vllm.files.reading import name_of, read_json_object
from pat_vllm.layout import Layout
from pat_vllm.models.layer_sizes import size_of
from pat_vllm.models.moe_config import MoEConfig
from pat_vllm.predictor.draft_schedule import ngram_config

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
class Variant:
    """A way to serve the batch.

    Attributes:
        layouts: the active layout, and at how many live requests another one follows.
        way: as in `RunSpec.ways`.
    """

    label: str
    layouts: str
    way: str | None


def schedule(ranks: int, switch_at: int, mixture: MoEConfig | None = None) -> dict[int, Layout]:
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


def engine_options(table: Mapping[int, Layout], mixture: MoEConfig | None = None) -> dict[str, Any]:
    """`additional_config["pat"]` of an engine that follows a schedule."""
    names = {n: layout.tp if layout.experts == "tp" else str(layout) for n, layout in table.items()}
    # Copies of the weights for each layout are of one kind.
    weights = {} if mixture is None else {"weights": "inplace"}
    return {"policy": {"kind": "schedule", "switch_at": names}, **weights}


def variants(table: Mapping[int, Layout]) -> tuple[Variant, Variant, Variant]:
    """Static replicas, one static group, and the live switch between them."""
    widest = list(table.values())[-1]
    base = Layout.of(1, widest.world_size)
    entered = [str(base), *(f"{layout} at {n}" for n, layout in table.items())]
    return (
        Variant("replicas", str(base), str(base)),
        Variant("one group", str(widest), str(widest)),
        Variant("live switch", ", ".join(entered), None),
    )


def response_lengths(requests: int, longest: int, seed: int) -> tuple[int, ...]:
    """Tokens that each request generates: heavy-tailed, at most `longest`, which one reaches."""
    rng = random.Random(f"lengths/{seed}")
    drawn = [longest * MEDIAN_SHARE * rng.lognormvariate(0, SIGMA) for _ in range(requests)]
    lengths = [min(longest, max(MIN_LENGTH, round(length))) for length in drawn]
    lengths[max(range(requests), key=lengths.__getitem__)] = longest
    return tuple(lengths)


def make_batch(lengths: Sequence[int], vocab: int, temperature: float, seed: int) -> Batch:
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
    """An engine with these options of PAT's, and how it serves a batch.

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
    drafts = num_speculative_tokens
    contexts = [len(p) + n + drafts for p, n in zip(batch.prompts, batch.lengths, strict=True)]
    engine = engine_with_room(model, config, ranks, options, [contexts], batch.longest)
    if drafts:
        engine["speculative_config"] = ngram_config(drafts)
    return RunSpec(engine, batch, warm_up, ways, rounds)


def engine_with_room(
    model: Path,
    config: Mapping[str, Any],
    ranks: int,
    pat: Mapping[str, Any],
    batches: Sequence[Sequence[int]],
    max_model_len: int,
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`, with room for a whole batch in one replica, so that no run
    preempts any.

    Args:
        config: the model's.
        pat: `additional_config["pat"]`.
        batches: tokens that each request of a batch holds in the end, drafts included.
    """
    heads = size_of(config, "num_key_value_heads", config["num_attention_heads"])
    head_dim = size_of(config, "head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = config["num_hidden_layers"] * heads * head_dim * 2 * _FLOAT32_BYTES
    blocks = 8 + max(sum(math.ceil(n / _KV_BLOCK_TOKENS) for n in each) for each in batches)
    return dict(
        model=str(model),
        tensor_parallel_size=ranks,
        distributed_executor_backend="pat",
        additional_config={"pat": dict(pat)},
        # In bfloat16 rounding differs with the layout, and after a while so does the text.
        dtype="float32",
        enforce_eager=True,
        max_model_len=max_model_len,
        max_num_seqs=max(map(len, batches)),
        kv_cache_memory_bytes=blocks * _KV_BLOCK_TOKENS * token_bytes,
        skip_tokenizer_init=True,
    )


def demo_model(directory: Path, name: str | None = None) -> Path:
    """`MODEL`, or one of `OWN_MODELS`, in a folder of `directory`, made on the first call."""
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
