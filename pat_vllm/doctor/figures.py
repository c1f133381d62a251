"""What the engines' figures say: each layout beside stock vLLM at its tp. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pat_vllm.doctor.steps import STOCK, Measured
from pat_vllm.doctor.values import Check
from pat_vllm.layout import Layout

REQUESTS = (1, 8)
"""Of a replica: one alone in the engine, or several in each."""
_MiB = 1 << 20


def figures(
    layouts: Sequence[Layout], pat: Measured, stock: Mapping[int, Measured], memory_of: str
) -> Iterator[Check]:
    """Decode steps and memory of each layout.

    Args:
        pat: of an engine with these layouts.
        stock: of an engine of stock vLLM, by its tp.
        memory_of: what `doctor_facts` calls memory, for people.
    """
    for layout in layouts:
        yield _steps(layout, pat, stock[layout.tp])
    for layout in layouts:
        yield _memory(layout, pat, stock[layout.tp], memory_of)


def _steps(layout: Layout, pat: Measured, stock: Measured) -> Check:
    ours = {one.requests: one for one in pat.steps if one.layout == str(layout)}
    theirs = {one.requests: one for one in stock.steps}
    texts, values = [], {}
    for requests, one in ours.items():
        other = theirs[requests]
        ratio = one.ms / other.ms
        label = "1 request alone" if requests == 1 else f"{requests} requests a replica"
        texts.append(f"{label} {one.ms:.2f} ms, stock {other.ms:.2f} ms ({ratio:.2f}x)")
        values[str(requests)] = {
            "ms": [one.low, one.ms, one.high],
            "stock_ms": [other.low, other.ms, other.high],
            "ratio": ratio,
        }
    return Check(f"decode step {layout}", "; ".join(texts), values=values)


def _memory(layout: Layout, pat: Measured, stock: Measured, memory_of: str) -> Check:
    weights = max(one["weights"][str(layout)] for one in pat.facts)
    sizes = [one["weights"][STOCK] for one in stock.facts]
    stock_weights = None if None in sizes else max(sizes)
    of_stock = "packed and not counted" if stock_weights is None else _mib(stock_weights)
    held = max(one["held"] for one in pat.facts)
    ours, theirs = (max(one["memory"] for one in side.facts) for side in (pat, stock))
    found = (
        f"a rank: weights {_mib(weights)}, stock {of_stock}; all layouts' weights "
        f"{_mib(held)}; {memory_of} {_mib(ours)} with all layouts, stock {_mib(theirs)}"
    )
    values = {
        "weights": weights,
        "stock_weights": stock_weights,
        "held": held,
        "memory": ours,
        "stock_memory": theirs,
    }
    return Check(f"memory {layout}", found, values=values)


def _mib(size: int) -> str:
    return f"{size / _MiB:,.1f} MiB" if size < 100 * _MiB else f"{size / _MiB:,.0f} MiB"
