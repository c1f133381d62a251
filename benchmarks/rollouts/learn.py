"""GRPO on the arithmetic problems: PAT's engine makes the rollouts, this process trains.

Weights go to the engine after each epoch, as files that its workers load. Nothing else of a
trainer is here: no critic, no reference policy, one policy on one machine.
"""

from __future__ import annotations

import math
import random
import shutil
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.common import Engine, awake, ngram
from benchmarks.paired import turns
from benchmarks.rollouts.arithmetic import Problem, problem
from benchmarks.rollouts.model import Row, by_length, of_responses, prompt_ids
from benchmarks.rollouts.records import Response, Rollouts
from benchmarks.rollouts.reward import graded

if TYPE_CHECKING:
    import torch

MOST_TOKENS = 1500
"""Of a response."""
MINIBATCHES = 4
"""Steps of the optimizer in an epoch."""
BATCH_TOKENS = 8192
CLIP_LOW, CLIP_HIGH = 0.2, 0.28
LEARNING_RATE = 2e-4


HISTORY = "PAT"
STATIC_DRAFTS = 4
SIDES: dict[str, tuple[dict[str, Any], int | None]] = {
    HISTORY: ({}, None),
    "PAT, n-gram": ({"draft_history_bytes": 0}, None),
    **{
        f"tp={tp}, n-gram of {STATIC_DRAFTS}": (
            {"draft_history_bytes": 0, "policy": {"kind": "static", "tp": tp}},
            STATIC_DRAFTS,
        )
        for tp in (1, 2)
    },
}
"""PAT's options, and the draft tokens of each step; None: as the policy plans."""


@dataclass(frozen=True)
class Rollout:
    """What a rollout was like.

    Attributes:
        tokens: of all responses, but the first ones, which prefill makes.
        drafted, accepted: draft tokens that were verified, and of them accepted.
        switches: of the layout.
    """

    seconds: float
    tokens: int
    drafted: int
    accepted: int
    switches: int

    @property
    def tokens_per_step(self) -> float:
        """Of a response."""
        return self.tokens / (self.tokens - self.accepted)


@dataclass(frozen=True)
class Epoch:
    """What an epoch was like: its rollout by side, and the seconds of training."""

    rollouts: dict[str, Rollout]
    training: float


def learn(
    model: Path,
    scratch: Path,
    epochs: int,
    prompts: int,
    samples: int,
    seed: int,
    drafts: int,
    threads: int,
    output: Path,
    sides: Sequence[str] = (HISTORY,),
) -> tuple[Rollouts, list[Epoch]]:
    """Let the policy learn.

    Args:
        model: the pretrained policy.
        scratch: where its weights lie while it learns.
        drafts: the most draft tokens of a step.
        threads: of torch, for training.
        output: where the rollouts are kept; written after each epoch.
        sides: of `SIDES`; the policy learns from the rollouts of the first.
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(threads)
    shutil.copytree(model, scratch, dirs_exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(model)
    policy = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(policy.parameters(), LEARNING_RATE, (0.9, 0.95), weight_decay=0.0)
    rng = random.Random(f"learn/{seed}")
    problems = [problem(rng) for _ in range(prompts)]
    questions = [prompt_ids(tokenizer, one.text) for one in problems]
    done: list[Response] = []
    shown: list[Epoch] = []
    requests = prompts * samples
    with ExitStack() as stack:
        engines = {}
        for side in sides:
            pat, asked = SIDES[side]
            options = engine_options(scratch, requests, drafts, kv_bytes=768 << 20, pat=pat)
            engine = stack.enter_context(Engine(options, bind="0|1", plain=True))
            engine.wait_until_ready()
            engine.pause()
            engines[side] = engine, asked
        for epoch, order in enumerate(turns(sides, epochs)):
            found: dict[str, Rollout] = {}
            for side in order:
                engine, asked = engines[side]
                with awake([engine]):
                    answers, found[side] = engine.call(
                        roll_out, str(scratch), questions, samples, asked, MOST_TOKENS
                    )
                if side == sides[0]:
                    made = answers
                print(epoch, side, found[side], flush=True)
            began = time.monotonic()
            rows = [(questions[one.question], one.tokens) for one in made]
            logs, max_p, entropy = _statistics(policy, rows)
            new = responses_of(made, epoch, problems, tokenizer, max_p, entropy)
            done += new
            rewards = [one.reward for one in new]
            gains = advantages([one.question for one in made], rewards)
            _train(policy, optimizer, rows, gains, logs, rng)
            policy.save_pretrained(scratch)
            kept = Rollouts([np.array(ids, np.int32) for ids in questions], done)
            kept.save(output)
            shown.append(Epoch(found, time.monotonic() - began))
            print(f"reward {np.mean(rewards):.3f}", flush=True)
    return kept, shown


def responses_of(
    made: Sequence[Made],
    epoch: int,
    problems: Sequence[Problem],
    tokenizer: Any,
    max_p: Sequence[float],
    entropy: Sequence[float],
) -> list[Response]:
    """What is kept of an epoch's rollout, graded.

    Args:
        problems: that were asked, by question.
        max_p, entropy: of each response.
    """
    return [
        Response(
            one.question,
            epoch,
            np.array(one.tokens, np.int32),
            one.seconds,
            float(graded(tokenizer.decode(one.tokens)) == problems[one.question].answer),
            most,
            nats,
        )
        for one, most, nats in zip(made, max_p, entropy, strict=True)
    ]


def advantages(groups: Sequence[int], rewards: Sequence[float]) -> np.ndarray:
    """GRPO's: each reward less its group's mean, over its standard deviation."""
    of, values = np.array(groups), np.array(rewards)
    gains = np.zeros(len(values))
    for group in set(groups):
        one = of == group
        gains[one] = (values[one] - values[one].mean()) / (values[one].std() + 1e-4)
    return gains


# -------------------------------------------------------------------- the engine


def engine_options(
    model: Path, requests: int, drafts: int, kv_bytes: int, pat: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Of `LLM`.

    Args:
        drafts: n-gram draft tokens; 0 is none.
        kv_bytes: of each rank.
        pat: further options of PAT's.
    """
    options = dict(
        model=str(model),
        tensor_parallel_size=2,
        distributed_executor_backend="pat",
        additional_config={"pat": {"weights": "inplace", **(pat or {})}},
        worker_extension_cls="benchmarks.rollouts.worker.Reloading",
        dtype="float32",
        enforce_eager=True,
        max_model_len=2048,
        max_num_seqs=requests,
        kv_cache_memory_bytes=kv_bytes,
    )
    return options | (ngram(drafts) if drafts else {})


