"""The random checkpoints are what the engine tests take them for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from pat_vllm.cli import app
from pat_vllm.cli.random_model import make_model
from tests.models import SPECS, random_model

TEXTS = ["The answer is 42.", "  two  spaces,\ttabs\nand lines", "naïve façade: 東京 🙂", ""]


def greedy(model: Any, prompt: list[int], steps: int) -> tuple[list[int], list[float]]:
    """Tokens and, at each step, the gap between the best and the second best logit."""
    tokens, gaps = list(prompt), []
    with torch.no_grad():
        for _ in range(steps):
            top = model(torch.tensor([tokens])).logits[0, -1].topk(2)
            tokens.append(int(top.indices[0]))
            gaps.append(float(top.values[0] - top.values[1]))
    return tokens[len(prompt) :], gaps


@pytest.mark.parametrize("name", SPECS)
def test_shapes_are_those_of_the_spec(name: str) -> None:
    spec = SPECS[name]
    model = AutoModelForCausalLM.from_pretrained(random_model(name))
    config, attention = model.config, model.model.layers[0].self_attn

    assert config.model_type == spec["arch"]
    assert config.architectures == [type(model).__name__]
    assert model.dtype == torch.float32
    assert len(model.model.layers) == 3
    assert config.vocab_size == spec.get("vocab", 512) == model.lm_head.out_features
    assert config.max_position_embeddings == 2048
    assert attention.q_proj.weight.shape == (spec["heads"] * 32, spec["hidden"])
    assert attention.k_proj.weight.shape == (spec["kv_heads"] * 32, spec["hidden"])
    assert (attention.q_proj.bias is not None) == (spec["arch"] == "qwen2")
    assert hasattr(attention, "q_norm") == (spec["arch"] == "qwen3")
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tied == (name == "qwen3_tied")


@pytest.mark.parametrize("name", SPECS)
def test_checkpoint_has_every_weight_and_no_other(name: str) -> None:
    _, info = AutoModelForCausalLM.from_pretrained(random_model(name), output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.parametrize("name", SPECS)
def test_greedy_text_varies_and_is_not_decided_by_rounding(name: str) -> None:
    path = random_model(name)
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    one, gaps = greedy(model, tokenizer.encode("Write a short story about a river."), 48)
    other, _ = greedy(model, tokenizer.encode("Explain why the sky is blue."), 48)

    assert len(set(one)) > 12, one
    # Different contexts lead to different continuations, not to one common loop.
    assert sum(a != b for a, b in zip(one, other, strict=True)) > 36, (one, other)
    # Tensor-parallel layouts agree to about 1e-5; see the gap against that.
    assert min(gaps) > 1e-3, min(gaps)


def test_last_token_depends_on_the_first() -> None:
    # A KV cache that lost old tokens must not go unnoticed.
    for name in SPECS:
        model = AutoModelForCausalLM.from_pretrained(random_model(name))
        tokens = torch.arange(3, 259).repeat(2, 1)
        tokens[1, 0] = 300
        with torch.no_grad():
            a, b = model(tokens).logits[:, -1]
        assert (a - b).abs().max() > 1e-3, name


@pytest.mark.parametrize("name", ["qwen3", "llama_few_kv"])
def test_tokenizer(name: str) -> None:
    tokenizer = AutoTokenizer.from_pretrained(random_model(name))
    size = SPECS[name].get("vocab", 512)
    assert len(tokenizer) == size
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert all(tokenizer.decode([token]) for token in range(size))
    special = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id)
    assert special == (0, 1, 2)
    assert tokenizer.decode([0, 1, 2], skip_special_tokens=True) == ""
    # Merges are in use.
    assert len(tokenizer.encode("the number of apples")) < 12


def test_chat_template() -> None:
    tokenizer = AutoTokenizer.from_pretrained(random_model("qwen3"))
    chat = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<bos>user: Hello\nassistant:"


def test_two_builds_are_equal_and_seeds_differ(tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_model(tmp_path / name, seed=seed)
    files = {file.name for file in (tmp_path / "a").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    a, c = (load_file(tmp_path / name / "model.safetensors") for name in "ac")
    assert not any(torch.equal(a[name], c[name]) for name in a)


def test_models_are_cached_and_leave_no_scratch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAT_TEST_MODELS", str(tmp_path))
    first = random_model("qwen3")
    stamp = (first / "config.json").stat().st_mtime_ns
    assert random_model("qwen3") == first
    assert (first / "config.json").stat().st_mtime_ns == stamp
    assert list(tmp_path.iterdir()) == [first]
    with pytest.raises(ValueError, match="llama_gqa"):
        random_model("gpt")


def test_large_vocabulary_decodes_everywhere(tmp_path: Path) -> None:
    make_model(tmp_path, layers=1, vocab=4096, dtype="bfloat16", max_position_embeddings=512)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    assert len(tokenizer) == 4096
    assert tokenizer.decode([4000, 4095]) == " w4000 w4095"
    assert max(tokenizer.encode(" w4000 w4095")) < 512
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.bfloat16
    assert model.config.max_position_embeddings == 512


@pytest.mark.parametrize(
    "wrong",
    [
        dict(arch="bert"),
        dict(dtype="int8"),
        dict(vocab=258),
        dict(heads=8, kv_heads=3),
        dict(arch="qwen2", hidden=100),
    ],
)
def test_wrong_arguments_are_refused(tmp_path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(reversed(wrong))):
        make_model(tmp_path / "model", **wrong)
    assert not (tmp_path / "model").exists()


def test_command_line(tmp_path: Path) -> None:
    path = tmp_path / "model"
    done = CliRunner().invoke(app, ["random-model", str(path), "--layers", "1", "--hidden", "64"])
    assert done.exit_code == 0, done.output
    assert AutoModelForCausalLM.from_pretrained(path).config.hidden_size == 64

    again = CliRunner().invoke(app, ["random-model", str(path)])
    assert again.exit_code == 2
    assert "empty directory" in again.output
