"""One batch, served in several ways in turn by an engine in a process of its own.

`run` is called by commands and starts `python -m pat_vllm.cli.engine_run`, which imports vLLM,
serves the batch and writes a line for each result; both sides are here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from pat_vllm.doctor.child import Events, environment, run_module
from pat_vllm.reporting import Report, Run
from pat_vllm.start.text_only import without_vision_and_audio

if TYPE_CHECKING:
    from vllm import LLM

if __name__ in ("__main__", "__mp_main__"):  # the child, and the processes of its engine
    without_vision_and_audio()

_TAIL_LINES = 40
"""Of a failed engine's output, for the error message."""


@dataclass(frozen=True)
class Batch:
    """Requests that start together.

    Attributes:
        prompts: token ids.
        lengths: tokens that each request generates, neither less nor more.
        temperature: 0 is greedy.
        seed: of the first request; the others count on.
    """

    prompts: tuple[tuple[int, ...], ...]
    lengths: tuple[int, ...]
    temperature: float = 1.0
    seed: int = 0

    @property
    def tokens(self) -> int:
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Longest context, tokens: a prompt with its response."""
        return max(len(p) + n for p, n in zip(self.prompts, self.lengths, strict=True))


@dataclass(frozen=True)
class RunSpec:
    """An engine, and how it serves a batch.

    Attributes:
        engine: keyword arguments of `vllm.LLM`.
        warm_up: served first in each way; its time is discarded.
        ways: a layout's name: the engine stays in it; None: the engine follows its policy.
        rounds: how often each way has its turn. In turns, all ways suffer alike where the load of
            the machine changes.
    """

    engine: dict[str, Any]
    batch: Batch
    warm_up: Batch
    ways: tuple[str | None, ...] = (None,)
    rounds: int = 1


@dataclass(frozen=True)
class RunResult:
    """What an engine did with its batch.

    Attributes:
        start_seconds: making the engine.
        began: when `generate` was called, on the machine's monotonic clock, as in `report`.
        seconds: until `generate` returned.
        outputs: generated token ids by request.
        report: the engine's own, from `began` on.
    """

    start_seconds: float
    began: float
    seconds: float
    outputs: tuple[tuple[int, ...], ...]
    report: Report

    @property
    def tokens(self) -> int:
        return sum(len(output) for output in self.outputs)

    @property
    def run(self) -> Run:
        return Run(self.report, self.began, self.seconds)


SPEC = TypeAdapter(RunSpec)
RESULT = TypeAdapter(RunResult)


class RunFailed(RuntimeError):
    """An engine process failed; the message ends with the last lines that it wrote."""


def run(spec: RunSpec, on_result: Callable[[RunResult], object]) -> None:
    """Serve a batch in a new process: round by round, in each way.

    Args:
        on_result: called with each result.

    Raises:
        RunFailed: the process ended before the last result.
    """
    left = len(spec.ways) * spec.rounds

    def take(event: dict[str, Any]) -> None:
        nonlocal left
        if "answer" in event:
            left -= 1
            on_result(RESULT.validate_python(event["answer"]))

    variables = environment(spec.engine["tensor_parallel_size"])
    request = SPEC.dump_json(spec).decode()
    ended = run_module("pat_vllm.cli.engine_run", request, variables, take)
    if ended.code or left:
        last = "\n".join(ended.log.splitlines()[-_TAIL_LINES:])
        raise RunFailed(f"the engine's process ended with exit code {ended.code}:\n{last}")


def serve(spec: RunSpec) -> Iterator[RunResult]:
    """Make the engine in this process and serve the batch, round by round."""
    from vllm import LLM

    from pat_vllm.api import report, switch

    start = time.monotonic()
    llm = LLM(**spec.engine)
    started = time.monotonic() - start
    for number in range(spec.rounds + 1):
        for way in spec.ways:
            report(llm)  # the end of the work before is the end of a layout that was asked for
            if way is not None and not switch(llm, way):
                raise RuntimeError(f"the engine refused to switch to {way}")
            llm.reset_prefix_cache()
            began = time.monotonic()
            outputs = _generate(llm, spec.batch if number else spec.warm_up)
            seconds = time.monotonic() - began
            if number:
                yield RunResult(started, began, seconds, outputs, report(llm, since=began))


def _generate(llm: LLM, batch: Batch) -> tuple[tuple[int, ...], ...]:
    from vllm import SamplingParams, TokensPrompt

    params = [
        SamplingParams(
            temperature=batch.temperature,
            seed=batch.seed + i,
            max_tokens=length,
            ignore_eos=True,
            detokenize=False,
        )
        for i, length in enumerate(batch.lengths)
    ]
    prompts = [TokensPrompt(prompt_token_ids=list(prompt)) for prompt in batch.prompts]
    answers = llm.generate(prompts, params, use_tqdm=False)
    return tuple(tuple(answer.outputs[0].token_ids) for answer in answers)


def main(request: str, events: str) -> None:
    """The child: a spec in, results out."""
    spec, out = SPEC.validate_json(Path(request).read_text()), Events(events)
    for result in serve(spec):
        out.tell(answer=RESULT.dump_python(result, mode="json"))


if __name__ == "__main__":
    main(*sys.argv[1:])
