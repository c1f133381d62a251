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
"""Callers of an `LLM`, each in its own thread. One of the first two steps the engine."""
ASYNC = ("generate", "switch", "speculate", "report")
"""Callers of an `AsyncLLM`, in one event loop."""
HANGS_AFTER = 120.0
"""Seconds after an engine's worker was killed until a caller that waits is given up."""


@dataclass(frozen=True)
class Heard:
    """What a caller was told: `error` at `time`, on the monotonic clock. Empty: nothing."""

    error: str
    time: float


def storm(
    llm: Any, callers: Sequence[str], seed: int, sizes: Sequence[int], kill: Callable[[], None]
) -> dict[str, Heard]:
    """Have callers call an engine, an `LLM` or `Asynchronous`, and hear of its death.

    Args:
        sizes: tp of the layouts.
        kill: called when all call.
    """
    stormed = _async_storm if isinstance(llm, Asynchronous) else _sync_storm
    heard: dict[str, Heard] = {}
    stormed(llm, callers, random.Random(seed), sizes, heard)
    kill()
    end = time.monotonic() + HANGS_AFTER
    while len(heard) < len(callers) and time.monotonic() < end:
        time.sleep(0.02)
    hangs = Heard("", time.monotonic())
    return {name: heard.get(name, hangs) for name in callers}


# ---------------------------------------------------------------- LLM


def _sync_storm(
    llm: Any,
    callers: Sequence[str],
    rng: random.Random,
    sizes: Sequence[int],
    heard: dict[str, Heard],
) -> None:
    def step() -> None:
        if not llm.llm_engine.has_unfinished_requests():
            add_batch(llm)
        llm.llm_engine.step()

    def step_and_switch() -> None:
        step()
        if rng.random() < 0.3:
            pat_vllm.switch(llm, tp=rng.choice(sizes))

    calls: Mapping[str, Callable[[], Any]] = {
        "step": step,
        "step and switch": step_and_switch,
        "switch": lambda: pat_vllm.switch(llm, tp=rng.choice(sizes)),
        "speculate": lambda: pat_vllm.speculate(llm, rng.choice(storms.DRAFT_LENGTHS)),
        "report": lambda: pat_vllm.report(llm),
    }

    def call(name: str) -> None:
        try:
            while True:
                calls[name]()
        except Exception as error:
            heard[name] = Heard(f"{type(error).__name__}: {error}", time.monotonic())

    add_batch(llm)
    for _ in range(10):
        llm.llm_engine.step()
    for name in callers:
        # A caller that nobody tells would keep this process for ever.
        threading.Thread(target=call, args=(name,), daemon=True).start()


def add_batch(llm: Any) -> None:
    """Eight greedy requests."""
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=400, temperature=0.0, ignore_eos=True)
    for i in range(8):
        llm.llm_engine.add_request(
            f"{time.monotonic()}-{i}", {"prompt_token_ids": phrase(storms.MODEL, 20 + i, i)}, params
        )


# ---------------------------------------------------------------- AsyncLLM


class Asynchronous:
    """An `AsyncLLM`, in an event loop of its own thread.

    Attributes:
        llm: it.
        loop: its event loop.
    """

    def __init__(self, model: str, ranks: int, pat: Mapping[str, Any], **options: Any) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        arguments = AsyncEngineArgs(
            model=model,
            tensor_parallel_size=ranks,
            distributed_executor_backend="pat",
            additional_config={"pat": dict(pat)},
            **options,
        )
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()

        async def start() -> Any:
            return AsyncLLM.from_engine_args(arguments)

        self.llm = self.run(start())

    def run(self, coroutine: Any) -> Any:
        """The result of a coroutine in the engine's event loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result()

    def end(self) -> None:
        """Shut the engine down."""

        async def stop() -> None:
            self.llm.shutdown()

        self.run(stop())
        self.loop.call_soon_threadsafe(self.loop.stop)


@contextlib.contextmanager
def asynchronous(model: str, ranks: int, pat: Mapping[str, Any], **options: Any) -> Iterator[Any]:
    """An `AsyncLLM` with PAT."""
    engine = Asynchronous(model, ranks, pat, **options)
    try:
        yield engine
    finally:
        engine.end()
        del engine
        gc.collect()


def _async_storm(
    engine: Asynchronous,
    callers: Sequence[str],
    rng: random.Random,
    sizes: Sequence[int],
    heard: dict[str, Heard],
) -> None:
    llm, numbers = engine.llm, itertools.count()

    async def generate() -> None:
        from vllm import SamplingParams

        async def one() -> None:
            number = next(numbers)
            prompt = {"prompt_token_ids": phrase(storms.MODEL, 20 + number % 8, number)}
            sampling = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
            async for _ in llm.generate(prompt, sampling, f"storm-{number}"):
                pass

        await asyncio.gather(*(one() for _ in range(8)))

    calls: Mapping[str, Callable[[], Any]] = {
        "generate": generate,
        "switch": lambda: pat_vllm.switch_async(llm, rng.choice(sizes)),
        "speculate": lambda: pat_vllm.speculate_async(llm, rng.choice(storms.DRAFT_LENGTHS)),
        "report": lambda: pat_vllm.report_async(llm),
    }

    async def call(name: str) -> None:
        try:
            while True:
                await calls[name]()
        except Exception as error:
            heard[name] = Heard(f"{type(error).__name__}: {error}", time.monotonic())

    engine.run(generate())
    for name in callers:
        asyncio.run_coroutine_threadsafe(call(name), engine.loop)
