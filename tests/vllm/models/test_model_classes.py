"""Sizes of models against transformers' own, and what is refused of them against an engine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from pat_vllm.cli.with_defaults import with_defaults
from pat_vllm.models.checkpoint import named_config
from pat_vllm.models.known_models import MODEL_SHAPES
from pat_vllm.models.layer_sizes import fields_of
from pat_vllm.models.model_classes import MODEL_CLASSES, ModelClass
from pat_vllm.models.model_size import ModelSize
from tests.support.command_line import invoke
from tests.support.published import REFUSED, SIZES
from tests.vllm.start.test_bad_input import inspect_here  # noqa: F401

SMALL: dict[str, Any] = {
    "hidden_size": 768,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_hidden_layers": 8,
    "intermediate_size": 2048,
    "moe_intermediate_size": 512,
    "vocab_size": 4096,
    "tie_word_embeddings": False,
    "sliding_window": 1024,
}
"""Unlike any default."""
MORE: dict[str, dict[str, Any]] = {
    "deepseek_v2": dict(MODEL_SHAPES["deepseek-v2-lite"]),
    "nemotron_h": dict(MODEL_SHAPES["nemotron-nano-9b-v2"]),
    "nemotron": {"num_key_value_heads": 8, "head_dim": 128},
}
"""Where transformers' defaults are no model, or one of another kind."""
VIEWS = {"qwen2_5_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Text models of classes for images: transformers has them with their towers only."""

every_class = pytest.mark.parametrize("known", MODEL_CLASSES, ids=lambda each: each.model_types[0])


def config_of(known: ModelClass, **fields: Any) -> Any:
    from transformers import CONFIG_MAPPING

    kind = known.model_types[0]
    fields = {**MORE.get(kind, {}), **fields}
    fields.pop("model_type", None)
    return CONFIG_MAPPING[VIEWS.get(kind, kind)](**fields)


@every_class
def test_parameters_are_counted_as_transformers_makes_them(known: ModelClass) -> None:
    """All but norms and biases."""
    from transformers import AutoModelForCausalLM

    config = config_of(known)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    size = ModelSize.of({**fields_of(config), "architectures": [known.names[0]]})
    parameters = sum(parameter.numel() for parameter in model.parameters())
    assert size.resident_weights(1) == pytest.approx(parameters, rel=1e-3)


def sizes_of(fields: Any) -> tuple[Any, ...]:
    """All that an answer depends on; without a table of positions."""
    size = ModelSize.of(fields)
    return (
        *(size.resident_weights(tp) for tp in (1, 2, 4)),
        *(size.kv_bytes_per_token(1), size.kv_share(1 << 20), size.state_bytes(1), size.heads),
        *(size.layers, size.attention_layers, size.expert_weights, size.experts),
    )


@every_class
def test_what_a_file_leaves_out_is_known_or_asked_for(known: ModelClass) -> None:
    """Without transformers, a file gives the sizes that it gives with it, or none."""
    kind = known.model_types[0]
    own = known.linear == "mamba2" or "kv_lora_rank" in known.stated
    given = {} if own else SMALL
    stated = {**fields_of(config_of(known, **given)), **given}
    whole = {**stated, "architectures": [known.names[0]], "model_type": kind}
    assert known.left_out(whole) == []
    for name in whole:
        file = {field: value for field, value in whole.items() if field != name}
        if known.left_out(file) or name == "architectures":
            continue
        resolved = with_defaults(file)
        assert resolved is not None
        try:
            alone = sizes_of(file)
        except ValueError:
            continue  # says that it is missing
        assert alone == sizes_of(resolved), name


def test_all_names_are_classes_of_vllm() -> None:
    from vllm.model_executor.models.registry import _VLLM_MODELS

    names = [name for known in MODEL_CLASSES for name in known.names]
    assert len(names) == len(set(names)) and set(names) <= _VLLM_MODELS.keys()


def written(folder: Path, name: str, config: Any) -> str:
    path = folder / name
    path.mkdir()
    (path / "config.json").write_text(json.dumps(config))
    return str(path)


@pytest.mark.parametrize("name", SIZES)
def test_published_sizes(name: str, tmp_path: Path) -> None:
    billions, config = SIZES[name]
    found = named_config(written(tmp_path, name, config), with_defaults)
    size = ModelSize.of(found.fields)
    assert size.resident_weights(1) / 1e9 == pytest.approx(billions, rel=0.015)
    assert (found.with_tower is not None) == ("text_config" in config)
    assert not found.text_only
    windows = {"gemma-3-12b": 40, "gemma-3-27b": 52, "OLMo-3-7B": 24}
    assert size.window_layers == windows.get(name, 0)
    if name == "gemma-3-27b":
        assert (size.head_dim, size.vocab, size.tied) == (128, 262208, True)


def test_the_command_takes_defaults_from_transformers(tmp_path: Path) -> None:
    _, config = SIZES["gemma-3-27b"]
    output = tmp_path / "advice.json"
    code, text = invoke(
        *("advise", "--model", written(tmp_path, "gemma", config), "--gpu", "H200", "--gpus", "2"),
        *("--responses", "8", "--max-tokens", "64", "--output", str(output)),
    )
    assert code == 0, text
    content = json.loads(output.read_text())
    assert content["engines"].endswith("gemma on 2 x H200 (nvlink)")
    assert "language_model_only" not in content["settings"]["LLM"]  # it takes images
    words, config = REFUSED["Granite-4.0-H-Micro"]
    code, text = invoke("advise", "--model", written(tmp_path, "g", config), "--gpu", "H100")
    assert code == 2 and words in text


@pytest.mark.parametrize("fields", [{"hidden_size": "x"}, {"num_hidden_layers": None}])
def test_what_transformers_cannot_read_is_an_error(fields: dict[str, Any], tmp_path: Path) -> None:
    _, config = SIZES["Qwen2.5-7B"]
    model = written(tmp_path, "odd", {**config, **fields})
    with pytest.raises(ValueError, match=r"transformers cannot read|the model's config has no"):
        ModelSize.of(named_config(model, with_defaults).fields)


def engine(model: str, **options: Any) -> dict[str, Any]:
    pat = {"distributed_executor_backend": "pat", "additional_config": {"pat": {}}}
    return {
        "model": model,
        "skip_tokenizer_init": True,
        "tensor_parallel_size": 2,
        **pat,
        **options,
    }


@pytest.mark.parametrize("name", REFUSED)
def test_an_engine_and_advise_refuse_in_the_same_words(name: str, tmp_path: Path) -> None:
    from vllm.engine.arg_utils import EngineArgs

    words, config = REFUSED[name]
    model = written(tmp_path, name, config)
    with pytest.raises(ValueError) as error:
        EngineArgs(**engine(model)).create_engine_config()
    for read in (with_defaults, lambda config: None):
        with pytest.raises(ValueError) as refused:
            named_config(model, read)
        assert words in str(refused.value) and str(refused.value) in str(error.value)


OF_VLLM = """
import json, sys
from vllm.transformers_utils.config import get_config
from pat_vllm.models.layer_sizes import fields_of
print(json.dumps(fields_of(get_config(sys.argv[1], trust_remote_code=False)), default=str))
"""


def test_one_table_for_a_class_whatever_its_model_type_is(tmp_path: Path) -> None:
    """Of Kimi K2, which transformers does not know: as vLLM's config of it.

    vLLM renames the class that it reads the file by. In this process, models of DeepSeek V3 that
    are made later would be saved by that name.
    """
    _, config = SIZES["Kimi-K2-bf16"]
    model = written(tmp_path, "kimi", config)
    ours = named_config(model, with_defaults).fields
    command = [sys.executable, "-c", OF_VLLM, model]
    told = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300).stdout
    vllms = json.loads(told.splitlines()[-1])
    assert vllms["model_type"] == "kimi_k2" and ModelSize.of(ours) == ModelSize.of(vllms)
