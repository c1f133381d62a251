"""One batch on one engine in a process of its own: so that no run inherits another's engine.

`run` is called by commands and starts `python -m pat_vllm.cli.engine_run`, which imports vLLM,
serves the batch and writes the result; both sides are here.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

from pat_vllm.child import Events, environment, run_module
from pat_vllm.layout import Layout
from pat_vllm.reporting import DraftSample, LiveSample, Report, SwitchReport
from pat_vllm.text_only import without_vision_and_audio

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
        """Tokens that the batch generates."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """Longest context, tokens: a prompt with its response."""
        return max(len(p) + n for p, n in zip(self.prompts, self.lengths, strict=True))


@dataclass(frozen=True)
class RunSpec:
    """An engine and what it serves.

    Attributes:
        engine: keyword arguments of `vllm.LLM`.
        warm_up: served first; its time is discarded.
    """

    engine: dict[str, Any]
    batch: Batch
    warm_up: Batch


@dataclass(frozen=True)
class RunResult:
    """What an engine did with its batch.

    Attributes:
        start_seconds: making the engine.
        began: when `generate` was called, on the machine's monotonic clock, as in `report`.
        seconds: until `generate` returned.
        outputs: generated token ids by request.
        report: the engine's own, warm-up included.
    """

    start_seconds: float
    began: float
    seconds: float
    outputs: tuple[tuple[int, ...], ...]
    report: Report

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(len(output) for output in self.outputs)

    @property
    def timeline(self) -> tuple[LiveSample, ...]:
        """The report's samples from `began` until `generate` returned."""
        return tuple(s for s in self.report.timeline if self._during(s.at))

    @property
    def switches(self) -> tuple[SwitchReport, ...]:
        """The report's switches while requests were running, the return when idle left out."""
        return tuple(s for s in self.report.switches if self._during(s.at) and s.reason != "idle")

    @property
    def drafts(self) -> tuple[DraftSample, ...]:
        """The report's samples of drafts, while requests were running."""
        return tuple(s for s in self.report.drafts if self._during(s.at))

    @property
    def drafted(self) -> int:
        """Draft tokens that were verified."""
        return sum(sample.drafted for sample in self.drafts)

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens that was accepted; 0 without any."""
        return sum(sample.accepted for sample in self.drafts) / max(1, self.drafted)

    @property
    def live(self) -> tuple[tuple[float, int], ...]:
        """(seconds from `began`, live requests from then on), until none is left."""
        samples = [(s.at - self.began, s.num_seqs) for s in self.timeline if s.num_seqs]
        return (*samples, (self.seconds, 0))

    @property
    def spans(self) -> tuple[tuple[Layout, float, float], ...]:
        """(layout, start, end) in seconds from `began`, one after the other."""
        layouts = [self.timeline[0].layout, *(switch.target for switch in self.switches)]
        starts = [0.0, *(switch.at - self.began for switch in self.switches)]
        return tuple(zip(layouts, starts, [*starts[1:], self.seconds], strict=True))

    def _during(self, at: float) -> bool:
        return self.began <= at <= self.began + self.seconds

    def to_json(self) -> str:
        """As text."""
        return _RESULT.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str) -> RunResult:
        """Inverse of `to_json`."""
        return _RESULT.validate_json(text)


_RESULT = TypeAdapter(RunResult)


class RunFailed(RuntimeError):
    """An engine process failed; the message ends with the last lines that it wrote."""


def run(spec: RunSpec) -> RunResult:
    """Serve a batch in a new process.

    Raises:
        RunFailed: the process ended without a result.
    """
    variables = environment(spec.engine["tensor_parallel_size"])
    ended = run_module("pat_vllm.cli.engine_run", json.dumps(asdict(spec)), variables)
    if ended.code or ended.answer is None:
        last = "\n".join(ended.log.splitlines()[-_TAIL_LINES:])
        raise RunFailed(f"the engine's process ended with exit code {ended.code}:\n{last}")
    return RunResult.from_json(ended.answer)


def serve(spec: RunSpec) -> RunResult:
    """Make the engine in this process and serve the batch."""
    from vllm import LLM

    from pat_vllm.api import report

    start = time.monotonic()
    llm = LLM(**spec.engine)
    started = time.monotonic() - start
    _generate(llm, spec.warm_up)
    began = time.monotonic()
    outputs = _generate(llm, spec.batch)
    seconds = time.monotonic() - began
    return RunResult(started, began, seconds, outputs, report(llm))


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
    """The child: a spec in, a result out."""
    values = json.loads(Path(request).read_text())
    spec = RunSpec(values["engine"], Batch(**values["batch"]), Batch(**values["warm_up"]))
    Events(events).tell(answer=serve(spec).to_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
