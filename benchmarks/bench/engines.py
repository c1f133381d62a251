"""The benchmark's engines, which stay alive and take turns."""

from __future__ import annotations

import contextlib
import math
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.batch import Request
from benchmarks.bench.runs import PAT, Run, requests_of, serve
from benchmarks.bench.workloads import MAX_TOKENS, Workload
from benchmarks.common import config_of
from benchmarks.engine_process import PARK_SECONDS, PATIENCE_SECONDS, EngineProcess
from benchmarks.paired import turns
from benchmarks.rollouts import mtp
from benchmarks.simulator.traces import LengthTrace
from pat_vllm.config import PATConfig
from pat_vllm.doctor.child import environment
from pat_vllm.layout import Layout
from pat_vllm.predictor.draft_schedule import draft_lengths
from pat_vllm.profiling.cache import CACHE_DIR

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
        drafts: the most draft tokens of a step, which the model's MTP module makes; prompts are
            problems, then, which the model has learnt to solve.
    """

    model: Path
    ranks: int
    workloads: tuple[Workload, ...]
    repeats: int = 5
    scale: float = 1.0
    seed: int = 0
    drafts: int = 0

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
        if self.drafts:
            return mtp.requests_of(trace, self.model, self.seed + repeat)
        return requests_of(trace, self.config["vocab_size"], self.seed + repeat)


@dataclass(frozen=True)
class Measured:
    """All runs, and seconds of the starts of each side's engines. The adaptive side's first start
    takes a profile, which the others find."""

    runs: tuple[Run, ...]
    start_seconds: Mapping[str, tuple[float, ...]]


class Side(NamedTuple):
    """What the engines of a side have of their own.

    Attributes:
        pat: `additional_config["pat"]`.
        drafts: the most draft tokens of a step; a static layout has as many in each.
    """

    pat: dict[str, Any]
    drafts: int


def sides(settings: BenchSettings) -> dict[str, Side]:
    """Every static layout, with each draft length that there is, and the default policy.

    A static engine keeps only its own layout, so that all engines fit into the memory at once.
    """
    lengths = draft_lengths(settings.drafts, None) if settings.drafts else (0,)
    static = {
        f"{layout}, k={drafts}" if settings.drafts else str(layout): Side(
            {
                "policy": {"kind": "static", "tp": layout.tp},
                "layouts": [layout.tp],
                "base_tp": layout.tp,
            },
            drafts,
        )
        for layout in settings.layouts
        for drafts in lengths
    }
    longest = max(1, round(MAX_TOKENS * settings.scale))
    policy = {"policy": {"kind": "predictor", "length_bound": longest}}
    return {**static, PAT: Side(policy, settings.drafts)}


def engine_options(settings: BenchSettings, side: Side) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`, with room for a whole batch in one replica, so that no run
    preempts any.

    Args:
        side: from `sides`.

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
    token_bytes = (config["num_hidden_layers"] + bool(side.drafts)) * heads * head_dim * 2 * 4
    room = side.drafts
    blocks = 8 + max(sum(math.ceil((n + room) / _BLOCK_TOKENS) for n in batch) for batch in batches)
    drafter = {"method": "mtp", "num_speculative_tokens": side.drafts}
    return dict(
        model=str(settings.model),
        tensor_parallel_size=settings.ranks,
        distributed_executor_backend="pat",
        additional_config={"pat": side.pat},
        speculative_config=drafter if side.drafts else None,
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


def measure(settings: BenchSettings) -> Measured:
    """Serve all batches on all sides, in turns.

    Raises:
        EngineFailed: an engine failed; none is left running.
        ValueError: the model does not fit the workloads.
    """
    runs: list[Run] = []
    options = {name: engine_options(settings, side) for name, side in sides(settings).items()}
    starts: dict[str, list[float]] = {name: [] for name in options}
    engines: dict[str, EngineProcess] = {}
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pat-vllm-bench-")))
        environment = environment_of(settings.ranks, scratch)

        def close() -> None:
            for engine in engines.values():
                engine.close()

        stack.callback(close)

        def start(name: str) -> None:
            _tell(f"starting {name}")
            if name in engines:
                engines.pop(name).close()
            engines[name] = EngineProcess(options[name], environment, scratch / f"{name}.log")
            starts[name].append(engines[name].wait_until_ready())
            time.sleep(PARK_SECONDS)

        def run(name: str, trace: LengthTrace, repeat: int) -> None:
            _tell(f"{trace.name}, batch {repeat} of {settings.repeats}: {name}")
            batch = (name, trace.name, repeat, settings.requests(trace, repeat))
            runs.append(engines[name].call(serve, *batch, timeout=PATIENCE_SECONDS))
            # Until the engine takes no core any more.
            time.sleep(PARK_SECONDS)

        for name in options:
            if name != PAT:
                start(name)
        for workload in settings.workloads:
            start(PAT)
            for repeat, order in enumerate(turns([*options], settings.repeats + 1)):
                for name in order:
                    run(name, settings.trace(workload, repeat), repeat)
    return Measured(tuple(runs), {name: tuple(seconds) for name, seconds in starts.items()})
