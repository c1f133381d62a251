"""Responses of a pretrained model that does not learn, to the arithmetic problems as questions.

    pat-vllm real-model .models/rollouts/real
    python -m benchmarks.rollouts pretrained

Real text with real ends; that its policy stays the same makes earlier visits worth the most.
"""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

from benchmarks.common import Engine
from benchmarks.rollouts.arithmetic import problem
from benchmarks.rollouts.learn import HISTORY, Epoch, engine_options, responses_of, roll_out
from benchmarks.rollouts.records import Response, Rollouts

MOST_TOKENS = 256
"""Of a response."""
REQUEST = "{} Work it out step by step, and end with 'Answer: ' and the number."


def visits(
    model: Path, epochs: int, prompts: int, samples: int, seed: int, drafts: int
) -> tuple[Rollouts, list[Epoch]]:
    """Have the model answer each question `samples` times, `epochs` times over.

    Returns:
        The rollouts, of which `entropy` is not known, and what each epoch was like.
    """
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    rng = random.Random(f"pretrained/{seed}")
    problems = [problem(rng) for _ in range(prompts)]
    questions = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": REQUEST.format(one.text)}],
            add_generation_prompt=True,
            return_dict=False,
        )
        for one in problems
    ]
    done: list[Response] = []
    shown: list[Epoch] = []
    options = engine_options(model, prompts * samples, drafts, kv_bytes=2 << 30)
    with Engine(options, bind="0|1", plain=True) as engine:
        engine.wait_until_ready()
        for epoch in range(epochs):
            made, rollout = engine.call(
                roll_out, None, questions, samples, drafts or None, MOST_TOKENS, None, True
            )
            shown.append(Epoch({HISTORY: rollout}, 0.0))
            max_p = [one.max_p for one in made]
            unknown = [np.nan] * len(made)
            done += responses_of(made, epoch, problems, tokenizer, max_p, unknown)
            print(shown[-1], flush=True)
    return Rollouts([np.array(ids, np.int32) for ids in questions], done), shown
