"""What the doctor asks an engine, stock or PAT's: answers, and how likely it finds given ones."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from pat_vllm.doctor.compare import Output
from pat_vllm.doctor.request import Engine, Prompts
from pat_vllm.layout import Layout

if TYPE_CHECKING:
    from vllm import LLM

MAX_TOKENS = 48
"""Tokens that each request generates."""

_CORES = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind").split("|")
"""On CPU, those of each rank."""


def start(engine: Engine) -> LLM:
    """An engine in whose process ranks have cores of their own; vLLM takes no more than ranks."""
    from vllm import LLM

    cores = _CORES[: engine.get("tensor_parallel_size", 1)]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(cores)
    return LLM(**engine)


def generate(
    llm: LLM,
    prompts: Prompts,
    after: Mapping[int, Callable[[], Any]] | None = None,
    likeliest: int = 0,
    beat: Callable[[], None] = lambda: None,
) -> tuple[Output, ...]:
    """Serve the requests, greedily.

    Args:
        after: what to call after so many of the engine's answers; 0: when all was sent.
        likeliest: tokens whose log-probabilities to keep at each position.
        beat: called at each answer of the engine.

    Returns:
        Outputs by request, of `MAX_TOKENS` each.
    """
    from vllm import RequestOutput, SamplingParams, TokensPrompt

    engine = llm.llm_engine
    params = SamplingParams(
        temperature=0.0,
        max_tokens=MAX_TOKENS,
        ignore_eos=True,
        detokenize=False,
        logprobs=likeliest,
    )
    # Or drafts from the responses before would be right, and few answers long.
    salt = secrets.token_hex(8)
    for number, prompt in enumerate(prompts):
        request = TokensPrompt(prompt_token_ids=list(prompt), cache_salt=salt)
        engine.add_request(str(number), request, params)
    if after and 0 in after:
        after[0]()
    outputs: dict[int, Output] = {}
    answers = 0
    while engine.has_unfinished_requests():
        if not (answered := engine.step()):
            continue
        answers += 1
        beat()
        if after and answers in after:
            after[answers]()
        for output in answered:
            if output.finished:
                assert isinstance(output, RequestOutput)
                outputs[int(output.request_id)] = _output_of(output.outputs[0], likeliest)
    return tuple(outputs[number] for number in range(len(prompts)))


def _output_of(completion: Any, likeliest: int) -> Output:
    tokens = tuple(completion.token_ids)
    entries = [
        {t: float(e.logprob) for t, e in position.items()} for position in completion.logprobs
    ]
    logprobs = tuple(entry[token] for entry, token in zip(entries, tokens, strict=True))
    return Output(tokens, logprobs, tuple(entries) if likeliest else ())


def score(llm: LLM, prompts: Prompts, outputs: Sequence[Output]) -> tuple[tuple[float, ...], ...]:
    """Log-probabilities of given outputs, computed as a prompt's, by request."""
    from vllm import SamplingParams, TokensPrompt

    params = SamplingParams(max_tokens=1, prompt_logprobs=0, temperature=0.0, detokenize=False)
    sequences = [[*a, *b.tokens] for a, b in zip(prompts, outputs, strict=True)]
    answers = llm.generate(
        [TokensPrompt(prompt_token_ids=ids) for ids in sequences], params, use_tqdm=False
    )
    scores = []
    for prompt, sequence, answer in zip(prompts, sequences, answers, strict=True):
        entries = (answer.prompt_logprobs or [])[len(prompt) :]
        tokens = sequence[len(prompt) :]
        known = [entry for entry in entries if entry is not None]  # only a first token has none
        scores.append(tuple(e[t].logprob for e, t in zip(known, tokens, strict=True)))
    return tuple(scores)


def switch_to(llm: LLM, layout: Layout) -> None:
    """Switch, or say why not."""
    from pat_vllm.api import report, switch

    if not switch(llm, layout.tp):
        refused = report(llm).refused
        why = refused[-1].why if refused else "?"
        raise RuntimeError(f"the switch to {layout} was refused: {why}")
