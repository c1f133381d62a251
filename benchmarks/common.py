"""What the benchmarks share: models, engines in child processes, machine facts, results.

Nothing here imports vLLM or torch at module level: the environment that binds an engine to cores
has to be set before.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"

ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
"""What every engine gets, whichever side it is on."""

MODELS: dict[str, dict[str, Any]] = {
    # Qwen3-0.6B's shape.
    "qwen3-0.6b": dict(
        arch="qwen3",
        hidden=1024,
        layers=28,
        heads=16,
        kv_heads=8,
        head_dim=128,
        intermediate=3072,
        vocab=151_936,
        tie=True,
        dtype="bfloat16",
        max_position_embeddings=4096,
    ),
    # A third of a billion parameters, with half of the above's KV heads' width.
    "qwen3-0.3b": dict(
        arch="qwen3",
        hidden=1024,
        layers=24,
        heads=16,
        kv_heads=8,
        head_dim=64,
        intermediate=3072,
        vocab=32_000,
        tie=True,
        dtype="bfloat16",
        max_position_embeddings=4096,
    ),
    # A step of tens of milliseconds on one core, so that overheads show as on a fast device.
    "qwen3-100m": dict(
        arch="qwen3",
        hidden=768,
        layers=12,
        heads=12,
        kv_heads=4,
        head_dim=64,
        intermediate=2048,
        vocab=32_000,
        dtype="bfloat16",
        max_position_embeddings=4096,
    ),
    # For schedulers, which only read its config.
    "qwen3-8-heads": dict(arch="qwen3", kv_heads=8, max_position_embeddings=16_384),
}

PARK_SECONDS = 1.5
"""vLLM's idle readers spin for 1 s before they park; engines that wait must not take a core."""


def model(name: str) -> str:
    """Path of a random checkpoint from `MODELS`, built on first use under `.models/`."""
    from pat_vllm.cli.random_model import make_model

    path = ROOT / ".models" / name
    if not path.is_dir():
        scratch = path.with_name(f".{name}.{os.getpid()}")
        make_model(scratch, **MODELS[name])
        scratch.rename(path)
    return str(path)


def random_prompts(count: int, length: int, seed: int) -> list[dict[str, list[int]]]:
    """Prompts of random tokens, so that no two share a prefix."""
    import random

    rng = random.Random(seed)
    return [
        {"prompt_token_ids": [rng.randrange(300, 4000) for _ in range(length)]}
        for _ in range(count)
    ]


# -------------------------------------------------------------------- engines


class Engine:
    """An `LLM` in a process of its own, which runs functions on command.

    Several can be kept alive, so that the sides of a comparison alternate while each pays for its
    start once.
    """

    def __init__(self, options: Mapping[str, Any], bind: str) -> None:
        """`options` go to `LLM`; `bind` is `VLLM_CPU_OMP_THREADS_BIND`."""
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        environment = {**ENVIRONMENT, "VLLM_CPU_OMP_THREADS_BIND": bind}
        self._process = context.Process(target=_serve, args=(theirs, environment, dict(options)))
        self._process.start()
        theirs.close()

    def wait_until_ready(self) -> float:
        """Seconds that `LLM(...)` took."""
        return self.result()

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Begin `function(llm, *args)` in the engine's process."""
        self._pipe.send((function, args))

    def result(self) -> Any:
        """What the function returned.

        Raises:
            RuntimeError: it failed; has the child's traceback.
        """
        succeeded, value = self._pipe.recv()
        if not succeeded:
            raise RuntimeError(f"the engine's process failed:\n{value}")
        return value

    def call(self, function: Callable[..., Any], *args: Any) -> Any:
        """`start` and `result`."""
        self.start(function, *args)
        return self.result()

    def close(self) -> None:
        """Shut the engine down."""
        with contextlib.suppress(OSError):
            self._pipe.send(None)
        self._process.join(60)
        if self._process.is_alive():
            self._process.kill()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _serve(pipe: Any, environment: Mapping[str, str], options: dict[str, Any]) -> None:
    os.environ.update(environment)
    try:
        begun = time.perf_counter()
        from vllm import LLM

        imported = time.perf_counter()
        llm = LLM(**options)
        pipe.send((True, time.perf_counter() - (imported if imported > begun else begun)))
        while (order := pipe.recv()) is not None:
            function, args = order
            pipe.send((True, function(llm, *args)))
    except EOFError:
        pass
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    finally:
        if "llm" in locals():
            llm.llm_engine.engine_core.shutdown()


