"""What a checkpoint's `config.json` says without vLLM and transformers: sizes, a refusal in an
engine's words, or what it leaves out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from pat_vllm.models.checkpoint import named_config
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.model_rules import quantization_of
from tests.support.published import REFUSED, SIZES

LLAMA = {**MODEL_SHAPES["llama-3.1-8b"], "architectures": ["LlamaForCausalLM"]}


def written(folder: Path, config: dict[str, Any]) -> str:
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@pytest.mark.parametrize("name", REFUSED)
def test_what_an_engine_refuses_is_refused_in_its_words(name: str, tmp_path: Path) -> None:
    words, config = REFUSED[name]
    model = written(tmp_path, config)
    with pytest.raises(ValueError) as error:
        named_config(model)
    said = str(error.value)
    assert said.startswith('distributed_executor_backend="pat" does not support ') and words in said


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "runner='pooling' (allowed: gen"),
        ({"architectures": ["T5Model"]}, "runner='pooling'"),
        ({"is_encoder_decoder": True}, "(an encoder-decoder model)"),
        ({"index_topk": 2048}, "(a model with sparse attention)"),
        ({"architectures": ["MambaForCausalLM"], "state_size": 16}, "(a hybrid or Mamba model"),
        ({"architectures": ["X"], "layer_types": ["full_attention", "conv"]}, "(a hybrid or Mamba"),
        ({"architectures": ["X"], "layers_block_type": ["mamba"]}, "(a hybrid or Mamba"),
        ({"architectures": ["X"], "hybrid_override_pattern": "M*"}, "(a hybrid or Mamba"),
        # Heads of linear attention that another class has mean nothing.
        (
            {"linear_num_key_heads": 2, "layer_types": ["linear_attention"]},
            "(a hybrid or Mamba model",
        ),
        ({"num_local_experts": {"a": 8}}, "(a mixture of experts)"),
    ],
)
def test_rules_about_models(fields: dict[str, Any], words: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        named_config(written(tmp_path, {**LLAMA, **fields}))
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"quantization_config": None}, None),
        ({"quantization_config": {"quant_method": "AWQ"}}, "awq"),
        ({"compression_config": {"quant_method": "compressed_tensors"}}, "compressed-tensors"),
        ({"text_config": {"quantization_config": {"quant_method": "fp8"}}}, "fp8"),
        ({"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}, "gpt_oss_"),
        ({"quantization_config": {"quantization": {"quant_algo": "NVFP4"}}}, "modelopt_fp4"),
        ({"quantization_config": "int4"}, "int4"),
    ],
)
def test_quantization_is_named_as_vllm_does(config: dict[str, Any], expected: str | None) -> None:
    found = quantization_of(config)
    assert found is None if expected is None else found.startswith(expected)


def test_what_lies_beside_a_config_counts(tmp_path: Path) -> None:
    """ModelOpt's description of quantized weights, and Sentence Transformers' list of modules."""
    model = written(tmp_path, LLAMA)
    assert named_config(model).fields == LLAMA
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text('{"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}')
    with pytest.raises(ValueError, match="quantization='modelopt_fp4'"):
        named_config(model)
    beside.unlink()
    modules = tmp_path / "modules.json"
    modules.write_text('[{"type": "sentence_transformers.models.Transformer"}]')
    named_config(model)
    modules.write_text('[{"type": "sentence_transformers.models.Pooling"}]')
    with pytest.raises(ValueError, match="runner='pooling'"):
        named_config(model)


def test_what_a_file_leaves_out_is_asked_for_where_transformers_cannot_say(tmp_path: Path) -> None:
    """And not guessed. What the file says is enough without transformers, as of Qwen2.5."""
    for name, (_, config) in SIZES.items():
        model = written(tmp_path, config)
        if not name.startswith("gemma"):
            assert named_config(model).fields == config
            continue
        with pytest.raises(
            ValueError, match=r"leaves out vocab_size, .*, layer_types, whose values"
        ):
            named_config(model)
    layers = {"vocab_size": 9, "tie_word_embeddings": True, "layer_types": [], "head_dim": 256}
    _, gemma = SIZES["gemma-3-12b"]
    found = named_config(written(tmp_path, {**gemma, "text_config": gemma["text_config"] | layers}))
    assert found.text_only and found.fields["vocab_size"] == 9


def test_defaults_are_taken_where_somebody_knows_them(tmp_path: Path) -> None:
    model = written(tmp_path, {"architectures": ["LlamaForCausalLM"]})
    assert named_config(model, lambda config: LLAMA).fields == LLAMA
    with pytest.raises(ValueError, match="does not support quantization='awq'"):
        named_config(written(tmp_path, {"quantization_config": {"quant_method": "awq"}}))


def test_an_unknown_class_is_no_answer(tmp_path: Path) -> None:
    model = written(tmp_path, {**LLAMA, "architectures": ["FalconForCausalLM"]})
    with pytest.raises(ValueError, match="the sizes of FalconForCausalLM are not known"):
        named_config(model)