@dataclass(frozen=True)
class Made:
    """A response as the engine gave it; seconds since the beginning of the rollout.

    Attributes:
        max_p: mean of the greatest probability; nan if it was not asked for.
    """

    question: int
    tokens: list[int]
    seconds: float
    max_p: float


def roll_out(
    llm: Any,
    weights: str | None,
    questions: list[list[int]],
    samples: int,
    drafts: int | None,
    most_tokens: int,
    salts: Sequence[str] | None = None,
    certainty: bool = False,
) -> tuple[list[Made], Rollout]:
    """In the engine's process: take new weights, and answer each question `samples` times.

    Args:
        weights: directory of a checkpoint, or None for those that the engine has.
        drafts: draft tokens of a request and step; None: as the policy plans.
        most_tokens: of a response.
        salts: vLLM's `cache_salt` of each sample.
        certainty: whether to note the greatest probability at each token.

    Returns:
        The responses, and what the rollout was like.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    import pat_vllm

    if weights is not None:
        llm.collective_rpc("load_checkpoint", args=(weights,))
        llm.reset_prefix_cache()
    if drafts is not None:
        pat_vllm.speculate(llm, drafts)
    params = SamplingParams(
        temperature=1.0,
        max_tokens=most_tokens,
        logprobs=1 if certainty else None,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    engine = llm.llm_engine
    began = time.monotonic()
    for i, question in enumerate(questions):
        for sample in range(samples):
            salt = {} if salts is None else {"cache_salt": salts[sample]}
            prompt = {"prompt_token_ids": question, **salt}
            engine.add_request(f"{began}/{i}/{sample}", prompt, params)
    made: dict[str, Made] = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            (completion,) = output.outputs
            most = [max(one.logprob for one in at.values()) for at in completion.logprobs or ()]
            made[output.request_id] = Made(
                int(output.request_id.split("/")[1]),
                list(completion.token_ids),
                time.monotonic() - began,
                float(np.mean(np.exp(most))) if most else math.nan,
            )
    seconds = time.monotonic() - began
    report = pat_vllm.report(llm)
    recent = [one for one in report.drafts if one.at >= began]
    answers = [made[name] for name in sorted(made)]
    return answers, Rollout(
        seconds,
        sum(len(one.tokens) - 1 for one in answers),
        sum(one.drafted for one in recent),
        sum(one.accepted for one in recent),
        sum(one.at >= began and one.reason != "idle" for one in report.switches),
    )


# -------------------------------------------------------------------- training


def _statistics(
    policy: Any, rows: Sequence[Row]
) -> tuple[list[torch.Tensor], list[float], list[float]]:
    """Of each response: log-probabilities of tokens, mean greatest probability, mean entropy."""
    import torch

    logs: list[Any] = [None] * len(rows)
    max_p, entropy = [0.0] * len(rows), [0.0] * len(rows)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for batch in by_length(rows, BATCH_TOKENS):
            logits, targets, of = of_responses(policy, [rows[i] for i in batch])
            every = logits.float().log_softmax(-1)
            chosen = every.gather(-1, targets[:, None])[:, 0]
            most, nats = every.max(-1).values.exp(), -(every.exp() * every).sum(-1)
            for at, i in enumerate(batch):
                logs[i] = chosen[of == at]
                max_p[i] = float(most[of == at].mean())
                entropy[i] = float(nats[of == at].mean())
    return logs, max_p, entropy


def _train(
    policy: Any,
    optimizer: Any,
    rows: Sequence[Row],
    gains: np.ndarray,
    old: Sequence[torch.Tensor],
    rng: random.Random,
) -> None:
    """An epoch: a clipped policy gradient, normalised by tokens, so that no length is favoured."""
    import torch

    order = rng.sample(range(len(rows)), len(rows))
    for part in np.array_split(order, MINIBATCHES):
        useful = [int(i) for i in part if gains[i]]
        total = sum(len(rows[i][1]) for i in part)
        chosen = [rows[i] for i in useful]
        for batch in by_length(chosen, BATCH_TOKENS) if chosen else ():
            members = [useful[at] for at in batch]
            with torch.autocast("cpu", torch.bfloat16):
                logits, targets, of = of_responses(policy, [rows[i] for i in members])
            new = logits.float().log_softmax(-1).gather(-1, targets[:, None])[:, 0]
            ratio = (new - torch.cat([old[i] for i in members])).exp()
            gain = torch.tensor([gains[i] for i in members], dtype=torch.float32)[of]
            clipped = ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH)
            (-torch.minimum(ratio * gain, clipped * gain).sum() / total).backward()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