def generate(
    llm: Any, prompts: Sequence[Any], new_tokens: int, begin_at: float | None = None
) -> tuple[float, float]:
    """Run a batch of fixed lengths; returns when it began and ended, on the monotonic clock.

    Args:
        begin_at: wait for this moment, so that several engines begin together.
    """
    from vllm import SamplingParams

    params = SamplingParams(
        temperature=1.0, max_tokens=new_tokens, ignore_eos=True, detokenize=False
    )
    while begin_at is not None and (left := begin_at - time.monotonic()) > 0:
        time.sleep(min(left, 1e-3))
    begun = time.monotonic()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    ended = time.monotonic()
    assert all(len(output.outputs[0].token_ids) == new_tokens for output in outputs)
    return begun, ended


def busy_cores(seconds: float = 1.0) -> float:
    """How many cores the whole machine keeps busy while this process sleeps."""

    def busy() -> float:
        fields = Path("/proc/stat").read_text().splitlines()[0].split()[1:]
        ticks = [int(f) for f in fields]
        return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")

    before = busy()
    time.sleep(seconds)
    return (busy() - before) / seconds


# -------------------------------------------------------------------- memory bandwidth


def memcpy_bandwidth(cores: Sequence[int], num_bytes: int = 64 << 20) -> float:
    """Bytes per second that one copying process per core moves, all at the same time."""
    context = multiprocessing.get_context("spawn")
    begin_at = time.monotonic() + 3.0
    with context.Pool(len(cores)) as pool:
        rates = pool.starmap(_copy_rate, [(core, num_bytes, begin_at) for core in cores], 1)
    return sum(rates)


def _copy_rate(core: int, num_bytes: int, begin_at: float) -> float:
    import numpy as np

    os.sched_setaffinity(0, {core})
    source = np.ones(num_bytes, np.uint8)
    target = np.ones(num_bytes, np.uint8)
    while time.monotonic() < begin_at:
        time.sleep(1e-3)
    times = []
    for _ in range(15):
        begun = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - begun)
    return num_bytes / statistics.median(times)


# -------------------------------------------------------------------- results


@dataclass(frozen=True)
class Summary:
    """Repeats of one quantity: median and spread."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> Summary:
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values), len(values))

    def show(self, scale: float = 1.0, digits: int = 1) -> str:
        """Like `12.3 (11.9-13.0)`."""
        one, low, high = (f"{v * scale:.{digits}f}" for v in (self.median, self.low, self.high))
        return f"{one} ({low}-{high})"


def ratios(ours: Sequence[float], theirs: Sequence[float]) -> Summary:
    """Ratio of each pair of neighbouring repeats: what the machine does meanwhile cancels out."""
    return Summary.of([a / b for a, b in zip(ours, theirs, strict=True)])


def machine() -> dict[str, Any]:
    """Where and with what a measurement was made."""
    cpu = next(
        (
            line.split(":", 1)[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if line.startswith("model name")
        ),
        platform.processor(),
    )
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", _module(), *sys.argv[1:]]),
        "commit": commit,
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "vllm": version("vllm-cpu"),
        "torch": version("torch"),
    }


def _module() -> str:
    return f"benchmarks.{Path(sys.argv[0]).stem}"


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def write_results(name: str, facts: Mapping[str, Any], body: Mapping[str, Any], text: str) -> None:
    """Write `results/DATE-name.json` and `.md`, and print the latter."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    stem = RESULTS / f"{facts['date'][:10]}-{name}"
    data = json.dumps({"machine": dict(facts), **body}, indent=1, default=vars) + "\n"
    # Models lie under this repository; where that lies is nobody's business.
    Path(f"{stem}.json").write_text(data.replace(f"{ROOT}/", ""))
    where = (
        f"{facts['date']}, commit {facts['commit']}: {facts['cores']} cores of {facts['cpu']}, "
        f"{facts['memory_gib']} GiB, vLLM {facts['vllm']}, torch {facts['torch']}.\n"
        f"`{facts['command']}`\n"
    )
    text = f"# {name}\n\n{where}\n{text}"
    Path(f"{stem}.md").write_text(text)
    print(text)
