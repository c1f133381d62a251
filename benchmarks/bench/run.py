"""`python -m benchmarks.bench`: real engines, static and adaptive, take turns on the same batches.

The sides are engines that stay alive, each in a process of its own; they differ in PAT's options
and in nothing else. A workload's first batch warms them up; the adaptive engine is a new one for
each workload, so that it has learnt lengths from this workload only, and from its first batch on.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from benchmarks.bench.calibrated import CalibratedSimulator, calibrate_simulator
from benchmarks.bench.judgement import Judgement, judge
from benchmarks.bench.report import content_of, markdown
from benchmarks.bench.runs import PAT, Run
from benchmarks.bench.serve import Request, Served, requests_of, run_of, serve
from benchmarks.bench.workloads import SCALES, Workload
from benchmarks.engine_process import PARK_SECONDS, EngineFailed, EngineProcess
from benchmarks.record import machine, results_dir
from pat_vllm.child import environment
from pat_vllm.cli.demo import demo_model, model_config
from pat_vllm.cli.results import to_json
from pat_vllm.config import PATConfig
from pat_vllm.layout import Layout
from pat_vllm.profiling.cache import CACHE_DIR
from pat_vllm.profiling.profile import Profile
from pat_vllm.reporting import Report
from pat_vllm.simulator.replica import ReplicaCapacity
from pat_vllm.simulator.traces import LengthTrace
from pat_vllm.simulator.truth import ReplayedTruth

_BLOCK_TOKENS = 128
"""vLLM's KV block on CPUs; smaller on other platforms."""
_ADAPTIVE_MEMORY = 1.5
"""Memory of an engine with two layouts, at most, relative to one with the larger of them."""
_START_SECONDS = 900.0
_RUN_SECONDS = 900.0
"""An engine that takes longer is taken for dead."""


# -------------------------------------------------------------------- engines


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
        longest = max(workload.longest for workload in self.workloads)
        return max(1, round(longest * SCALES[self.scale]))

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


