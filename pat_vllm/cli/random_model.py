"""`pat-vllm random-model`: real shapes and timings without a download."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from pat_vllm.cli.options import failed, options_of
from pat_vllm.cli.random_tokenizer import save_tokenizer
from pat_vllm.cli.ranges import Ranged
from pat_vllm.doctor.models import SHAPES, SPECIAL_TOKENS, Weights, write_checkpoint

_MOST_WIDTH, _MOST_HEADS = 1 << 18, 1 << 12
_LAST_SEED = 2**63 - 1
_MOST_PARAMETERS = 20e9
"""Of a larger model the weights would fill a machine's memory before they are written."""
_DTYPES = ("float32", "bfloat16", "float16")


@dataclass(frozen=True, kw_only=True)
class RandomModelOptions(Ranged):
    """The model's sizes; each field is an option of the command."""

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
    experts: Annotated[
        int,
        typer.Option(min=0, max=1 << 12, help="Of each layer of a mixture; 0 is a dense model."),
    ] = 0
    experts_per_token: Annotated[int, typer.Option(min=1, max=1 << 12, help="Of a mixture.")] = 2
    expert_intermediate: Annotated[
        int, typer.Option(min=1, max=_MOST_WIDTH, help="Width of an expert.")
    ] = 64
    gain: Annotated[
        float,
        typer.Option(
            min=0,
            max=1000,
            help="About the standard deviation of the logits; smaller is flatter.",
        ),
    ] = Weights.gain
    repeat: Annotated[
        float,
        typer.Option(
            min=0,
            max=1000,
            help="How much its text repeats a phrase; 0: never, 1.5: mostly.",
        ),
    ] = Weights.repeat
    seed: Annotated[
        int, typer.Option(min=-_LAST_SEED - 1, max=_LAST_SEED, help="Of the weights.")
    ] = Weights.seed

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype not in _DTYPES:
            raise ValueError(f"--dtype is {self.dtype!r}; allowed: {', '.join(_DTYPES)}")
        if self.heads % self.kv_heads:
            raise ValueError(
                f"--heads {self.heads} must be a multiple of --kv-heads, which is {self.kv_heads}"
            )
        if 0 < self.experts < self.experts_per_token:
            raise ValueError(
                f"--experts {self.experts} must be at least --experts-per-token, which is "
                f"{self.experts_per_token}"
            )
        if self.repeat and not self.gain:
            raise ValueError("--repeat needs logits that differ: take a --gain above 0")
        most = min(self.vocab - len(SPECIAL_TOKENS), self.hidden // 2)
        if self.repeat and most < Weights.phrase:
            raise ValueError(
                f"--repeat has a phrase of {Weights.phrase} tokens; this --vocab and --hidden have "
                f"room for {most}"
            )
        mlps = max(self.intermediate, self.experts * self.expert_intermediate)
        each = self.hidden * (2 * (self.heads + self.kv_heads) * self.head_dim + 3 * mlps)
        parameters = 2 * self.vocab * self.hidden + self.layers * each
        if parameters > _MOST_PARAMETERS:
            raise ValueError(
                f"a model of these sizes has about {parameters / 1e9:.0f} billion parameters; at "
                f"most {_MOST_PARAMETERS / 1e9:.0f} are made: take smaller sizes"
            )

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json: a Qwen3's, or that of its mixture of experts."""
        sizes = {
            "dtype": self.dtype,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "intermediate_size": self.intermediate,
            "vocab_size": self.vocab,
            "max_position_embeddings": self.max_position_embeddings,
        }
        if not self.experts:
            return SHAPES["dense"].config_for(1) | sizes
        experts = {
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size": self.expert_intermediate,
        }
        return SHAPES["mixture"].config_for(1) | sizes | experts


@options_of(RandomModelOptions)
def write_random_model(
    options: RandomModelOptions,
    path: Annotated[Path, typer.Argument(help="Directory to write; must be new or empty.")],
) -> None:
    """Write a random model with a tokenizer: a Qwen3, or with --experts its mixture of experts."""
    try:
        parameters = write_model(path, options)
    except (OSError, RuntimeError) as error:  # too little memory
        raise failed(f"{path} cannot be written: {error}") from error
    typer.echo(f"{path}: {parameters / 1e6:.1f}M parameters, {options.dtype}")


def write_model(path: Path, options: RandomModelOptions) -> int:
    """Write the checkpoint and its tokenizer; return the number of parameters.

    Args:
        path: a directory that does not exist or is empty.

    Raises:
        OSError: the files cannot be written.
        ValueError: `path` is something else.
    """
    from pat_vllm.files.reading import name_of  # slow, for `--help`

    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(
            f"path={name_of(path)} is not an empty directory: remove it or name another"
        )
    weights = Weights(options.gain, options.repeat, seed=options.seed)
    parameters = write_checkpoint(path, options.config, weights)
    save_tokenizer(path, options.vocab, options.max_position_embeddings)
    return parameters
