"""The doctor's random checkpoints, by transformers' classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from pat_vllm.doctor.models import SHAPES, Weights, write_checkpoint


@pytest.mark.parametrize("shape", [name for name in SHAPES if name != "large"])
def test_a_checkpoint_of_each_shape(shape: str, tmp_path: Path) -> None:
    """For three ranks, which none of the shapes is made for."""
    config = SHAPES[shape].config_for(3) | {"dtype": "bfloat16"}

    def weights_of(name: str, **like: Any) -> dict[str, Any]:
        parameters = write_checkpoint(tmp_path / name, config, Weights(**like))
        weights = load_file(tmp_path / name / "model.safetensors")
        assert parameters == sum(weight.numel() for weight in weights.values())
        return weights

    first, again, other = weights_of("first"), weights_of("again"), weights_of("other", seed=1)
    assert first.keys() == again.keys() == other.keys()
    assert all(weight.equal(again[name]) for name, weight in first.items())
    # How an MTP module joins its inputs is not drawn.
    same = {name for name, weight in first.items() if weight.equal(other[name])}
    joins = ("input_proj", "token_layernorm", "hidden_layernorm", "final_layernorm")
    assert same == {f"model.mtp_layers.0.{name}.weight" for name in joins if shape == "mtp"}


def test_a_phrase_takes_channels_that_no_layer_writes(tmp_path: Path) -> None:
    """Each of its tokens calls for the next, the last for the first."""
    config = SHAPES["dense"].config_for(2) | {"dtype": "float32"}
    write_checkpoint(tmp_path, config, Weights(repeat=1.2, phrase=4))
    weights = load_file(tmp_path / "model.safetensors")
    head, embedding = weights["lm_head.weight"][:, :4], weights["model.embed_tokens.weight"][:, :4]
    assert [(head @ embedding[token]).argmax().item() for token in (3, 4, 6)] == [4, 5, 3]
    written = [name for name in weights if name.endswith(("o_proj.weight", "down_proj.weight"))]
    assert len(written) == 6 and not any(weights[name][:4].any() for name in written)
