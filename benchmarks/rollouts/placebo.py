"""What it costs where drafts promise much and hold little: other prompts' responses as history.

The rows come by `draft_history_file`, under a prompt's key with a `cache_salt` of its own for each
response and repeat, so that no request sees an earlier response to its own prompt.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.common import Engine, awake
from benchmarks.paired import paired_ratio, turns
from benchmarks.record import table
from benchmarks.rollouts.learn import MOST_TOKENS, Rollout, engine_options, roll_out
from benchmarks.rollouts.records import Rollouts
from benchmarks.rollouts.replay import shuffled
from pat_vllm.drafts.corpus import Corpus, key_of
from pat_vllm.drafts.history_file import write_rows

BAR = 1.02
PLACEBO, NONE = "other prompts' responses", "k = 0"


def placebo(model: Path, rollouts: Rollouts, samples: int, drafts: int, repeats: int) -> str:
    """Markdown: time of a token with another prompt's history over that without drafts.

    Args:
        model: the policy as it was after the last epoch.
        samples: responses to each prompt.
        drafts: the most draft tokens.
        repeats: rollouts of each side, after one that warms up.
    """
    questions = [one.tolist() for one in rollouts.prompts]
    others = shuffled(len(questions))
    corpus = Corpus(1 << 40)
    responses = [[one for one in rollouts.responses if one.prompt == i] for i in others]
    salts = [[f"{repeat}/{sample}" for sample in range(samples)] for repeat in range(repeats + 1)]
    for salt in (one for of_repeat in salts for one in of_repeat):
        for question, of_other in zip(questions, responses, strict=True):
            for response in of_other:
                corpus.add(key_of(question, salt), question, response.tokens.tolist())
    made: dict[str, list[Rollout]] = {PLACEBO: [], NONE: []}
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        asked: dict[str, int | None] = {PLACEBO: None, NONE: 0}
        engines: dict[str, Engine] = {}
        for side in asked:  # both write what they keep after a rollout, each to its own
            history = Path(folder, f"{len(engines)}.npz")
            write_rows(history, corpus.items())
            pat = {"draft_history_file": str(history), "draft_history_bytes": 1 << 30}
            requests = len(questions) * samples
            options = engine_options(model, requests, drafts, kv_bytes=768 << 20, pat=pat)
            engines[side] = stack.enter_context(Engine(options, bind="0|1", plain=True))
            engines[side].wait_until_ready()
            engines[side].pause()
        for repeat, order in enumerate(turns(list(engines), repeats + 1)):
            for side in order:
                with awake([engines[side]]):
                    _, rollout = engines[side].call(
                        roll_out, None, questions, samples, asked[side], MOST_TOKENS, salts[repeat]
                    )
                print(repeat, side, rollout, flush=True)
                if repeat:
                    made[side].append(rollout)
    times = {side: [one.seconds / one.tokens for one in of] for side, of in made.items()}
    ratio = paired_ratio(times[PLACEBO], times[NONE])
    body = [
        [
            side,
            f"{np.median([one.seconds for one in of]):.1f}",
            f"{1e6 * np.median(times[side]):.0f}",
            f"{np.median([one.tokens_per_step for one in of]):.2f}",
        ]
        for side, of in made.items()
    ]
    head = ["drafts from", "rollout, s", "microseconds a token", "tokens a step"]
    return (
        f"{len(questions)} prompts, {samples} responses to each, medians of {repeats} rollouts of "
        "each side, in turns. Besides, a request drafts from its own text.\n\n"
        + table(head, body)
        + f"\nTime of a token, {PLACEBO} over {NONE}: {ratio.show(3)}; bar {BAR}, "
        f"{ratio.verdict(BAR)}.\n"
    )
