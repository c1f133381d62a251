"""`python -m benchmarks.bench`: real engines, static and adaptive, take turns on the same batches.

The sides are engines that stay alive, each in a process of its own; they differ in PAT's options
and in nothing else. A workload's first batch warms them up; the adaptive engine is a new one for
each workload, so that it has learnt lengths from this workload only, and from its first batch on.
"""

from __future__ import annotations

import contextlib
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from psutil import virtual_memory

from benchmarks.bench.engines import BenchEngine, BenchSettings, engine_options, shared_profile
from benchmarks.bench.plot import plot_bench
from benchmarks.bench.report import content_of, markdown
from benchmarks.bench.runs import PAT, Run
from benchmarks.bench.serve import requests_of
from benchmarks.engine_process import EngineFailed
from benchmarks.record import machine, write_results
from pat_vllm.cli.demo_batch import model_config
from pat_vllm.profile import Profile
from pat_vllm.start.gpus import gib

tell = partial(print, flush=True)

_ADAPTIVE_MEMORY = 1.5
"""Memory of an engine with two layouts, at most, relative to one with the larger of them."""


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
    return {**static, PAT: {"policy": {"kind": "predictor", "length_bound": settings.max_tokens}}}


@dataclass(frozen=True)
class Measurements:
    """All runs, the profile that the adaptive engine decided by, and seconds of its starts: the
    first with the profile taken, the others with it at hand."""

    runs: tuple[Run, ...]
    profile: Profile
    start_seconds: Mapping[str, tuple[float, ...]]


def measure(settings: BenchSettings, config: Mapping[str, Any]) -> Measurements:
    """Serve all batches on all sides, in turns.

    Raises:
        EngineFailed: an engine failed; none is left running.
        ValueError: the model does not fit the workloads.
    """
    runs: list[Run] = []
    scratch = Path(tempfile.mkdtemp(prefix="pat-vllm-bench-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        all_sides: list[BenchEngine] = []
        taken = 0
        for name, pat in sides(settings).items():
            options = engine_options(settings, pat, config)
            side = BenchEngine(name, options, settings.ranks, scratch)
            stack.callback(side.close)
            all_sides.append(side)
            if name != PAT:
                tell(f"starting {name}")
                before = virtual_memory().available
                side.start()
                taken = max(taken, before - virtual_memory().available)
        # With two layouts it takes more than with one; what runs out of memory takes others along.
        if (left := virtual_memory().available) < _ADAPTIVE_MEMORY * taken:
            raise EngineFailed(
                f"a static engine took {gib(taken)} and {gib(left)} are left, which is too little "
                "for the adaptive one besides; free some memory or use a smaller --model"
            )
        for workload in settings.workloads:
            tell(f"{workload.name}: starting {PAT}")
            all_sides[-1].start()
            profile = shared_profile(scratch)
            for repeat in range(settings.repeats + 1):
                trace = settings.trace(workload, repeat)
                requests = requests_of(trace, config["vocab_size"], settings.seed + repeat)
                first = repeat % len(all_sides)
                for side in (*all_sides[first:], *all_sides[:first]):
                    tell(f"{workload.name}, batch {repeat} of {settings.repeats}: {side.name}")
                    runs.append(side.run(trace, repeat, requests))
    starts = {side.name: tuple(side.start_seconds) for side in all_sides}
    return Measurements(tuple(runs), profile, starts)


def bench(settings: BenchSettings, output_dir: Path, picture: Path | None) -> None:
    """Measure, print, and write JSON, Markdown and PNG.

    Raises:
        EngineFailed: an engine failed.
        ValueError: the model does not fit the workloads.
    """
    facts = machine()
    config = model_config(settings.model)
    content = content_of(settings, config, measure(settings, config))
    stem = write_results("bench", facts, content, markdown(content), output_dir)
    plot_bench(content, Path(f"{stem}.png"))
    if picture is not None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(f"{stem}.png", picture)
