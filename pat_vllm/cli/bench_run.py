"""`pat-vllm bench`: real engines, static and adaptive, take turns on the same batches.

The sides are engines that stay alive, each in a process of its own; they differ in PAT's options
and in nothing else. A workload's first batch warms them up; the adaptive engine is a new one for
each workload, so that it has learnt lengths from this workload only, and from its first batch on.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shutil
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
)

from pat_vllm.cli import random_model
from pat_vllm.cli.bench_stats import Run, Simulator, judge, set_simulator
from pat_vllm.cli.demo import demo_model
from pat_vllm.cli.engine_process import PARK_SECONDS, EngineFailed, EngineProcess
from pat_vllm.cli.engine_run import environment
from pat_vllm.cli.results import machine, results_dir, to_json
from pat_vllm.cli.workloads import BOUND, SCALES, Workload
from pat_vllm.config import PATConfig
from pat_vllm.layout import Layout
from pat_vllm.predictor.profile import Profile
from pat_vllm.predictor.profile_cache import CACHE_DIR
from pat_vllm.reporting import PredictorReport, Report
from pat_vllm.simulator.engine import Limits
from pat_vllm.simulator.traces import LengthTrace
from pat_vllm.simulator.truth import ProfileTruth

PAT = "PAT"
"""Name of the adaptive side."""

_BLOCK_TOKENS = 128
"""vLLM's KV block on CPUs; smaller on other platforms."""
_ADAPTIVE_MEMORY = 1.5
"""Memory of an engine with two layouts, at most, relative to one with the larger of them."""
_START_SECONDS = 900.0
_RUN_SECONDS = 900.0
"""An engine that takes longer is taken for dead."""


# -------------------------------------------------------------------- in the engine's process


@dataclass(frozen=True)
class Request:
    """A request: prompt token ids, tokens to generate, seconds after the beginning."""

    prompt: tuple[int, ...]
    length: int
    arrival: float


@dataclass(frozen=True)
class Served:
    """A served batch: seconds on the monotonic clock, tokens by request, the engine's report."""

    began: float
    ended: tuple[float, ...]
    tokens: tuple[int, ...]
    report: dict[str, Any]


def serve(llm: Any, requests: Sequence[Request], name: str) -> Served:
    """Serve requests as they arrive, neither less nor more tokens than each wants."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    from pat_vllm.api import report

    engine = llm.llm_engine
    # Like rollouts: at temperature 1 and unseeded. Only lengths have to be the same on all sides.
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=request.length,
            ignore_eos=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        for request in requests
    ]
    waiting = sorted(range(len(requests)), key=lambda i: requests[i].arrival, reverse=True)
    ended = [math.nan] * len(requests)
    tokens = [0] * len(requests)
    index: dict[str, int] = {}
    began = time.monotonic()
    while waiting or engine.has_unfinished_requests():
        now = time.monotonic() - began
        while waiting and requests[waiting[-1]].arrival <= now:
            i = waiting.pop()
            index[f"{name}-{i}"] = i
            prompt = {"prompt_token_ids": list(requests[i].prompt)}
            engine.add_request(f"{name}-{i}", prompt, params[i])
        if not engine.has_unfinished_requests():
            time.sleep(max(0.0, requests[waiting[-1]].arrival - (time.monotonic() - began)))
            continue
        for output in engine.step():
            if output.finished:
                i = index[output.request_id]
                ended[i] = time.monotonic()
                tokens[i] = len(output.outputs[0].token_ids)
    return Served(began, tuple(ended), tuple(tokens), report(llm).to_wire())


def requests_of(trace: LengthTrace, vocab: int, seed: int) -> tuple[Request, ...]:
    """Random prompts of a trace's sizes; requests of a group have the same."""
    first = min(len(random_model.SPECIAL_TOKENS), vocab - 1)

    def prompt(group: int, tokens: int) -> tuple[int, ...]:
        random = np.random.default_rng((seed, group))
        return tuple(int(token) for token in random.integers(first, vocab, size=tokens))

    return tuple(
        Request(prompt(group, tokens), length, arrival)
        for group, tokens, length, arrival in zip(
            trace.groups, trace.prompts, trace.lengths, trace.arrivals, strict=True
        )
    )


