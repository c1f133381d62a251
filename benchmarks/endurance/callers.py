"""Callers that wait for one engine, again and again, until it is dead: who is told, and when."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pat_vllm
from benchmarks.endurance import storm as storms
from tests.support.models import phrase

SYNC = ("step", "step and switch", "switch", "speculate", "report")
"""Callers of an `LLM`. One of the first two steps the engine."""
ASYNC = ("generate", "switch", "speculate", "report")
"""Callers of an `AsyncLLM`."""
HANGS_AFTER = 120.0
"""Seconds after an engine's worker was killed until a caller that waits is given up."""

Calls = Mapping[str, Callable[[], Any]]
"""What each caller does, by its name."""


@dataclass(frozen=True)
class Heard:
    """What a caller was told: `error` at `time`, on the monotonic clock. Empty: nothing."""

    error: str
    time: float


def storm(
    llm: Any, callers: Sequence[str], seed: int, sizes: Sequence[int], kill: Callable[[], None]
) -> dict[str, Heard]:
    """Have callers, each in its own thread, call an engine, and hear of its death.

    Args:
        llm: an `LLM` or `Asynchronous`.
        sizes: tp of the layouts.
        kill: called when all call.
    """
    heard: dict[str, Heard] = {}
    rng = random.Random(seed)
    calls: Calls
    if isinstance(llm, Asynchronous):
        calls = _asynchronous_calls(llm, rng, sizes)
        calls["generate"]()
    else:
        calls = _calls(llm, rng, sizes)
        for _ in range(10):
            calls["step"]()

    def call(name: str) -> None:
        try:
            while True:
                calls[name]()
        except Exception as error:
            heard[name] = Heard(f"{type(error).__name__}: {error}", time.monotonic())

    for name in callers:
        # A caller that nobody tells would keep this process for ever.
        threading.Thread(target=call, args=(name,), daemon=True).start()
    kill()
    end = time.monotonic() + HANGS_AFTER
    while len(heard) < len(callers) and time.monotonic() < end:
        time.sleep(0.02)
    hangs = Heard("", time.monotonic())
    return {name: heard.get(name, hangs) for name in callers}


def _calls(llm: Any, rng: random.Random, sizes: Sequence[int]) -> Calls:
    def step() -> None:
        if not llm.llm_engine.has_unfinished_requests():
            add_batch(llm)
        llm.llm_engine.step()

    def step_and_switch() -> None:
        step()
        if rng.random() < 0.3:
            pat_vllm.switch(llm, tp=rng.choice(sizes))

    return {
        "step": step,
        "step and switch": step_and_switch,
        "switch": lambda: pat_vllm.switch(llm, tp=rng.choice(sizes)),
        "speculate": lambda: pat_vllm.speculate(llm, rng.choice(storms.DRAFT_LENGTHS)),
        "report": lambda: pat_vllm.report(llm),
    }


def _asynchronous_calls(engine: Asynchronous, rng: random.Random, sizes: Sequence[int]) -> Calls:
    llm, numbers = engine.llm, itertools.count()

    async def one() -> None:
        from vllm import SamplingParams

        number = next(numbers)
        prompt = {"prompt_token_ids": phrase(storms.MODEL, 20 + number % 8, number)}
        sampling = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
        async for _ in llm.generate(prompt, sampling, f"storm-{number}"):
            pass

    async def generate() -> None:
        await asyncio.gather(*(one() for _ in range(8)))

    return {
        "generate": lambda: engine.run(generate()),
        "switch": lambda: engine.run(pat_vllm.switch_async(llm, rng.choice(sizes))),
        "speculate": lambda: engine.run(
            pat_vllm.speculate_async(llm, rng.choice(storms.DRAFT_LENGTHS))
        ),
        "report": lambda: engine.run(pat_vllm.report_async(llm)),
    }


def add_batch(llm: Any) -> None:
    """Eight greedy requests."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    for i in range(8):
        llm.llm_engine.add_request(
            f"{time.monotonic()}-{i}", {"prompt_token_ids": phrase(storms.MODEL, 20 + i, i)}, params
        )


class Asynchronous:
    """An `AsyncLLM`, in an event loop of its own thread."""

    def __init__(self, **options: Any) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

        async def start() -> Any:
            return AsyncLLM.from_engine_args(AsyncEngineArgs(**options))

        self.llm = self.run(start())

    def run(self, coroutine: Any) -> Any:
        """The result of a coroutine in the engine's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    def end(self) -> None:
        """Shut the engine down."""

        async def stop() -> None:
            self.llm.shutdown()

        self.run(stop())
        self._loop.call_soon_threadsafe(self._loop.stop)


@contextlib.contextmanager
def asynchronous(**options: Any) -> Iterator[Asynchronous]:
    """An `AsyncLLM` with PAT, of `AsyncEngineArgs`."""
    engine = Asynchronous(distributed_executor_backend="pat", **options)
    try:
        yield engine
    finally:
        engine.end()
        del engine
        gc.collect()
