"""Where a measurement was made, and a page for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

from benchmarks import record


def machine(device: torch.device) -> dict[str, Any]:
    """Facts about the device and the software."""
    facts = {**record.machine(), "device": "CPU"}
    with suppress(PackageNotFoundError):
        facts["triton"] = version("triton")
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {
            "device": properties.name,
            "capability": f"{properties.major}.{properties.minor}",
            "multiprocessors": properties.multi_processor_count,
            "memory_gib": round(properties.total_memory / 2**30, 1),
            "l2_mib": round(properties.L2_cache_size / 2**20, 1),
            "cuda": torch.version.cuda,
        }
    return facts


def markdown(results: Mapping[str, Any]) -> str:
    """The results as a page: the machine, then each part, what it says and its `tables`."""
    facts = results["machine"]
    about = ", ".join(f"{k} {v}" for k, v in facts.items() if k not in ("command", "date"))
    text = [f"# GPU measurements\n\n{facts['date']}: {about}.\n`{facts['command']}`\n"]
    if facts["device"] == "CPU":
        text.append("**Tiny shapes on CPU: this shows that the measurement runs, and no more.**\n")
    for name, part in results.items():
        if name != "machine":
            text.append(f"## {name}\n\n{part['about']}\n")
            text += map(_table, part["tables"])
    return "\n".join(text)


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    return record.table([*rows[0]], [[*map(_cell, row.values())] for row in rows])


def _cell(value: object) -> str:
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def slowest(rows: Iterable[Mapping[str, Any]], by: Sequence[str]) -> list[Mapping[str, Any]]:
    """Of rows that are alike in some columns the one with most `ms`."""
    found: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in by)
        if key not in found or row["ms"] > found[key]["ms"]:
            found[key] = row
    return list(found.values())
