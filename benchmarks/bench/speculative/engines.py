"""Engines of the workloads with speculation, and the sides that they serve in turns.

A change of the draft length costs nothing in an engine. So each static layout is one engine, which
serves every fixed length and its table; PAT is two, as what it may plan is given at start. All have
the same drafter, limits and router. An engine that waits is stopped, so that it takes no core.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.batch import Request
from benchmarks.bench.engines import BenchEngine, BenchSettings, engine_options
from benchmarks.bench.runs import PAT, Run
from benchmarks.bench.serve import Served, serve
from benchmarks.bench.speculative.tuning import Drafted
from benchmarks.bench.speculative.workloads import (
    DRAFT_LENGTHS,
    MOST_DRAFTS,
    NGRAMS,
    SpeculativeWorkload,
)
from benchmarks.engine_process import EngineFailed
from pat_vllm.layout import Layout
from pat_vllm.reporting import DraftSample
from pat_vllm.simulator.traces import LengthTrace

PAT_PLAIN = f"{PAT}, k = 0"
"""Name of the side that plans layouts and never drafts."""
TABLE = "table"
"""In place of a draft length: vLLM's dynamic schedule, tuned."""


@dataclass(frozen=True)
class Side:
    """A side, and the engine that serves it.

    Attributes:
        length: draft length that the engine is told before each batch; None leaves it.
    """

    name: str
    engine: str
    length: int | None = None


def static_name(layout: Layout, length: int | str) -> str:
    """Name of a static side."""
    return f"{layout}, {length if length == TABLE else f'k = {length}'}"


def sides_of(layouts: Sequence[Layout]) -> tuple[Side, ...]:
    """All sides: each layout with each fixed length and with its table, and PAT without and with
    planned draft lengths."""
    static = [
        Side(static_name(layout, length), str(layout), None if length == TABLE else int(length))
        for layout in layouts
        for length in (*DRAFT_LENGTHS, TABLE)
    ]
    return (*static, Side(PAT_PLAIN, PAT_PLAIN), Side(PAT, PAT))


Table = Sequence[tuple[int, int, int]]


def options_of(
    settings: BenchSettings,
    workload: SpeculativeWorkload,
    config: Mapping[str, Any],
    tables: Mapping[Layout, Table],
) -> dict[str, dict[str, Any]]:
    """Keyword arguments of `vllm.LLM` of each engine: they differ in policy and table only.

    An engine that keeps one layout has the same kernels in it as one that keeps all.

    Args:
        tables: by layout, of its static engine; without any there are no static engines.
    """
    # On CPU vLLM packs weights; what is packed cannot be updated.
    weights = {"weights": "inplace"} if workload.updates else {}
    planned = {"policy": {"kind": "predictor", "length_bound": settings.max_tokens}}
    pat: dict[str, tuple[Mapping[str, Any], Table | None]] = {
        str(layout): (
            {
                "policy": {"kind": "static", "tp": layout.tp},
                "layouts": [layout.tp],
                "base_tp": layout.tp,
            },
            table,
        )
        for layout, table in tables.items()
    }
    pat |= {PAT_PLAIN: (planned, [(1, 1, 0)]), PAT: (planned, None)}
    engines = {}
    for name, (options, table) in pat.items():
        own = engine_options(settings, {**options, **weights}, config, MOST_DRAFTS)
        drafter = {**NGRAMS, "num_speculative_tokens": MOST_DRAFTS}
        if table is not None:
            drafter["num_speculative_tokens_per_batch_size"] = [list(one) for one in table]
        engines[name] = own | {"speculative_config": drafter}
    return engines


@dataclass(frozen=True)
class SpeculativeRun:
    """A batch on one side.

    Attributes:
        model: that served it.
        samples: of its drafts, oldest first.
        gave: what all drafts gave, whatever their lengths; `length` is the longest.
    """

    run: Run
    model: str
    samples: tuple[DraftSample, ...]
    gave: Drafted


def run_batch(
    engine: BenchEngine,
    side: Side,
    trace: LengthTrace,
    requests: Sequence[Request],
    repeat: int,
    model: str,
    tp: int | None = None,
) -> SpeculativeRun:
    """Serve a batch; `tp` has the engine be in that layout."""
    name = f"{trace.name}-{repeat}-{side.name}"
    arguments = (requests, name, side.length, tp)
    run, report = engine.run(side.name, trace, repeat, serve_with, *arguments)
    samples = tuple(s for s in report.drafts if s.at >= run.began)
    used = {sample.num_speculative_tokens for sample in samples}
    asked = 0 if side.engine == PAT_PLAIN else side.length
    if asked is not None and used != {asked}:
        raise EngineFailed(f"{side.name}, {name}: draft lengths were {sorted(used)}")
    return SpeculativeRun(
        run, model, samples, Drafted.of(max(used, default=0), run.tokens, samples)
    )


def serve_with(
    llm: Any, requests: Sequence[Request], name: str, length: int | None, tp: int | None
) -> Served:
    """Serve a batch in the engine's process with a draft length and in a layout, where given."""
    import pat_vllm

    # Before it, an engine that has just been woken up does what is left to do.
    pat_vllm.report(llm, since=time.monotonic())
    if tp is not None and not pat_vllm.switch(llm, tp):
        raise ValueError(f"the engine did not switch to tp={tp}")
    if length is not None:
        pat_vllm.speculate(llm, length)
    return serve(llm, requests, name)


def load_weights(llm: Any, path: str) -> None:
    """Replace the weights, by vLLM's own means."""
    llm.collective_rpc("reload_weights", kwargs={"weights_path": path})
    llm.reset_prefix_cache()
