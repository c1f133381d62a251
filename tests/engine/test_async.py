"""Requests of many callers at once: `AsyncLLM`."""

from __future__ import annotations

import asyncio
import gc
import os
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

import pat_vllm
from tests.support.engines import OPTIONS
from tests.support.fork_server import start_from_server
from tests.support.models import random_model
from tests.support.serve import DRAFTS

STREAMS = 8
TOKENS = 240


def drafts_of(report: pat_vllm.Report) -> tuple[int, int]:
    """Draft tokens that were verified, and those that were accepted."""
    drafted = sum(sample.counts.drafted for sample in report.drafts)
    return drafted, sum(sample.counts.accepted for sample in report.drafts)


def lengths_of(report: pat_vllm.Report) -> set[int]:
    """Draft lengths of steps that verified drafts."""
    return {sample.num_speculative_tokens for sample in report.drafts if sample.counts.drafted}


@pytest.fixture(scope="module")
def loop() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture(scope="module")
def run(loop: asyncio.Runner) -> Callable[[Coroutine[Any, Any, Any]], Any]:
    return loop.run


@pytest.fixture(scope="module")
def llm(run: Callable[..., Any]) -> Iterator[Any]:
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "1"
    start_from_server()
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    pat = {"kv_transfer": "migrate", "policy": {"kind": "static", "tp": 1, "idle_seconds": 0}}
    arguments = AsyncEngineArgs(
        model=str(random_model("repeating")),
        speculative_config=dict(DRAFTS),
        tensor_parallel_size=2,
        distributed_executor_backend="pat",
        additional_config={"pat": pat},
        **OPTIONS,
    )

    async def start() -> Any:
        return AsyncLLM.from_engine_args(arguments)

    async def stop(llm: Any) -> None:
        llm.shutdown()

    llm = run(start())
    try:
        yield llm
    finally:
        run(stop(llm))
        del llm
        gc.collect()


class Stream:
    """One request, whose pieces are gathered as they come: half of them greedy, half seeded."""

    def __init__(self, llm: Any, name: str, index: int, tokens: int = TOKENS) -> None:
        self.token_ids: list[int] = []
        self.finish_reason: str | None = None
        self.task = asyncio.create_task(self._read(llm, name, index, tokens))

    async def _read(self, llm: Any, name: str, index: int, tokens: int) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            output_kind=RequestOutputKind.DELTA,
            **({"temperature": 0.0} if index % 2 else {"temperature": 0.8, "seed": index}),
        )
        token_ids = [3 + (7 * index + 31 * i * i) % 390 for i in range(12 + 3 * index)]
        async for output in llm.generate({"prompt_token_ids": token_ids}, sampling, name):
            (piece,) = output.outputs
            self.token_ids += piece.token_ids
            self.finish_reason = piece.finish_reason


def streams_of(llm: Any, prefix: str, count: int = STREAMS) -> list[Stream]:
    return [Stream(llm, f"{prefix}-{index}", index) for index in range(count)]


async def until(condition: Callable[[], bool]) -> None:
    """Wait for something that other tasks bring about."""
    while not condition():
        await asyncio.sleep(0.002)


async def progress(streams: list[Stream], tokens: int) -> None:
    """Wait until every unfinished stream has so many tokens."""
    await until(lambda: all(s.task.done() or len(s.token_ids) >= tokens for s in streams))


async def idle(llm: Any) -> pat_vllm.Report:
    """Wait until the engine has no request; its report."""
    while True:
        report = await pat_vllm.report_async(llm)
        if not report.timeline or report.timeline[-1].num_seqs == 0:
            return report
        await asyncio.sleep(0.02)


async def gather(streams: list[Stream]) -> list[list[int]]:
    await asyncio.gather(*(stream.task for stream in streams))
    return [stream.token_ids for stream in streams]


@pytest.fixture(scope="module")
def expected(llm: Any, run: Callable[..., Any]) -> list[list[int]]:
    """What each stream gives where nothing is switched."""

    async def collect() -> list[list[int]]:
        token_ids = await gather(streams_of(llm, "expected"))
        assert not (await pat_vllm.report_async(llm)).switches
        return token_ids

    streams = run(collect())
    assert [len(token_ids) for token_ids in streams] == [TOKENS] * STREAMS
    assert len({tuple(token_ids) for token_ids in streams}) == STREAMS
    return streams


