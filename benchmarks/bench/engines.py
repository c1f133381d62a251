"""The benchmark's engines, which stay alive and take turns."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from benchmarks.batch import Request
from benchmarks.bench.runs import PAT, Run, requests_of, run_of, serve
from benchmarks.bench.workloads import MAX_TOKENS, Workload
from benchmarks.common import config_of
from benchmarks.engine_process import PARK_SECONDS, PATIENCE_SECONDS, EngineFailed, EngineProcess
from benchmarks.paired import turns
from benchmarks.simulator.traces import LengthTrace
from pat_vllm.config import PATConfig
from pat_vllm.doctor.child import environment
from pat_vllm.layout import Layout
from pat_vllm.profiling.cache import CACHE_DIR
from pat_vllm.reporting import Report

_BLOCK_TOKENS = 128
"""Tokens of a KV block: vLLM's default on CPUs."""

_tell = partial(print, flush=True)


@dataclass(frozen=True)
class BenchSettings:
    """What is measured.

    Attributes:
        model: a checkpoint's folder.
        repeats: measured batches of each workload, after one that warms up.
        scale: factor on the workloads' sizes.
    """

    model: Path
    ranks: int
    workloads: tuple[Workload, ...]
    repeats: int = 5
    scale: float = 1.0
    seed: int = 0

    @cached_property
    def config(self) -> Mapping[str, Any]:
        """The model's."""
        return config_of(self.model)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Those of an engine that is not told any."""
        return PATConfig().resolve_layouts(self.ranks)

    def trace(self, workload: Workload, repeat: int) -> LengthTrace:
        """The batch of a repeat; 0 is the one that warms up."""
        return workload.trace(repeat, self.scale, self.seed)

    def requests(self, trace: LengthTrace, repeat: int) -> tuple[Request, ...]:
        """The same, with prompts."""
        return requests_of(trace, self.config["vocab_size"], self.seed + repeat)


@dataclass(frozen=True)
class Measured:
    """All runs, and seconds of the starts of each side's engines. The adaptive side's first start
    takes a profile, which the others find."""

    runs: tuple[Run, ...]
    start_seconds: Mapping[str, tuple[float, ...]]


def sides(settings: BenchSettings) -> dict[str, dict[str, Any]]:
    """`additional_config["pat"]` of each side: every static layout, and the default policy.

    A static engine keeps only its own layout, so that all engines fit into the memory at once.
    """
    static: dict[str, dict[str, Any]] = {
        str(layout): {
            "policy": {"kind": "static", "tp": layout.tp},
            "layouts": [layout.tp],
            "base_tp": layout.tp,
        }
        for layout in settings.layouts
    }
    longest = max(1, round(MAX_TOKENS * settings.scale))
    return {**static, PAT: {"policy": {"kind": "predictor", "length_bound": longest}}}


def engine_options(settings: BenchSettings, pat: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`, with room for a whole batch in one replica, so that no run
    preempts any.

    Args:
        pat: PAT's options, from `sides`.

    Raises:
        ValueError: the model's context is too short.
    """
    config = settings.config
    batches = [
        [p + n for p, n in zip(trace.num_prompt_tokens, trace.lengths, strict=True)]
        for workload in settings.workloads
        for trace in (settings.trace(workload, i) for i in range(settings.repeats + 1))
    ]
    longest = max(map(max, batches))
    limit = config.get("max_position_embeddings", longest)
    if longest > limit:
        raise ValueError(
            f"the workloads make a context of {longest} tokens, but {settings.model.name} allows "
            f"{limit}; use another --model or a smaller --scale"
        )
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = config["num_hidden_layers"] * heads * head_dim * 2 * 4
    blocks = 8 + max(sum(math.ceil(n / _BLOCK_TOKENS) for n in batch) for batch in batches)
    return dict(
        model=str(settings.model),
        tensor_parallel_size=settings.ranks,
        distributed_executor_backend="pat",
        additional_config={"pat": dict(pat)},
        # In bfloat16 rounding differs with the layout, and after a while so does the text.
        dtype="float32",
        enforce_eager=True,
        max_model_len=longest,
        max_num_seqs=max(map(len, batches)),
        kv_cache_memory_bytes=blocks * _BLOCK_TOKENS * token_bytes,
        skip_tokenizer_init=True,
    )


def environment_of(ranks: int, scratch: Path) -> dict[str, str]:
    """Of an engine's process, with a cache of its own in `scratch`: the profile is this
    benchmark's, taken at the first start."""
    return {**environment(ranks), CACHE_DIR: str(scratch / "cache")}


class BenchEngine:
    """An engine that takes its turns; started anew on request.

    Attributes:
        start_seconds: of each start.
    """

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
        served = self._engine.call(serve, requests, name, timeout=PATIENCE_SECONDS)
        if served.tokens != trace.lengths:
            raise EngineFailed(f"{self.name}, {name}: a response does not have its length")
        run = run_of(self.name, trace.name, repeat, served, self._report)
        self._report = served.report
        time.sleep(PARK_SECONDS)
        return run

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def measure(settings: BenchSettings) -> Measured:
    """Serve all batches on all sides, in turns.

    Raises:
        EngineFailed: an engine failed; none is left running.
        ValueError: the model does not fit the workloads.
    """
    runs: list[Run] = []
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pat-vllm-bench-")))
        engines: dict[str, BenchEngine] = {}
        for name, pat in sides(settings).items():
            options = engine_options(settings, pat)
            engines[name] = BenchEngine(name, options, settings.ranks, scratch)
            stack.callback(engines[name].close)
            if name != PAT:
                _tell(f"starting {name}")
                engines[name].start()
        for workload in settings.workloads:
            _tell(f"{workload.name}: starting {PAT}")
            engines[PAT].start()
            for repeat, order in enumerate(turns([*engines], settings.repeats + 1)):
                trace = settings.trace(workload, repeat)
                requests = settings.requests(trace, repeat)
                for name in order:
                    _tell(f"{workload.name}, batch {repeat} of {settings.repeats}: {name}")
                    runs.append(engines[name].run(trace, repeat, requests))
    starts = {name: tuple(engine.start_seconds) for name, engine in engines.items()}
    return Measured(tuple(runs), starts)
