"""Random checkpoints: what a spec asks for, with text that tells models and contexts apart."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support import families, ngram
from tests.support.command_line import invoke
from tests.support.models import LATENT, SPECS, random_model
from tests.support.random_models import make_model


@pytest.mark.parametrize("name", SPECS)
def test_a_model_is_as_its_spec_and_looks_back_to_its_first_token(name: str) -> None:
    spec = SPECS[name]
    model, info = AutoModelForCausalLM.from_pretrained(random_model(name), output_loading_info=True)
    assert not any(info.values()), info  # every weight and no other
    config = model.config
    attention = next(module for module in model.modules() if hasattr(module, "o_proj"))
    assert config.model_type == spec["arch"]
    assert str(model.dtype) == f"torch.{spec.get('dtype', 'float32')}"
    vocab = spec.get("vocab", 512)
    assert config.vocab_size == vocab == model.lm_head.out_features
    head_dim = spec.get("head_dim", 32)
    heads, kv_heads = spec["heads"] * head_dim, spec["kv_heads"] * head_dim
    if name in LATENT:
        of_head = head_dim + families.ROPE_DIM, 2 * head_dim
        queries, keys_and_values = (spec["heads"] * width for width in of_head)
        own = attention.q_proj if config.q_lora_rank is None else attention.q_b_proj
        assert own.out_features == queries
        assert attention.kv_b_proj.weight.shape == (keys_and_values, families.KV_RANK)
    elif hasattr(attention, "qkv_proj"):
        assert attention.qkv_proj.weight.shape == (heads + 2 * kv_heads, config.hidden_size)
    else:
        gated = 1 + config.model_type.startswith(("qwen3_next", "qwen3_5"))
        assert attention.q_proj.weight.shape == (gated * heads, config.hidden_size)
        assert attention.k_proj.weight.shape == (kv_heads, config.hidden_size)
    tied = model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert tied == spec.get("tie", False)
    window = getattr(config, "sliding_window", None) or getattr(
        config, "attention_chunk_size", None
    )
    assert window == spec.get("window")

    # A KV cache that lost old tokens must not go unnoticed, nor one that lost the last window's.
    tokens = torch.arange(3, 259).repeat(2, 1) % vocab
    every_layer = "window" in spec and not hasattr(config, "layer_types")
    tokens[1, 256 - spec["window"] if every_layer else 0] = 300 % vocab
    with torch.no_grad():
        a, b = model(tokens).logits[:, -1]
    assert (a - b).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe"])
def test_greedy_text_varies_and_is_not_decided_by_rounding(name: str) -> None:
    path = random_model(name)
    model = AutoModelForCausalLM.from_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    questions = ("Write a short story about a river.", "Explain why the sky is blue.")
    prompt, other_prompt = map(tokenizer.encode, questions)
    (output,), (other,) = (ngram.generate(model, [tokens], 48) for tokens in (prompt, other_prompt))
    assert len(set(output)) > 12, output
    # Different contexts lead to different continuations, not to one common loop.
    assert sum(a != b for a, b in zip(output, other, strict=True)) > 36, (output, other)
    with torch.no_grad():
        logits = model(torch.tensor([prompt + output])).logits[0, len(prompt) - 1 : -1]
    best, second = logits.topk(2).values.T
    # Tensor-parallel layouts agree to about 1e-5; see the gap against that.
    assert (best - second).min() > 1e-3


@pytest.mark.parametrize("name", ["repeating", "repeating_shared"])
def test_a_repeating_models_drafts_are_accepted_and_refused(name: str) -> None:
    """Among 16 prompts of random tokens, none is always right or always wrong."""
    model = AutoModelForCausalLM.from_pretrained(random_model(name))
    generator = torch.Generator().manual_seed(5)
    vocab = SPECS[name].get("vocab", 512)
    prompts = torch.randint(3, vocab, (16, 24), generator=generator).tolist()
    for seed in (None, 1):
        outputs = ngram.generate(model, prompts, 200, seed)
        shares = ngram.acceptance(zip(prompts, outputs, strict=True), 2, 4, 4)
        assert min(shares) > 0.2 and max(shares) < 0.9, shares
        assert 0.4 < sum(shares) / 16 < 0.7, shares
        # No text ends in a loop.
        assert min(len(set(output[-100:])) for output in outputs) > 16


def test_tokenizers() -> None:
    """Of bytes and merges, and of a few words."""
    tokenizer = AutoTokenizer.from_pretrained(random_model("qwen3"))
    assert len(tokenizer) == 512
    for text in ("  two  spaces,\ttabs\nand lines", "naïve façade: 東京 🙂", ""):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.decode([0, 1, 2], skip_special_tokens=True) == ""
    assert len(tokenizer.encode("the number of apples")) < 12, "merges are in use"
    chat = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text == "<bos>user: Hello\nassistant:"

    words = AutoTokenizer.from_pretrained(random_model("vocab16"))
    assert len(words) == 16
    assert words.encode("w3 w15 else") == [3, 15, 2]
    assert words.decode([0, 3, 15, 1], skip_special_tokens=True) == "w3 w15"


def test_two_builds_are_equal_and_seeds_differ(tmp_path: Path) -> None:
    """With a vocabulary beyond the tokens of bytes and merges: all of it decodes."""
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_model(tmp_path / name, layers=1, vocab=4096, dtype="bfloat16", seed=seed)
    files = {file.name for file in (tmp_path / "a").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files
    for file in files:
        assert (tmp_path / "a" / file).read_bytes() == (tmp_path / "b" / file).read_bytes(), file
    a, c = (load_file(tmp_path / name / "model.safetensors") for name in "ac")
    assert not any(torch.equal(a[name], c[name]) for name in a)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert len(tokenizer) == 4096 and tokenizer.decode([4000, 4095]) == " w4000 w4095"


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("--vocab 3", "allowed is 4 to"),
        ("--repeat 1 --vocab 16", "have room for 13"),
        ("--repeat 1 --gain 0", "--gain above 0"),
        ("--experts 1", "at least --experts-per-token"),
        ("--heads 8 --kv-heads 3", "a multiple of --kv-heads"),
        ("--dtype int8", "allowed: float32, bfloat16, float16"),
        ("--layers 1000 --hidden 65536", "billion parameters; at most 20"),
    ],
)
def test_wrong_options_are_refused(wrong: str, words: str, tmp_path: Path) -> None:
    code, text = invoke("random-model", str(tmp_path / "model"), *wrong.split())
    assert code == 2 and words in text
    assert not (tmp_path / "model").exists()


def test_the_command_line_writes_into_an_empty_directory_only(tmp_path: Path) -> None:
    """A dense model, or with --experts a mixture."""
    path = tmp_path / "model"
    small = ("--layers", "1", "--hidden", "64")
    code, text = invoke("random-model", str(path), *small)
    assert code == 0, text
    config = AutoModelForCausalLM.from_pretrained(path).config
    assert config.model_type == "qwen3" and config.hidden_size == 64
    code, text = invoke("random-model", str(path))
    assert code == 2 and "empty directory" in text
    code, text = invoke("random-model", str(tmp_path / "moe"), *small, "--experts", "4")
    assert code == 0, text
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "moe").config
    assert config.model_type == "qwen3_moe" and config.num_experts == 4