def forced(report: pat_vllm.Report, since: pat_vllm.Report) -> list[Any]:
    """Switches asked for since an earlier report."""
    new = report.switches[len(since.switches) :]
    return [switch for switch in new if switch.reason == "forced"]


def test_streams_across_switches(
    llm: Any, run: Callable[..., Any], expected: list[list[int]]
) -> None:
    """And a layout that does not exist, which is an error of that call only."""

    async def scenario() -> None:
        before = await idle(llm)
        streams = streams_of(llm, "switched")
        for tokens, tp in ((10, 2), (40, 1), (70, 2), (71, 1), (110, 2)):
            await progress(streams, tokens)
            with pytest.raises(Exception, match=r"the engine has 2 ranks"):
                await pat_vllm.switch_async(llm, 3)
            assert await pat_vllm.switch_async(llm, tp)
        assert await gather(streams) == expected
        assert {stream.finish_reason for stream in streams} == {"length"}
        switches = forced(await idle(llm), before)
        assert [switch.target.tp for switch in switches] == [2, 1, 2, 1, 2]
        # The engine runs on while a caller reads, so a request may have ended before the switch.
        assert all(switch.migrated == switch.num_seqs for switch in switches)
        assert switches[0].num_seqs == STREAMS

    run(scenario())


def test_aborts_in_flight(llm: Any, run: Callable[..., Any], expected: list[list[int]]) -> None:
    """Callers that go away around switches take nothing from the others, and leave nothing."""

    async def scenario() -> None:
        before = await idle(llm)
        streams = streams_of(llm, "aborted")
        await progress(streams, 10)
        streams[0].task.cancel()
        switched = asyncio.create_task(pat_vllm.switch_async(llm, 2))
        streams[1].task.cancel()
        assert await switched
        streams[2].task.cancel()
        await progress(streams[3:], 30)
        await llm.abort("aborted-3")
        await until(streams[3].task.done)
        assert await pat_vllm.switch_async(llm, 1)

        assert await gather(streams[4:]) == expected[4:]
        for stream, tokens in zip(streams[:4], expected, strict=False):
            assert 10 <= len(stream.token_ids) < TOKENS
            assert stream.token_ids == tokens[: len(stream.token_ids)]
        assert all(stream.task.cancelled() for stream in streams[:3])
        assert streams[3].finish_reason == "abort"
        switches = forced(await idle(llm), before)
        assert [s.num_seqs for s in switches] in ([8, 4], [7, 4], [6, 4])
        assert not llm.output_processor.has_unfinished_requests()

    run(scenario())


def test_drafts_on_demand(llm: Any, run: Callable[..., Any], expected: list[list[int]]) -> None:
    """Greedy text is what it is without, whatever layout and draft length."""

    async def scenario() -> None:
        before = await idle(llm)
        assert drafts_of(before) == (0, 0)
        with pytest.raises(Exception, match=r"keeps \[0, 1, 2, 4\] ready"):
            await pat_vllm.speculate_async(llm, 3)
        await pat_vllm.speculate_async(llm, 4)
        streams = [Stream(llm, f"drafted-{index}", index) for index in range(1, STREAMS, 2)]
        for tokens, tp, length in ((20, 2, 1), (40, 1, 4), (60, 2, 0), (80, 1, 4), (100, 2, 2)):
            await progress(streams, tokens)
            assert await pat_vllm.switch_async(llm, tp)
            await pat_vllm.speculate_async(llm, length)
            # However late this process reads.
            while length and length not in lengths_of(await pat_vllm.report_async(llm)):
                assert not all(stream.task.done() for stream in streams)
        assert await gather(streams) == expected[1::2]
        report = await idle(llm)
        assert len(forced(report, before)) == 5
        drafted, accepted = drafts_of(report)
        assert accepted / drafted > 0.2
        # The next requests get what is configured, which is none.
        assert await gather([Stream(llm, "undrafted", 1)]) == expected[1:2]
        assert drafts_of(await idle(llm)) == (drafted, accepted)

    run(scenario())


