"""What users ask of `demo`, `profile` and `random-model`: their options, declared once."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from pat_vllm.ranges import EngineOptions, PATOptions, Ranged

_AS_IN_VLLM = "As in vLLM."
_MOST_WIDTH, _MOST_HEADS = 1 << 18, 1 << 12


@dataclass(frozen=True)
class DemoOptions(Ranged):
    """A batch, and the engine that serves it; each field is an option of the command."""

    model: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoint to use instead of a random model. Other random models: `repeating`, "
            "whose text repeats itself, so that drafts are accepted; `moe`, a mixture of experts."
        ),
    ] = None
    models_dir: Annotated[
        Path, typer.Option(help="Where a random model (0.7 GB) is made once and kept.")
    ] = Path(".models")
    ranks: Annotated[int, typer.Option(min=2, max=1024, help="Worker processes.")] = 2
    requests: Annotated[int, typer.Option(min=2, max=100_000, help="Requests in the batch.")] = 128
    max_tokens: Annotated[
        int, typer.Option(min=8, max=1 << 24, help="Longest response, tokens.")
    ] = 320
    switch_at: Annotated[
        int, typer.Option(min=1, max=100_000, help="Live requests at which to switch.")
    ] = 16
    speculate: Annotated[
        bool, typer.Option("--speculate", help="Speculative decoding in all runs: n-gram drafts.")
    ] = False
    num_speculative_tokens: Annotated[
        int,
        typer.Option(min=1, max=1024, help="With --speculate: draft tokens a request and step."),
    ] = 4
    temperature: Annotated[
        float | None,
        typer.Option(min=0, max=100, help="0 is greedy; 1 by default, 0 with --speculate."),
    ] = None
    seed: Annotated[
        int, typer.Option(min=0, max=1 << 62, help="Of prompts, lengths and sampling.")
    ] = 0
    rounds: Annotated[
        int, typer.Option(min=2, max=1000, help="Runs of each way: replicas, one group, switching.")
    ] = 3
    output: Annotated[Path, typer.Option(help="PNG to write.")] = Path("demo.png")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.speculate and self.temperature:
            raise ValueError(
                f"--temperature {self.temperature:g} does not go with --speculate: what a request "
                "samples depends on its drafts, which a switch drops. Leave it out"
            )
        usual = type(self).num_speculative_tokens
        if not self.speculate and self.num_speculative_tokens != usual:
            raise ValueError(
                f"--num-speculative-tokens {self.num_speculative_tokens} needs --speculate"
            )

    @property
    def draft_length(self) -> int:
        """Draft tokens of a request and step; 0 is no speculative decoding."""
        return self.num_speculative_tokens if self.speculate else 0

    @property
    def sampling_temperature(self) -> float:
        """The temperature at which tokens are sampled."""
        return float(not self.speculate) if self.temperature is None else self.temperature


@dataclass(frozen=True)
class ProfileOptions(Ranged):
    """The engine to measure, by vLLM's options and PAT's, and how."""

    tensor_parallel_size: Annotated[
        int, typer.Option(min=1, max=1024, help="Ranks of the engine.")
    ] = 2
    dtype: Annotated[str, typer.Option(help=_AS_IN_VLLM)] = "auto"
    load_format: Annotated[
        str, typer.Option(help="As in vLLM; `dummy` needs no more of a checkpoint than its config.")
    ] = "auto"
    max_model_len: Annotated[int | None, typer.Option(min=-1, max=1 << 31, help=_AS_IN_VLLM)] = None
    max_num_seqs: Annotated[int | None, typer.Option(min=1, max=1 << 31, help=_AS_IN_VLLM)] = None
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, max=1 << 31, help=_AS_IN_VLLM)
    ] = None
    enforce_eager: Annotated[bool, typer.Option(help=_AS_IN_VLLM)] = False
    kv_cache_memory_bytes: Annotated[
        int | None, typer.Option(min=1, max=1 << 62, help=_AS_IN_VLLM)
    ] = None
    block_size: Annotated[int | None, typer.Option(min=1, max=1 << 20, help=_AS_IN_VLLM)] = None
    speculative_config: Annotated[
        dict[str, Any],
        typer.Option(
            metavar="JSON",
            help="As in vLLM, an object; measures steps with drafts, too.",
        ),
    ] = field(default_factory=dict)
    pat: PATOptions = field(default_factory=dict)
    engine: EngineOptions = field(default_factory=dict)
    output: Annotated[
        Path | None, typer.Option(help="JSON to write; named after the engine by default.")
    ] = None
    quick: Annotated[
        bool, typer.Option("--quick", help="Measure only what an engine's start would measure.")
    ] = False
    budget: Annotated[
        float | None,
        typer.Option(min=1, max=1_000_000, help="Seconds after which the rest is left out."),
    ] = None


@dataclass(frozen=True, kw_only=True)
class RandomModel(Ranged):
    """A random checkpoint: each field is an option of the command, with what its help says."""

    arch: Annotated[
        str,
        typer.Option(
            help="qwen3, qwen2, llama; with sliding windows: mistral, phi3, gemma2, gemma3_text; "
            "chunked attention: llama4_text; "
            "mixtures of experts: qwen3_moe, qwen2_moe, mixtral, olmoe, glm4_moe; both: gpt_oss; "
            "linear attention: qwen3_next, qwen3_5_text, qwen3_5_moe_text; Mamba2: nemotron_h; "
            "latent attention and a mixture: deepseek_v2, deepseek_v3."
        ),
    ] = "qwen3"
    hidden: Annotated[
        int, typer.Option(min=1, max=1 << 16, help="Width of the residual stream.")
    ] = 128
    layers: Annotated[int, typer.Option(min=1, max=1 << 10, help="Number of decoder layers.")] = 3
    heads: Annotated[int, typer.Option(min=1, max=_MOST_HEADS, help="Query heads.")] = 8
    kv_heads: Annotated[int, typer.Option(min=1, max=_MOST_HEADS, help="Key/value heads.")] = 4
    head_dim: Annotated[
        int,
        typer.Option(
            min=1,
            max=1 << 12,
            help="Width of one head; on CPU vLLM has 32, 64, 80, 96, 112, 128 and larger ones.",
        ),
    ] = 32
    intermediate: Annotated[int, typer.Option(min=1, max=_MOST_WIDTH, help="Width of the MLP.")] = (
        256
    )
    vocab: Annotated[
        int,
        typer.Option(min=4, max=1 << 20, help="Tokens of the vocabulary; 259 encode any text."),
    ] = 512
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32"
    max_position_embeddings: Annotated[
        int, typer.Option(min=1, max=1 << 24, help="Longest context, tokens.")
    ] = 2048
    tie: Annotated[bool, typer.Option(help="Tie the output head to the embeddings.")] = False
    window: Annotated[int, typer.Option(min=1, max=1 << 24, help="Tokens of a sliding window.")] = (
        64
    )
    linear_heads: Annotated[
        int,
        typer.Option(
            min=1, max=_MOST_HEADS, help="Key heads of linear attention, groups of Mamba2."
        ),
    ] = 4
    experts: Annotated[
        int, typer.Option(min=1, max=1 << 12, help="Of a mixture, in each layer.")
    ] = 8
    experts_per_token: Annotated[int, typer.Option(min=1, max=1 << 12, help="Of a mixture.")] = 2
    expert_intermediate: Annotated[
        int, typer.Option(min=1, max=_MOST_WIDTH, help="Width of an expert.")
    ] = 64
    # A linear weight has standard deviation gain / sqrt(fan_in), so unit-variance input gives
    # output of standard deviation gain whatever the width: 0.35 per weight at hidden 128.
    # Initialisation for training (0.02) leaves logits so flat that float32 rounding can change an
    # argmax.
    gain: Annotated[
        float,
        typer.Option(
            min=0,
            max=1000,
            help="About the standard deviation of the logits; smaller is flatter.",
        ),
    ] = 4.0
    repeat: Annotated[
        float,
        typer.Option(
            min=0,
            max=1000,
            help="How much its text repeats a phrase; 0: never, 1.5: mostly.",
        ),
    ] = 0.0
    phrase: Annotated[int, typer.Option(min=2, max=1 << 16, help="Tokens of that phrase.")] = 16
    seed: Annotated[int, typer.Option(min=-(2**63), max=2**63 - 1, help="Of the weights.")] = 0
