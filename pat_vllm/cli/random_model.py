"""Random Hugging Face checkpoints with a tokenizer, for tests, the demo and benchmarks.

The weights are noise, but scaled so that generation behaves like a model's: logits are peaked (an
argmax is not decided by rounding) and depend on the whole context. torch, transformers and
tokenizers are imported by the functions, so the command line starts without them.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from transformers import PretrainedConfig

ARCHS = {"qwen3": "Qwen3ForCausalLM", "qwen2": "Qwen2ForCausalLM", "llama": "LlamaForCausalLM"}
DTYPES = ("float32", "bfloat16", "float16")
SPECIAL_TOKENS = ("<bos>", "<eos>", "<pad>")
MIN_VOCAB = 256 + len(SPECIAL_TOKENS)
"""One token for every byte, and the special tokens."""

# A linear weight has standard deviation gain / sqrt(fan_in), so unit-variance input gives output of
# standard deviation gain whatever the width: 0.35 per weight at hidden 128. Initialisation for
# training (0.02) leaves logits so flat that float32 rounding can change an argmax.
GAIN = 4.0
NORM_STD = 0.1
BIAS_STD = 0.5

CHAT_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ message['role'] + ': ' + message['content'] + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)

TOKENIZER_TEXT = """\
In a synchronous step every response of the batch must finish before training can go on. Lengths
are skewed: most responses are short, a few are long, and the long ones run alone at the end.
Many small replicas serve the full batch best, because no layer waits for another device; one wide
group serves the last sequences best, because every device reads only a part of the weights.
The question is therefore not which layout is best, but when to change from one to the next.
Write a short story about a river. What is the sum of 12 and 30? The answer is 42. Explain why the
sky is blue, step by step, and then list three numbers: 1, 2, 3. Let x be the number of apples.
If Anna has three times as many apples as Ben, and together they have 24, how many has each of them?
"""


def make_model(
    path: str | Path,
    *,
    arch: str = "qwen3",
    hidden: int = 128,
    layers: int = 3,
    heads: int = 8,
    kv_heads: int = 4,
    head_dim: int = 32,
    intermediate: int = 256,
    vocab: int = 512,
    dtype: str = "float32",
    max_position_embeddings: int = 2048,
    tie: bool = False,
    gain: float = GAIN,
    seed: int = 0,
) -> int:
    """Write a random checkpoint and its tokenizer to `path`; return the number of parameters.

    The same arguments give the same weights. Takes 10 to 20 s per billion parameters.

    Args:
        path: a directory that does not exist or is empty.
        arch: one of `ARCHS`. "qwen3" normalises queries and keys, "qwen2" has biases on q, k and v.
        head_dim: vLLM's CPU attention supports 32, 64, 80, 96, 112, 128 and some larger ones.
        vocab: at least `MIN_VOCAB`; every id decodes to text.
        dtype: one of `DTYPES`; the weights are drawn in it.
        max_position_embeddings: longest context, tokens.
        tie: whether the output head is the embedding matrix.
        gain: about the standard deviation of the logits. A smaller one than the default makes
            sampling more even, and a logprob less sensitive to rounding.

    Raises:
        ValueError: an argument is not allowed, or `path` is not empty.
    """
    import torch
    from safetensors.torch import save_file
    from transformers import AutoConfig

    path = Path(path)
    _check(path, arch, hidden, heads, kv_heads, head_dim, vocab, dtype)
    bos, eos, pad = range(len(SPECIAL_TOKENS))
    config = AutoConfig.for_model(
        arch,
        architectures=[ARCHS[arch]],  # vLLM picks its model class, and the task, by this name
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate,
        vocab_size=vocab,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie,
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        dtype=dtype,
    )
    weights = dict(_random_weights(config, getattr(torch, dtype), seed, gain))

    path.mkdir(parents=True, exist_ok=True)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    config.save_pretrained(path)
    _save_tokenizer(path, vocab, max_position_embeddings)
    return sum(weight.numel() for weight in weights.values())


def _check(
    path: Path,
    arch: str,
    hidden: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    vocab: int,
    dtype: str,
) -> None:
    """Refuse what `make_model` can't build or vLLM can't load."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise ValueError(f"path={str(path)!r} is not an empty directory: remove it or name another")
    if arch not in ARCHS:
        raise ValueError(f"arch={arch!r} must be one of {', '.join(ARCHS)}")
    if dtype not in DTYPES:
        raise ValueError(f"dtype={dtype!r} must be one of {', '.join(DTYPES)}")
    if vocab < MIN_VOCAB:
        raise ValueError(f"vocab={vocab} must be at least {MIN_VOCAB} (bytes and special tokens)")
    if kv_heads < 1 or heads % kv_heads:
        raise ValueError(f"heads={heads} must be a multiple of kv_heads={kv_heads}")
    if arch == "qwen2" and hidden != heads * head_dim:
        raise ValueError(f"hidden={hidden} must be heads * head_dim = {heads * head_dim} for qwen2")


def _random_weights(
    config: PretrainedConfig, dtype: torch.dtype, seed: int, gain: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield every weight of the checkpoint by its name.

    Each weight has a generator of its own, seeded by its name, so models that differ in one
    respect (tied embeddings, more layers) share all other weights.
    """
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        shapes = AutoModelForCausalLM.from_config(config).state_dict()
    for name, meta in shapes.items():
        if config.tie_word_embeddings and name == "lm_head.weight":
            continue
        digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
        mean, std = _distribution(name, meta.shape, gain)
        weight = torch.empty(meta.shape, dtype=dtype)
        yield name, weight.normal_(mean, std, generator=generator)


def _distribution(name: str, shape: torch.Size, gain: float) -> tuple[float, float]:
    """Mean and standard deviation of one weight; `shape` of a matrix is `[out, in]`."""
    if name.endswith("norm.weight"):
        return 1.0, NORM_STD
    if name.endswith(".bias"):
        return 0.0, BIAS_STD
    return 0.0, gain / math.sqrt(shape[1])


def _save_tokenizer(path: Path, vocab: int, max_length: int) -> None:
    """Write a byte-level BPE tokenizer with exactly `vocab` tokens.

    About 500 tokens are learnt from `TOKENIZER_TEXT`; the rest are words that no merge produces:
    text is never encoded to them, but whatever id the model samples decodes to text.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    def byte_level(model: models.BPE) -> Tokenizer:
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        return tokenizer

    learnt = byte_level(models.BPE())
    learnt.train_from_iterator(
        [TOKENIZER_TEXT],
        trainers.BpeTrainer(
            vocab_size=min(vocab, 512),
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    trained: dict[str, Any] = json.loads(learnt.to_str())["model"]
    ids: dict[str, int] = trained["vocab"]
    # "Ġ" is byte-level BPE's way to write a space.
    ids |= {f"Ġw{index}": index for index in range(len(ids), vocab)}
    tokenizer = byte_level(models.BPE(vocab=ids, merges=[tuple(m) for m in trained["merges"]]))
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))

    bos, eos, pad = SPECIAL_TOKENS
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        chat_template=CHAT_TEMPLATE,
        model_max_length=max_length,
        clean_up_tokenization_spaces=False,
    ).save_pretrained(path)