@pytest.mark.parametrize("clear_cache", [True, False])
def test_pause_keeping_requests(
    llm: Any, run: Callable[..., Any], expected: list[list[int]], clear_cache: bool
) -> None:
    """Frozen, switched while frozen, frozen again in the new layout, resumed: nothing is lost."""

    async def scenario() -> None:
        await idle(llm)
        streams = streams_of(llm, f"kept-{clear_cache}", STREAMS - 1)
        await progress(streams, 20)
        await llm.pause_generation(mode="keep", clear_cache=clear_cache)
        assert await llm.is_paused()
        frozen = [list(stream.token_ids) for stream in streams]
        assert await pat_vllm.switch_async(llm, 2)
        # Once more, with requests that have not run since they were carried.
        await llm.pause_generation(mode="keep", clear_cache=clear_cache)
        streams.append(Stream(llm, f"kept-{clear_cache}-late", STREAMS - 1))
        await asyncio.sleep(0.3)
        assert [stream.token_ids for stream in streams] == [*frozen, []]

        await llm.resume_generation()
        await progress(streams, 60)
        await llm.pause_generation(mode="keep", clear_cache=clear_cache)
        assert await pat_vllm.switch_async(llm, 1)
        await llm.resume_generation()
        assert not await llm.is_paused()
        assert await gather(streams) == expected

    run(scenario())


def test_pause_waiting_for_requests(
    llm: Any, run: Callable[..., Any], expected: list[list[int]]
) -> None:
    """What runs ends, through a switch too. What comes later waits for the end of the pause; vLLM
    0.33 refuses it until then."""
    from vllm.version import __version__

    refuses = not __version__.startswith(("0.31", "0.32"))

    async def scenario() -> None:
        await idle(llm)
        streams = streams_of(llm, "waited", STREAMS - 1)
        await progress(streams, 20)
        pause = asyncio.create_task(llm.pause_generation(mode="wait", clear_cache=True))
        await until(lambda: pause.done() or len(streams[0].token_ids) >= 30)
        assert not pause.done()
        late = Stream(llm, "waited-late", STREAMS - 1)
        assert await pat_vllm.switch_async(llm, 2)
        await pause
        assert await gather(streams) == expected[:-1]
        await asyncio.sleep(0.2)
        assert late.token_ids == []
        if refuses:
            from vllm.exceptions import RetryableRequestError

            with pytest.raises(RetryableRequestError, match="Generation is paused"):
                await late.task
        await llm.resume_generation()
        if refuses:
            late = Stream(llm, "waited-late", STREAMS - 1)
        assert await gather([late]) == expected[-1:]

    run(scenario())


def test_a_pause_that_is_not_served(
    llm: Any, run: Callable[..., Any], expected: list[list[int]]
) -> None:
    """Its name is in the error, and requests go on."""

    async def scenario() -> None:
        await idle(llm)
        streams = streams_of(llm, "recomputed")
        await progress(streams, 20)
        assert await pat_vllm.switch_async(llm, 2)
        with pytest.raises(Exception, match="Invalid pause mode: recompute"):
            await llm.pause_generation(mode="recompute")
        assert not await llm.is_paused()
        assert await gather(streams) == expected

    run(scenario())


def test_pause_aborting_requests(
    llm: Any, run: Callable[..., Any], expected: list[list[int]]
) -> None:
    async def scenario() -> None:
        await idle(llm)
        streams = streams_of(llm, "cut")
        await progress(streams, 20)
        assert await pat_vllm.switch_async(llm, 2)
        await llm.pause_generation(mode="abort")
        for token_ids, whole in zip(await gather(streams), expected, strict=True):
            assert token_ids == whole[: len(token_ids)] and len(token_ids) < TOKENS
        assert {stream.finish_reason for stream in streams} == {"abort"}
        assert await pat_vllm.switch_async(llm, 1)
        await llm.resume_generation()
        assert await gather(streams_of(llm, "after the cut")) == expected

    run(scenario())
