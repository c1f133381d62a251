"""The random checkpoints are what the engine tests take them for."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from pat_vllm.cli import app
from pat_vllm.cli import random_model as builder
from pat_vllm.cli.random_model import make_model
from tests.models import REPEATING, SPECS, phrase, random_model
from tests.support import ngram
from tests.support.mutation import mutated

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
    assert len(model.model.layers) == spec.get("layers", 3)
    assert config.vocab_size == spec.get("vocab", 512) == model.lm_head.out_features
    assert config.max_position_embeddings == spec.get("max_position_embeddings", 2048)
    assert attention.q_proj.weight.shape == (spec["heads"] * 32, spec["hidden"])
    assert attention.k_proj.weight.shape == (spec["kv_heads"] * 32, spec["hidden"])
    assert (attention.q_proj.bias is not None) == spec["arch"].startswith("qwen2")
    assert hasattr(attention, "q_norm") == (spec["arch"] in ("qwen3", "qwen3_moe", "olmoe"))
    tied = model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert tied == (name == "qwen3_tied")


@pytest.mark.parametrize("name", SPECS)
def test_checkpoint_has_every_weight_and_no_other(name: str) -> None:
    _, info = AutoModelForCausalLM.from_pretrained(random_model(name), output_loading_info=True)
    assert not any(info.values()), info


@pytest.mark.parametrize("name", [name for name in SPECS if name not in REPEATING])
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
    for name, spec in SPECS.items():
        model = AutoModelForCausalLM.from_pretrained(random_model(name))
        vocab = spec.get("vocab", 512)
        tokens = torch.arange(3, 259).repeat(2, 1) % vocab
        tokens[1, 0] = 300 % vocab
        with torch.no_grad():
            a, b = model(tokens).logits[:, -1]
        assert (a - b).abs().max() > 1e-3, name


@pytest.mark.slow
def test_drafts_are_vllms() -> None:
    from vllm.v1.spec_decode import ngram_proposer

    numbers = random.Random(0)
    drafted = 0
    for _ in range(2000):
        tokens = numbers.choices(range(3), k=numbers.randint(1, 24))
        shortest = numbers.randint(1, 3)
        longest, k = numbers.randint(shortest, 4), numbers.randint(1, 4)
        expected = ngram_proposer._find_longest_matched_ngram_and_propose_tokens.py_func(
            np.array(tokens), shortest, longest, 1000, k
        ).tolist()
        assert ngram.propose(tokens, shortest, longest, k) == expected, (tokens, shortest, longest)
        drafted += len(expected)
    assert drafted > 2000


def check_drafts_are_accepted_and_refused(path: Path, vocab: int) -> None:
    """Among 16 prompts of random tokens, none is always right or always wrong."""
    model = AutoModelForCausalLM.from_pretrained(path)
    generator = torch.Generator().manual_seed(5)
    prompts = torch.randint(3, vocab, (16, 24), generator=generator).tolist()
    for seed in (None, 1):
        outputs = ngram.generate(model, prompts, 200, seed)
        shares = ngram.acceptance(zip(prompts, outputs, strict=True), 2, 4, 4)
        assert min(shares) > 0.2, shares
        assert max(shares) < 0.9, shares
        assert 0.4 < sum(shares) / 16 < 0.7, shares
        # No text ends in a loop.
        assert min(len(set(output[-100:])) for output in outputs) > 16


# What a mixture's router prefers makes some prompts better guessed than others.
@pytest.mark.parametrize(
    "name", [name for name in REPEATING if name not in ("vocab16", "repeating_moe")]
)
def test_a_repeating_models_drafts_are_accepted_and_refused(name: str) -> None:
    check_drafts_are_accepted_and_refused(random_model(name), SPECS[name].get("vocab", 512))


@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({"weight[:phrase] = 0": "pass"}, id="layers write over the phrase"),
        pytest.param({"ids[:phrase] + 1": "ids[:phrase]"}, id="a token calls for itself"),
    ],
)
def test_a_phrase_that_is_not_written_is_seen(tmp_path: Path, changes: dict[str, str]) -> None:
    with mutated(builder._repeat, changes):
        make_model(tmp_path, **SPECS["repeating"])
    with pytest.raises(AssertionError):
        check_drafts_are_accepted_and_refused(tmp_path, 512)


@pytest.mark.parametrize("k", [2, 3])
@pytest.mark.parametrize("shortest", [1, 2])
def test_sampled_drafts_of_a_few_tokens_are_accepted_and_refused(k: int, shortest: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(random_model("vocab16"))
    prompts = [phrase("vocab16", 16, start) for start in range(8)] * 25
    for steps in (4, 16, 48):
        outputs = ngram.generate(model, prompts, steps, seed=1)
        counts = [
            ngram.drafts(*text, shortest, 4, k) for text in zip(prompts, outputs, strict=True)
        ]
        drafted, accepted = map(sum, zip(*counts, strict=True))
        assert 0.35 < accepted / drafted < 0.65, (steps, accepted / drafted)


def test_law_is_that_of_sampled_text() -> None:
    model = AutoModelForCausalLM.from_pretrained(random_model("vocab16"))
    prompt = phrase("vocab16", 16)
    laws = ngram.law(model.double(), prompt, 4)
    assert torch.allclose(laws.sum(1), torch.ones(4, dtype=laws.dtype))
    draws = torch.tensor(ngram.generate(model.float(), [prompt] * 4000, 4, seed=1))
    for tokens, law in zip(draws.T, laws, strict=True):
        expected = law * len(tokens)
        kept = expected > 5
        seen = tokens.bincount(minlength=16)
        # Its 15 degrees of freedom at most make more than 37.7 once in a thousand times.
        assert float(((seen - expected) ** 2 / expected)[kept].sum()) < 37.7
        # The tokens differ, and no position is like the one before.
        assert law.max() < 0.6
    assert (laws[1:] - laws[:-1]).abs().sum(1).min() > 0.2


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


def test_tokenizer_of_a_few_words() -> None:
    tokenizer = AutoTokenizer.from_pretrained(random_model("vocab16"))
    assert len(tokenizer) == 16
    assert tokenizer.encode("w3 w15 else") == [3, 15, 2]
    assert tokenizer.decode([0, 3, 15, 1]) == "<bos> w3 w15 <eos>"
    assert tokenizer.decode([0, 3, 15, 1], skip_special_tokens=True) == "w3 w15"


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
        dict(vocab=3),
        dict(repeat=-1),
        dict(repeat=1, phrase=1),
        dict(repeat=1, phrase=65),
        dict(repeat=1, vocab=16, phrase=14),
        dict(repeat=1, tie=True),
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
