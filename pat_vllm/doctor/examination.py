"""All checks, in a process of their own: `python -m pat_vllm.doctor.examination REQUEST EVENTS`.

Stock vLLM says what is right, and the user's engine with PAT is compared with that. The engines'
cores have processes of their own, as for users: a switch is asked for while one generates.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pat_vllm.doctor.child import Events
from pat_vllm.doctor.compare import Reference
from pat_vllm.doctor.engine import PATEngine
from pat_vllm.doctor.machine import machine_checks, on_cpu
from pat_vllm.doctor.models import SHAPES, Weights, write_checkpoint
from pat_vllm.doctor.report import Check, NamedCheck, Unfit
from pat_vllm.doctor.request import REQUEST, Engine, Prompts, Request, prompts, stock_of
from pat_vllm.doctor.serving import MAX_TOKENS, generate, score, start
from pat_vllm.models.quantization import FP8_KV
from pat_vllm.profiling.cache import CACHE_DIR

if TYPE_CHECKING:
    from vllm import LLM

_LIKELIEST = 5
"""Tokens whose log-probabilities stock vLLM gives at each place."""
_REQUESTS, _REQUESTS_ON_CPU = 256, 24
_LONG = 2400
"""Tokens of a long prompt, which vLLM takes in several steps."""
_REPEAT = 1.2
"""How much the text of a model repeats itself whose engine drafts (`Weights.repeat`)."""


def run_checks(checks: Iterable[NamedCheck], events: Events) -> bool:
    """Run checks until one fails, and tell what each has found; whether none has failed."""
    for name, check in checks:
        events.tell(doing=name)
        began = time.monotonic()
        result, problem = "", None
        try:
            result = str(check())
        except Unfit as error:
            problem = str(error)
        except Exception as error:  # it is told, whatever it was
            problem = f"{type(error).__name__}: {error}"
        seconds = round(time.monotonic() - began, 2)
        last = {} if problem is None else {"last": True}
        events.tell(check=asdict(Check(name, result, problem, seconds)), **last)
        if problem is not None:
            return False
    return True


class Examination:
    """The machine, stock vLLM with either of two weights, then the engine with PAT."""

    engine: Engine
    prompts: Prompts

    def __init__(self, request: Request, folder: Path, events: Events) -> None:
        """Models are written below `folder`."""
        self.request, self.events = request, events
        self.weights, self.new_weights = folder / "weights", folder / "new-weights"
        self.references: list[Reference] = []
        self.rounding = 0.0

    def checks(self) -> Iterator[NamedCheck]:
        """In the order in which they are made: what comes later needs what came before."""
        ranks = self.request.ranks
        yield from machine_checks(ranks)
        yield "random models", self.make_models
        yield "options", self.options
        yield "stock vLLM", partial(self.refer, self.weights)
        if self.engine["dtype"] != "float32" or self.engine.get("kv_cache_dtype") in FP8_KV:
            # 16-bit sums are rounded on each rank, and their sum again. KV in 8 bits makes more of
            # any rounding.
            yield f"stock vLLM, tensor parallelism {ranks}", self.round
        if SHAPES[self.request.shape].reloads:
            yield "stock vLLM, new weights", partial(self.refer, self.new_weights)
        pat = PATEngine(self.engine, self.prompts, self.references, self.new_weights, self.events)
        try:
            yield from pat.checks()
        finally:
            with suppress(Exception):  # or this process would wait for the engine's at its end
                pat.shutdown()

    def make_models(self) -> str:
        """Two of one shape with other weights, and requests to them."""
        if on_cpu():  # else vLLM compiles a small function for each layout, with C++
            os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
        self.engine = self.request.with_pat(str(self.weights), on_cpu())
        shape, drafts = SHAPES[self.request.shape], self.engine.get("speculative_config")
        config = shape.config_for(self.request.ranks) | {"dtype": self.engine["dtype"]}
        like = Weights(shape.gain, _REPEAT if drafts else 0.0)
        size = write_checkpoint(self.weights, config, like)
        write_checkpoint(self.new_weights, config, replace(like, seed=1))
        longest = self.engine["max_model_len"] - MAX_TOKENS - 1
        count = _REQUESTS_ON_CPU if on_cpu() else _REQUESTS
        self.prompts = prompts(config["vocab_size"], count, min(_LONG, longest))
        lengths = [len(prompt) for prompt in self.prompts]
        return (
            f"{self.request.shape}, {size / 1e6:.1f}M parameters; {count} prompts of "
            f"{min(lengths)} to {max(lengths)} tokens"
        )

    def options(self) -> str:
        """What vLLM and PAT refuse, before minutes have passed."""
        from vllm.engine.arg_utils import EngineArgs

        EngineArgs(**self.engine).create_engine_config()
        return json.dumps({name: self.engine[name] for name in self.engine if name != "model"})

    def refer(self, model: Path) -> str:
        """Have stock vLLM answer, and score its answers, with these weights."""
        with self.stock(model=str(model)) as llm:
            outputs = generate(llm, self.prompts, likeliest=_LIKELIEST, beat=self.events.tell)
            forced = score(llm, self.prompts, outputs)
        reference = Reference(outputs, forced, self.rounding)
        reference.check()
        self.references.append(reference)
        return f"off itself by {reference.noise:.1e}"

    def round(self) -> str:
        """How far tensor parallelism alone moves stock vLLM's log-probabilities."""
        (first,) = self.references
        with self.stock(tensor_parallel_size=self.request.ranks) as llm:
            self.rounding = first.apart(score(llm, self.prompts, first.outputs))
        self.references = [replace(first, rounding=self.rounding)]
        self.references[0].check()
        return f"off the engine without by {self.rounding:.1e}"

    @contextmanager
    def stock(self, **changed: Any) -> Iterator[LLM]:
        """An engine of stock vLLM."""
        llm = start({**stock_of(self.engine, len(self.prompts)), **changed})
        try:
            yield llm
        finally:
            llm.llm_engine.engine_core.shutdown()


def main(request: str, events: str) -> None:
    """The child: a `Request` in, checks out; it answers when all have passed."""
    given, lines = REQUEST.validate_json(Path(request).read_text()), Events(events)
    # The profile of a random model is of no use later.
    os.environ[CACHE_DIR] = str(Path(events).parent)
    # vLLM wants it said that functions may be sent to its workers.
    os.environ["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"
    passed = run_checks(Examination(given, Path(events).parent, lines).checks(), lines)
    if not passed:
        sys.exit(1)
    lines.tell(answer=True, last=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