def engine_options(
    settings: BenchSettings, pat: Mapping[str, Any], config: Mapping[str, Any], drafts: int = 0
) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`: sides differ in `pat` and in nothing else.

    Args:
        pat: PAT's options, from `sides`.
        config: the model's.
        drafts: of a request's step, for which there has to be room.

    Raises:
        ValueError: the model's context is too short.
    """
    batches = [
        [p + n + drafts for p, n in zip(t.num_prompt_tokens, t.lengths, strict=True)]
        for t in settings.traces()
    ]
    longest = max(max(contexts) for contexts in batches)
    limit = config.get("max_position_embeddings", longest)
    if longest > limit:
        raise ValueError(
            f"the workloads make a context of {longest} tokens, but {settings.model.name} allows "
            f"{limit}; use another --model or a smaller --scale"
        )
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = config["num_hidden_layers"] * heads * head_dim * 2 * 4
    # Room for a whole batch in one replica, so that no side preempts any.
    blocks = 8 + max(sum(math.ceil(n / _BLOCK_TOKENS) for n in contexts) for contexts in batches)
    return dict(
        model=str(settings.model),
        tensor_parallel_size=settings.ranks,
        distributed_executor_backend="pat",
        additional_config={"pat": dict(pat)},
        dtype="float32",
        enforce_eager=True,
        max_model_len=longest,
        max_num_seqs=max(len(contexts) for contexts in batches),
        kv_cache_memory_bytes=blocks * _BLOCK_TOKENS * token_bytes,
        skip_tokenizer_init=True,
    )


class _Side:
    """An engine that takes its turns; started anew on request."""

    def __init__(self, name: str, options: dict[str, Any], ranks: int, scratch: Path) -> None:
        self.name = name
        self.start_seconds: list[float] = []
        self._options, self._scratch = options, scratch
        # A cache of its own: the profile is this benchmark's, taken at the first start.
        self._environment = {**environment(ranks), CACHE_DIR: str(scratch / "cache")}
        self._engine: EngineProcess | None = None
        self._report: Report | None = None

    def start(self) -> None:
        """Start the engine, or a new one in its place."""
        self.close()
        log = self._scratch / f"{self.name}.log"
        self._engine = EngineProcess(self._options, self._environment, log)
        self.start_seconds.append(self._engine.result(_START_SECONDS))
        self._report = None
        time.sleep(PARK_SECONDS)

    def run(self, trace: LengthTrace, requests: Sequence[Request], repeat: int) -> Run:
        """Serve a batch, and wait until the engine takes no core any more."""
        assert self._engine is not None
        name = f"{trace.name}-{repeat}"
        served: Served = self._engine.call(serve, requests, name, timeout=_RUN_SECONDS)
        run = run_of(self.name, trace, repeat, served, self._report)
        if not run.exact:
            raise EngineFailed(f"{self.name}, {name}: a response does not have its length")
        self._report = served.report
        time.sleep(PARK_SECONDS)
        return run

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


@dataclass(frozen=True)
class Measurements:
    """All runs, the profile that the adaptive engine decided by, and seconds of its starts: the
    first with the profile taken, the others with it at hand."""

    runs: tuple[Run, ...]
    profile: Profile
    start_seconds: Mapping[str, tuple[float, ...]]


def measure(
    settings: BenchSettings, config: Mapping[str, Any], progress: Callable[[str], None]
) -> Measurements:
    """Serve all batches on all sides, in turns.

    Args:
        progress: is told what is done next, before each start and each batch.

    Raises:
        EngineFailed: an engine failed; none is left running.
        ValueError: the model does not fit the workloads.
    """
    runs: list[Run] = []
    scratch = Path(tempfile.mkdtemp(prefix="pat-vllm-bench-"))
    with contextlib.ExitStack() as stack:
        stack.callback(shutil.rmtree, scratch, ignore_errors=True)
        all_sides: list[_Side] = []
        taken = 0.0
        for name, pat in sides(settings).items():
            options = engine_options(settings, pat, config)
            side = _Side(name, options, settings.ranks, scratch)
            stack.callback(side.close)
            all_sides.append(side)
            if name != PAT:
                progress(f"starting {name}")
                before = _free_memory()
                side.start()
                taken = max(taken, before - _free_memory() if before < math.inf else 0.0)
        # With two layouts it takes more than with one; what runs out of memory takes others along.
        if _free_memory() < _ADAPTIVE_MEMORY * taken:
            raise EngineFailed(
                f"a static engine took {taken / 2**30:.1f} GiB and {_free_memory() / 2**30:.1f} "
                "are left, which is too little for the adaptive one besides; free some memory or "
                "use a smaller --model"
            )
        for workload in settings.workloads:
            progress(f"{workload.name}: starting {PAT}")
            all_sides[-1].start()
            profile = _profile(scratch)
            for repeat in range(settings.repeats + 1):
                trace = settings.trace(workload, repeat)
                requests = requests_of(trace, config["vocab_size"], settings.seed + repeat)
                first = repeat % len(all_sides)
                for side in (*all_sides[first:], *all_sides[:first]):
                    progress(f"{workload.name}, batch {repeat} of {settings.repeats}: {side.name}")
                    runs.append(side.run(trace, requests, repeat))
    starts = {side.name: tuple(side.start_seconds) for side in all_sides}
    return Measurements(tuple(runs), profile, starts)


def _profile(scratch: Path) -> Profile:
    """The one that the adaptive engines share."""
    profiles = sorted((scratch / "cache" / "profiles").glob("*.json"))
    if len(profiles) != 1:
        raise EngineFailed(
            f"expected the profile of one engine, found {len(profiles)}; a noisy or incomplete one "
            "is not kept, so let nothing else run on this machine"
        )
    return Profile.load(profiles[0])


def _free_memory() -> float:
    """Bytes that processes can still take; infinite where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return float(next(found, math.inf)) * 1024


def rounds(settings: BenchSettings) -> int:
    """How often `measure` tells its progress."""
    batches = (settings.repeats + 1) * len(sides(settings))
    return len(settings.layouts) + len(settings.workloads) * (1 + batches)


# -------------------------------------------------------------------- the command


def bench(
    console: Console,
    *,
    model: Path | None,
    models_dir: Path,
    ranks: int,
    repeats: int,
    workloads: tuple[Workload, ...],
    scale: str,
    seed: int,
    output_dir: Path | None,
    picture: Path | None,
) -> Path:
    """Measure, judge, print, and write JSON, Markdown and PNG.

    Returns:
        The JSON file.

    Raises:
        EngineFailed: an engine failed.
        ValueError: an option does not fit.
    """
    from benchmarks.bench.plot import plot_bench

    own = model is None
    if model is None:
        with console.status("making a random model"):
            model = demo_model(models_dir)
    settings = BenchSettings(model.resolve(), ranks, workloads, repeats, scale, seed)
    facts = machine(command_of(settings, own), Path(__file__).parent)
    config = model_config(model)
    with progress_of(console, rounds(settings)) as progress:
        measured = measure(settings, config, progress)
    layouts = settings.layouts
    judged = {}
    with console.status("judging by the clairvoyant") as status:
        for workload in workloads:
            status.update(f"judging {workload.name} by the clairvoyant")
            judged[workload.name] = judge_workload(settings, workload, measured, layouts)
    content = content_of(settings, facts, config, measured, judged)

    directory = results_dir(output_dir)
    directory.mkdir(parents=True, exist_ok=True)
    stem = directory / f"{facts['date'][:10]}-bench"
    path = Path(f"{stem}.json")
    path.write_text(to_json(content))
    text = markdown(content)
    Path(f"{stem}.md").write_text(text)
    plot_bench(content, Path(f"{stem}.png"))
    if picture is not None:
        picture.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(f"{stem}.png", picture)
    console.print(text, soft_wrap=True, markup=False)
    console.print(f"written: {stem}.json, .md, .png", soft_wrap=True)
    return path


def judge_workload(
    settings: BenchSettings, workload: Workload, measured: Measurements, layouts: Sequence[Layout]
) -> tuple[CalibratedSimulator, list[Judgement]]:
    """The simulator, calibrated with this workload's static runs, and judgements of PAT's."""
    by_side: defaultdict[str, list[Run]] = defaultdict(list)
    for run in measured.runs:
        if run.workload == workload.name and run.repeat:
            by_side[run.side].append(run)
    traces = [settings.trace(workload, run.repeat) for run in by_side[PAT]]
    simulator = calibrate_simulator(
        ReplayedTruth(measured.profile),
        ReplicaCapacity.of(measured.profile),
        traces,
        {layout: [run.seconds for run in by_side[str(layout)]] for layout in layouts},
        [switch for run in by_side[PAT] for switch in run.switches],
    )
    pairs = zip(traces, by_side[PAT], strict=True)
    return simulator, [judge(trace, run, simulator) for trace, run in pairs]


@contextlib.contextmanager
def progress_of(console: Console, total: int) -> Iterator[Callable[[str], None]]:
    """Shows progress: what it gives is told what comes next, `total` times."""
    columns = (
        BarColumn(bar_width=20),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}"),
    )
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("", total=total, completed=-1)

        def tell(text: str) -> None:
            progress.update(task, description=text, advance=1)
            if not console.is_terminal:
                console.print(text)

        yield tell


def command_of(settings: BenchSettings, own_model: bool) -> str:
    """The command line, without the places of this machine."""
    named = [one.name for one in settings.workloads if one.option is None]
    given = {
        "--model": None if own_model else settings.model.name,
        "--ranks": settings.ranks,
        "--repeats": settings.repeats,
        "--workloads": ",".join(named) or None,
        "--scale": settings.scale,
        "--seed": settings.seed,
    }
    words = [f"{name} {value}" for name, value in given.items() if value is not None]
    words += [one.option for one in settings.workloads if one.option is not None]
    return " ".join(["python -m benchmarks.bench", *words])
