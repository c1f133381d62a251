"""Where a measurement was made, and a page for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
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
    """The results as a page: the parts that were measured, in order."""
    facts = results["machine"]
    about = ", ".join(f"{k} {v}" for k, v in facts.items() if k not in ("command", "date"))
    text = [f"# GPU measurements\n\n{facts['date']}: {about}.\n`{facts['command']}`\n"]
    if facts["device"] == "CPU":
        text.append("**Tiny shapes on CPU: this shows that the measurement runs, and no more.**\n")
    for name, section in _SECTIONS.items():
        if name in results:
            text.append("\n".join(section(results[name])))
    return "\n".join(text)


def _ceiling(part: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"## Ceilings\n\nCopy {part['copy_bytes_per_second'] / 1e9:,.0f} GB/s, swap in place "
        f"{part['swap_bytes_per_second'] / 1e9:,.0f} GB/s: bytes read plus bytes written, best of "
        "the large ones. Shares below are of the copy.\n"
    )
    if len(part["gpus"]) > 1:
        rates = ", ".join(_rate(rate) for rate in part["gpus"])
        yield f"Copies on each GPU: {rates} GB/s.\n"
    yield record.table(
        ("MiB", "copy GB/s", "swap GB/s"),
        [
            (
                f"{row['bytes'] / 2**20:g}",
                _rate(row["copy_bytes_per_second"]),
                _rate(row["swap_bytes_per_second"]),
            )
            for row in part["rows"]
        ],
    )


def _reshard(part: Mapping[str, Any]) -> Iterator[str]:
    yield (
        "## In-place reshard\n\nRows of all layers' fused matrices trade places; the slowest of "
        "the ranks and ways measured. Restored byte for byte at the end of every walk.\n"
    )
    yield record.table(
        ("model", "layouts", "ms", "GB moved", "share of copy"),
        [
            (
                row["model"],
                f"tp {row['source']} to {row['target']}",
                _spread(row),
                f"{row['bytes_read_and_written'] / 1e9:.2f}",
                f"{row['share_of_copy']:.0%}",
            )
            for row in _slowest(part["rows"], ("model", "source", "target"))
        ],
    )


def _kv(part: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"## Packing and unpacking KV\n\nAll layers of {part['model']}, one launch per layer; the "
        "slower of the two directions."
    )
    if part["more_than_fits"]:
        yield f"Left out, as more than fits: {', '.join(part['more_than_fits'])} tokens."
    yield ""
    yield record.table(
        ("requests x tokens", "what", "block", "GB moved", "ms", "share of copy"),
        [
            (
                f"{row['requests']} x {row['tokens']}",
                row["what"],
                row["cache_layout"],
                f"{row['bytes_read_and_written'] / 1e9:.2f}",
                _spread(row),
                f"{row['share_of_copy']:.0%}",
            )
            for row in _slowest(part["rows"], ("requests", "tokens", "what", "cache_layout"))
        ],
    )


def _engines(part: Mapping[str, Any]) -> Iterator[str]:
    yield (
        f"## Engines\n\nRandom model {part['shape']}. Milliseconds between two tokens of a "
        "request, timed in the front end: one alone, or several in each replica. Stock vLLM has "
        "the layout's tp, and one replica.\n"
    )
    yield record.table(
        ("layout", "requests a replica", "ms", "stock vLLM, ms", "ratio"),
        [
            (
                row["layout"],
                "one alone" if row["requests"] == 1 else row["requests"],
                _spread(row),
                _spread({name: row[f"stock_{name}"] for name in ("ms", "low_ms", "high_ms")}),
                f"{row['ratio']:.2f}",
            )
            for row in part["steps"]
        ],
    )
    yield f"MiB of the rank with most; memory is that {part['memory_of']}.\n"
    columns = ("weights", "stock_weights", "held", "memory", "stock_memory")
    names = ("weights", "stock vLLM's", "of all layouts", "memory", "stock vLLM's")
    yield record.table(
        ("layout", *names),
        [(row["layout"], *(_mib(row[name]) for name in columns)) for row in part["memory"]],
    )


_SECTIONS = {
    "ceiling": _ceiling,
    "reshard": _reshard,
    "kv": _kv,
    "engines": _engines,
}


def _slowest(rows: Sequence[Mapping[str, Any]], by: Sequence[str]) -> list[Mapping[str, Any]]:
    slowest: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        key = tuple(row[name] for name in by)
        if key not in slowest or row["ms"] > slowest[key]["ms"]:
            slowest[key] = row
    return list(slowest.values())


def _spread(row: Mapping[str, Any]) -> str:
    return f"{row['ms']:.3f} ({row['low_ms']:.3f}-{row['high_ms']:.3f})"


def _mib(size: int | None) -> str:
    return "packed" if size is None else f"{size / 2**20:,.1f}"


def _rate(rate: float) -> str:
    return f"{rate / 1e9:,.0f}"