def run_of(
    side: str,
    trace: LengthTrace,
    repeat: int,
    served: Served,
    before: Report | None,
) -> Run:
    """What a batch was, cut out of the engine's history.

    Args:
        before: the engine's report after its last batch.
    """
    report = Report.from_wire(served.report)
    began, seconds = served.began, max(served.ended) - served.began
    expected = began + max(trace.arrivals)

    def during(at: float) -> bool:
        return began <= at <= began + seconds

    switches = tuple(
        s for s in report.switches if during(s.at) and (s.reason != "idle" or s.at < expected)
    )
    samples = [s for s in report.timeline if during(s.at)]
    layouts = [samples[0].layout if samples else report.layout, *(s.target for s in switches)]
    starts = [0.0, *(s.at - began for s in switches)]
    arrivals = zip(served.ended, trace.arrivals, strict=True)
    steps = {}
    for layout, now in report.steps.items():
        earlier = before.steps.get(layout) if before else None
        count = now.steps - (earlier.steps if earlier else 0)
        total = now.seconds - (earlier.seconds if earlier else 0.0)
        if count:
            steps[layout] = (count, total / count)
    past = before.predictor if before else PredictorReport()
    return Run(
        side=side,
        workload=trace.name,
        repeat=repeat,
        began=began,
        seconds=seconds,
        tokens=sum(served.tokens),
        response=sum(end - began - arrival for end, arrival in arrivals) / len(trace),
        exact=served.tokens == trace.lengths,
        ends=tuple(sorted(end - began for end in served.ended)),
        live=(*((s.at - began, s.live) for s in samples if s.live), (seconds, 0)),
        spans=tuple(zip(layouts, starts, [*starts[1:], seconds], strict=True)),
        switches=switches,
        decisions=tuple(d for d in report.predictor.decisions if during(d.at)),
        steps=steps,
        step_error=_since(report.predictor.step_error, past.step_error),
        plans=report.predictor.plans - past.plans,
        planning=report.predictor.planning - past.planning,
    )


def _since(
    now: Mapping[Layout, tuple[int, float]], before: Mapping[Layout, tuple[int, float]]
) -> dict[Layout, tuple[int, float]]:
    """Counts and means since then, from cumulative ones."""
    since = {}
    for layout, (count, mean) in now.items():
        earlier, earlier_mean = before.get(layout, (0, 0.0))
        if count > earlier:
            mean = (count * mean - earlier * earlier_mean) / (count - earlier)
            since[layout] = (count - earlier, mean)
    return since


# -------------------------------------------------------------------- engines


@dataclass(frozen=True)
class Plan:
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
    def bound(self) -> int:
        """Longest response, tokens."""
        return max(1, round(BOUND * SCALES[self.scale]))

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


def sides(plan: Plan) -> dict[str, dict[str, Any]]:
    """`additional_config["pat"]` of each side: every static layout, and the default policy.

    A static engine keeps only its own layout, so that all engines fit into the memory at once.
    """
    static: dict[str, dict[str, Any]] = {
        str(layout): {
            "policy": {"kind": "static", "tp": layout.tp},
            "layouts": [layout.tp],
            "base_tp": layout.tp,
        }
        for layout in plan.layouts
    }
    return {**static, PAT: {"policy": {"kind": "predictor", "length_bound": plan.bound}}}


