"""The policy: a Qwen3 of 4M parameters and its tokenizer, and its training on solutions."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.rollouts.arithmetic import Problem, problem, solution
from pat_vllm.cli.random_tokenizer import CHAT_TEMPLATE
from pat_vllm.doctor.models import SPECIAL_TOKENS

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
TOKENS = 2_000_000
"""Of prompts and solutions in the training; no solution is seen twice."""
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
        (f"{task.text} {solution(rng, task)}" for task in _problems(rng, TOKENIZER_DOCUMENTS)),
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


def pretrain(path: Path, seed: int = 0) -> None:
    """Train a policy on solutions, with one thread, and write it to the directory `path`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(seed)
    tokenizer = make_tokenizer(seed)
    bos, eos, pad = range(len(SPECIAL_TOKENS))
    config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        vocab_size=len(tokenizer),
        bos_token_id=bos,
        eos_token_id=eos,
        pad_token_id=pad,
        **SHAPE,
    )
    model = Qwen3ForCausalLM(config).train()
    batches = _batches(tokenizer, random.Random(f"pretrain/{seed}"))
    optimize(
        model,
        [*model.model.layers.parameters()],
        ((sum(len(a + b) for a, b in batch), partial(_loss, model, batch)) for batch in batches),
        TOKENS,
    )
    model.save_pretrained(path)
    tokenizer.save_pretrained(path)


def optimize(
    model: Any,
    of_layers: Sequence[Any],
    batches: Iterable[tuple[int, Callable[[], Any]]],
    tokens: int,
) -> None:
    """Train a model.

    Args:
        of_layers: parameters of its layers, whose matrices get Muon, which computes in bfloat16.
        batches: tokens of each, and what computes its loss.
        tokens: after so many it ends.
    """
    import torch

    inside = [p for p in of_layers if p.dim() == 2]
    others = [p for p in model.parameters() if all(p is not inner for inner in inside)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0)
    ]
    if inside:
        muon = torch.optim.Muon(inside, weight_decay=0.05, adjust_lr_fn="match_rms_adamw")
        optimizers.append(muon)
    seen = 0
    for step, (of_batch, loss_of) in enumerate(batches):
        if seen >= tokens:
            break
        left = (1 - seen / tokens) / COOL_DOWN_SHARE
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP_STEPS, left)
        loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        seen += of_batch
        if step % 20 == 0:
            print(f"training: {seen} of {tokens} tokens, loss {loss:.4f}", flush=True)


def _loss(model: Any, rows: Sequence[Row]) -> Any:
    """Mean cross-entropy of the responses' tokens."""
    import torch

    longest = max(len(prompt) + len(response) for prompt, response in rows)
    ids = np.full((len(rows), longest), SPECIAL_TOKENS.index("<pad>"), np.int64)
    of_response = np.zeros(ids.shape, bool)
    for i, (prompt, response) in enumerate(rows):
        end = len(prompt) + len(response)
        ids[i, :end] = [*prompt, *response]
        of_response[i, len(prompt) : end] = True
    chosen = torch.from_numpy(of_response[:, 1:])
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(input_ids=torch.from_numpy(ids[:, :-1])).last_hidden_state
        logits = model.lm_head(hidden[chosen])
        return torch.nn.functional.cross_entropy(
            logits.float(), torch.from_numpy(ids[:, 1:])[chosen]
        )


def _batches(tokenizer: Any, rng: random.Random) -> Iterator[list[Row]]:
    """Rows of similar length, about `BATCH_TOKENS` with padding."""
    longest = SHAPE["max_position_embeddings"]
    while True:
        rows = [
            (
                question_tokens(tokenizer, task),
                [*tokenizer.encode(solution(rng, task)), tokenizer.eos_token_id],
            )
            for task in _problems(rng, POOL_DOCUMENTS)
        ]
        rows = [(prompt, response) for prompt, response in rows if len(prompt + response) < longest]
        batches: list[list[Row]] = [[]]
        for row in sorted(rows, key=lambda row: len(row[0] + row[1])):
            if batches[-1] and len(row[0] + row[1]) * (len(batches[-1]) + 1) > BATCH_TOKENS:
                batches.append([])
            batches[-1].append(row)
        rng.shuffle(batches)
        yield from batches


def question_tokens(tokenizer: Any, task: Problem) -> list[int]:
    """A question as the policy sees it."""
    return [tokenizer.bos_token_id, *tokenizer.encode(f"{task.text}\n")]


def _problems(rng: random.Random, count: int) -> Iterator[Problem]:
    return (problem(rng) for _ in range(count))
