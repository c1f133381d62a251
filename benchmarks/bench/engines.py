"""Settings of the benchmark, and its engines, which stay alive and take turns."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.batch import Request
from benchmarks.bench.runs import Run
from benchmarks.bench.serve import Served, run_of, serve
from benchmarks.bench.workloads import MAX_TOKENS, SCALES, Workload
from benchmarks.engine_process import PARK_SECONDS, PATIENCE_SECONDS, EngineFailed, EngineProcess
from pat_vllm.cli.demo_batch import engine_with_room
from pat_vllm.config import PATConfig
from pat_vllm.doctor.child import environment
from pat_vllm.layout import Layout
from pat_vllm.profile import Profile
from pat_vllm.profiling.cache import CACHE_DIR
from pat_vllm.reporting import Report
from pat_vllm.simulator.traces import LengthTrace


@dataclass(frozen=True)
class BenchSettings:
    """What is measured.

    Attributes:
        scale: name of a factor on the workloads' sizes.
        repeats: measured batches of each workload, after one that warms up.
    """

    model: Path
    ranks: int
    workloads: tuple[Workload, ...]
    repeats: int
    scale: str
    seed: int

    @property
    def max_tokens(self) -> int:
        """Longest response, tokens."""
        return max(1, round(MAX_TOKENS * SCALES[self.scale]))

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Those of an engine that is not told any."""
        return PATConfig().resolve_layouts(self.ranks)

    def trace(self, workload: Workload, repeat: int) -> LengthTrace:
        """The batch of a repeat."""
        return workload.trace(repeat, SCALES[self.scale], self.seed)

    def traces(self) -> Iterator[LengthTrace]:
        """All of them."""
        for workload in self.workloads:
            for repeat in range(self.repeats + 1):
                yield self.trace(workload, repeat)


def engine_options(
    settings: BenchSettings, pat: Mapping[str, Any], config: Mapping[str, Any]
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`: sides differ in `pat` and in nothing else.

    Args:
        pat: PAT's options, from `sides`.
        config: the model's.

    Raises:
        ValueError: the model's context is too short.
    """
    batches = [
        [p + n for p, n in zip(t.num_prompt_tokens, t.lengths, strict=True)]
        for t in settings.traces()
    ]
    longest = max(max(contexts) for contexts in batches)
    limit = config.get("max_position_embeddings", longest)
    if longest > limit:
        raise ValueError(
            f"the workloads make a context of {longest} tokens, but {settings.model.name} allows "
            f"{limit}; use another --model or a smaller --scale"
        )
    return engine_with_room(settings.model, config, settings.ranks, pat, batches, longest)


class BenchEngine:
    """An engine that takes its turns; started anew on request."""

    def __init__(self, name: str, options: dict[str, Any], ranks: int, scratch: Path) -> None:
        """Prepare it.

        Args:
            options: of `vllm.LLM`.
            scratch: for its log and its profile.
        """
        self.name = name
        self.start_seconds: list[float] = []
        self._options, self._log = options, scratch / f"{name}.log"
        self._environment = environment_of(ranks, scratch)
        self._engine: EngineProcess | None = None
        self._report: Report | None = None

    def start(self) -> None:
        """Start the engine, or a new one in its place."""
        self.close()
        self._engine = EngineProcess(self._options, self._environment, self._log)
        self.start_seconds.append(self._engine.wait_until_ready())
        self._report = None
        time.sleep(PARK_SECONDS)

    def run(self, trace: LengthTrace, repeat: int, requests: Sequence[Request]) -> Run:
        """Serve a batch, and wait until the engine takes no core any more.

        Raises:
            EngineFailed: the engine failed, or a response does not have its length.
        """
        assert self._engine is not None
        name = f"{trace.name}-{repeat}"
        served: Served = self._engine.call(serve, requests, name, timeout=PATIENCE_SECONDS)
        if served.tokens != trace.lengths:
            raise EngineFailed(f"{self.name}, {name}: a response does not have its length")
        run = run_of(self.name, trace, repeat, served, self._report)
        self._report = served.report
        time.sleep(PARK_SECONDS)
        return run

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def environment_of(ranks: int, scratch: Path) -> dict[str, str]:
    """Of an engine's process, with a cache of its own in `scratch`: the profile is this
    benchmark's, taken at the first start."""
    return {**environment(ranks), CACHE_DIR: str(scratch / "cache")}


def shared_profile(scratch: Path) -> Profile:
    """The one that the engines of a benchmark share.

    Raises:
        EngineFailed: there is none, or more than one.
    """
    profiles = sorted((scratch / "cache" / "profiles").glob("*.json"))
    if len(profiles) != 1:
        raise EngineFailed(
            f"expected one profile for all engines, found {len(profiles)}; a noisy or incomplete "
            "one is not kept, so let nothing else run on this machine"
        )
    return Profile.load(profiles[0])