def engine_options(plan: Plan, pat: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments of `vllm.LLM`: sides differ in `pat` and in nothing else.

    Args:
        pat: PAT's options, from `sides`.
        config: the model's.

    Raises:
        ValueError: the model's context is too short.
    """
    batches = [[p + n for p, n in zip(t.prompts, t.lengths, strict=True)] for t in plan.traces()]
    longest = max(max(contexts) for contexts in batches)
    limit = config.get("max_position_embeddings", longest)
    if longest > limit:
        raise ValueError(
            f"the workloads make a context of {longest} tokens, but {plan.model.name} allows "
            f"{limit}; use another --model or a smaller --scale"
        )
    heads = config.get("num_key_value_heads", config["num_attention_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    token_bytes = config["num_hidden_layers"] * heads * head_dim * 2 * 4
    # Room for a whole batch in one replica, so that no side preempts any.
    blocks = 8 + max(sum(math.ceil(n / _BLOCK_TOKENS) for n in contexts) for contexts in batches)
    return dict(
        model=str(plan.model),
        tensor_parallel_size=plan.ranks,
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
        self._report = Report.from_wire(served.report)
        time.sleep(PARK_SECONDS)
        return run

    def close(self) -> None:
        """End the engine."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None


@dataclass(frozen=True)
class Measured:
    """All runs, the profile that the adaptive engine decided by, and seconds of its starts: the
    first with the profile taken, the others with it at hand."""

    runs: tuple[Run, ...]
    profile: Profile
    start_seconds: Mapping[str, tuple[float, ...]]


def measure(plan: Plan, config: Mapping[str, Any], progress: Callable[[str], None]) -> Measured:
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
        for name, pat in sides(plan).items():
            options = engine_options(plan, pat, config)
            side = _Side(name, options, plan.ranks, scratch)
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
        for workload in plan.workloads:
            progress(f"{workload.name}: starting {PAT}")
            all_sides[-1].start()
            for repeat in range(plan.repeats + 1):
                trace = plan.trace(workload, repeat)
                requests = requests_of(trace, config["vocab_size"], plan.seed + repeat)
                first = repeat % len(all_sides)
                for side in (*all_sides[first:], *all_sides[:first]):
                    progress(f"{workload.name}, batch {repeat} of {plan.repeats}: {side.name}")
                    runs.append(side.run(trace, requests, repeat))
        profiles = sorted((scratch / "cache" / "profiles").glob("*.json"))
        if len(profiles) != 1:
            raise EngineFailed(f"expected the profile of one engine, found {len(profiles)}")
        profile = Profile.load(profiles[0])
    starts = {side.name: tuple(side.start_seconds) for side in all_sides}
    return Measured(tuple(runs), profile, starts)


def _free_memory() -> float:
    """Bytes that processes can still take; infinite where the system does not tell."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return math.inf
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    return float(next(found, math.inf)) * 1024


def rounds(plan: Plan) -> int:
    """How often `measure` tells its progress."""
    batches = (plan.repeats + 1) * len(sides(plan))
    return len(plan.layouts) + len(plan.workloads) * (1 + batches)


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
    from pat_vllm.cli.bench_plot import plot_bench
    from pat_vllm.cli.bench_report import content_of, markdown
    from pat_vllm.cli.demo import _model_config

    if scale not in SCALES:
        raise ValueError(f"--scale is {scale!r}; allowed are {', '.join(SCALES)}")
    own = model is None
    if model is None:
        with console.status("making a random model"):
            model = demo_model(models_dir)
    plan = Plan(model.resolve(), ranks, workloads, repeats, scale, seed)
    facts = machine(_command(plan, own), Path(__file__).parent)
    config = _model_config(model)
    with _progress(console, rounds(plan)) as progress:
        measured = measure(plan, config, progress)
    layouts = plan.layouts
    judged = {}
    with console.status("judging by the oracle") as status:
        for workload in workloads:
            status.update(f"judging {workload.name} by the oracle")
            judged[workload.name] = judge_workload(plan, workload, measured, layouts)
    content = content_of(plan, facts, config, measured, judged)

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
    plan: Plan, workload: Workload, measured: Measured, layouts: Sequence[Layout]
) -> tuple[Simulator, list[Any]]:
    """The simulator, set to this workload's static runs, and a judgement of every PAT batch."""
    by_side: defaultdict[str, list[Run]] = defaultdict(list)
    for run in measured.runs:
        if run.workload == workload.name and run.repeat:
            by_side[run.side].append(run)
    traces = [plan.trace(workload, run.repeat) for run in by_side[PAT]]
    simulator = set_simulator(
        ProfileTruth(measured.profile),
        Limits.of(measured.profile),
        traces,
        {layout: [run.seconds for run in by_side[str(layout)]] for layout in layouts},
        [switch for run in by_side[PAT] for switch in run.switches],
    )
    pairs = zip(traces, by_side[PAT], strict=True)
    return simulator, [judge(trace, run, simulator) for trace, run in pairs]


@contextlib.contextmanager
def _progress(console: Console, total: int) -> Iterator[Callable[[str], None]]:
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


def _command(plan: Plan, own_model: bool) -> str:
    """The command line, without the places of this machine."""
    given = {
        "--model": None if own_model else plan.model.name,
        "--ranks": plan.ranks,
        "--repeats": plan.repeats,
        "--workloads": ",".join(workload.name for workload in plan.workloads),
        "--scale": plan.scale,
        "--seed": plan.seed,
    }
    words = [f"{name} {value}" for name, value in given.items() if value is not None]
    return " ".join(["pat-vllm bench", *words])


def plain_run(run: Run, timeline: bool) -> dict[str, Any]:
    """A run for the file of results; absolute times become times since its beginning."""

    def moved(one: Any) -> dict[str, Any]:
        values = {f.name: getattr(one, f.name) for f in dataclasses.fields(one)}
        for name, value in values.items():
            if isinstance(value, Layout):
                values[name] = str(value)
            elif isinstance(value, float):
                values[name] = round(value - (run.began if name == "at" else 0.0), 6)
        return values

    def by_layout(values: Mapping[Layout, tuple[int, float]] | None) -> dict[str, list[float]]:
        return {str(one): [n, round(mean, 6)] for one, (n, mean) in (values or {}).items()}

    plain: dict[str, Any] = {
        "side": run.side,
        "repeat": run.repeat,
        "seconds": run.seconds,
        "tokens": run.tokens,
        "response": run.response,
        "exact": run.exact,
        "steps": by_layout(run.steps),
    }
    if run.side == PAT:
        plain |= {
            "spans": [[str(one), round(a, 4), round(b, 4)] for one, a, b in run.spans],
            "switches": [moved(switch) for switch in run.switches],
            "decisions": [moved(decision) for decision in run.decisions],
            "step_error": by_layout(run.step_error),
            "plans": run.plans,
            "planning": run.planning,
        }
    if timeline:
        plain["live"] = [[round(at, 3), live] for at, live in run.live]
    return plain
