"""The policy: a Qwen3 of 4M parameters and its tokenizer, and its training on solutions."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.rollouts.arithmetic import problem, solution
from pat_vllm.cli.random_config import ARCHS
from pat_vllm.cli.random_tokenizer import CHAT_TEMPLATE, SPECIAL_TOKENS

if TYPE_CHECKING:
    import torch

SHAPE: dict[str, Any] = dict(
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=4,
    head_dim=64,
    intermediate_size=768,
    max_position_embeddings=2048,
    tie_word_embeddings=True,
)
MOST_VOCAB = 1024
TOKENIZER_DOCUMENTS = 2000
BATCH_TOKENS = 4096
"""Of a step of the optimizer, padding included."""
POOL_DOCUMENTS = 1024
"""Documents that are sorted by length, so that a batch has little padding."""
LEARNING_RATE = 3e-3
WARM_UP_STEPS = 30
COOL_DOWN_SHARE = 0.35
"""Of the training, at the end, in which the learning rate falls to zero."""

Row = tuple[list[int], list[int]]
"""Token ids of a prompt and of its response, with the token that ends it."""


def make_tokenizer(seed: int) -> Any:
    """Byte-level BPE within words, learnt from solutions; a digit is a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bos, eos, pad = SPECIAL_TOKENS
    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    core.decoder = decoders.ByteLevel()
    rng = random.Random(f"tokenizer/{seed}")
    core.train_from_iterator(
        (f"{one.text} {solution(rng, one)}" for one in _problems(rng, TOKENIZER_DOCUMENTS)),
        trainers.BpeTrainer(
            vocab_size=MOST_VOCAB,
            special_tokens=list(SPECIAL_TOKENS),
            initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token=bos,
        eos_token=eos,
        pad_token=pad,
        chat_template=CHAT_TEMPLATE,
        model_max_length=SHAPE["max_position_embeddings"],
        clean_up_tokenization_spaces=False,
    )


def prompt_ids(tokenizer: Any, text: str) -> list[int]:
    """A question as the policy sees it."""
    return [tokenizer.bos_token_id, *tokenizer.encode(f"{text}\n")]


def pretrain(path: Path, budget: int, seed: int, threads: int) -> None:
    """Train a policy on solutions and write it.

    Args:
        path: a directory to write.
        budget: tokens, of prompts and solutions; no solution is seen twice.
        threads: of torch.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(seed)
    bos, eos, pad = range(len(SPECIAL_TOKENS))
    config = Qwen3Config(
        architectures=[ARCHS["qwen3"]],
        vocab_size=len(tokenizer),
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        **SHAPE,
    )
    model = Qwen3ForCausalLM(config).train()
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f}M parameters", flush=True)
    inside = [p for p in model.model.layers.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not one for one in inside)]
    optimizers = (
        torch.optim.Muon(inside, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0),
    )
    began, tokens = time.monotonic(), 0
    for step, batch in enumerate(_batches(tokenizer, random.Random(f"pretrain/{seed}"))):
        if tokens >= budget:
            break
        left = (1 - tokens / budget) / COOL_DOWN_SHARE
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS, left)
        with torch.autocast("cpu", torch.bfloat16):
            logits, targets, _ = of_responses(model, batch)
            loss = torch.nn.functional.cross_entropy(logits.float(), targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        tokens += sum(len(prompt) + len(response) for prompt, response in batch)
        if step % 20 == 0:
            seconds = time.monotonic() - began
            print(f"step {step}, {tokens} tokens, {seconds:.0f} s, loss {loss:.4f}", flush=True)
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def of_responses(
    model: Any, rows: Sequence[Row]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The model's logits at the tokens of responses.

    Returns:
        Logits `[tokens, vocab]`, the tokens `[tokens]`, and the row of each `[tokens]`.
    """
    import torch

    ids, mask = padded(rows)
    hidden = model.model(input_ids=torch.from_numpy(ids[:, :-1])).last_hidden_state
    chosen = torch.from_numpy(mask[:, 1:])
    targets = torch.from_numpy(ids[:, 1:])[chosen]
    return model.lm_head(hidden[chosen]), targets, chosen.nonzero()[:, 0]


def padded(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
    """Token ids `[rows, longest]`, padded on the right, and which of them are of a response."""
    longest = max(len(prompt) + len(response) for prompt, response in rows)
    ids = np.full((len(rows), longest), SPECIAL_TOKENS.index("<pad>"), np.int64)
    mask = np.zeros(ids.shape, bool)
    for i, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        ids[i, :end] = [*prompt, *response]
        mask[i, len(prompt) : end] = True
    return ids, mask


def by_length(rows: Sequence[Row], tokens: int) -> list[list[int]]:
    """Indices of rows of similar length, in batches of about `tokens` with padding."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i][0]) + len(rows[i][1]))
    batches: list[list[int]] = [[]]
    for i in order:
        length = len(rows[i][0]) + len(rows[i][1])
        if batches[-1] and length * (len(batches[-1]) + 1) > tokens:
            batches.append([])
        batches[-1].append(i)
    return batches


def _batches(tokenizer: Any, rng: random.Random) -> Iterator[list[Row]]:
    longest = SHAPE["max_position_embeddings"]
    while True:
        rows = [
            (
                prompt_ids(tokenizer, one.text),
                [*tokenizer.encode(solution(rng, one)), tokenizer.eos_token_id],
            )
            for one in _problems(rng, POOL_DOCUMENTS)
        ]
        rows = [(prompt, response) for prompt, response in rows if len(prompt + response) < longest]
        batches = by_length(rows, BATCH_TOKENS)
        rng.shuffle(batches)
        for batch in batches:
            yield [rows[i] for i in batch]


def _problems(rng: random.Random, count: int) -> Iterator[Any]:
    return (problem(rng) for _ in range(count))
