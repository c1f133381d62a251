"""What speculation is worth to the long tail of a batch: every fixed layout and draft length."""

from __future__ import annotations

from typing import Any

from benchmarks.common import Engine, Summary, table
from benchmarks.speculation.engines import (
    BIND,
    Batch,
    Served,
    flags,
    ngram,
    pat,
    repeating_prompts,
    serve,
)
from benchmarks.speculation.paired import Cell, grid, room, shuffled
from pat_vllm.layout import Layout

TEMPERATURE = 1.0
LONGEST = 7


def measure(
    name: str, live: tuple[int, ...], new_tokens: int, repeats: int
) -> tuple[dict[str, Any], str]:
    """Time batches of few long responses in each layout with each draft length.

    One engine, which keeps them all ready; the order of layouts and lengths is another one in each
    repeat.

    Args:
        live: numbers of responses, of a batch each.
        new_tokens: of each response.
    """
    from pat_vllm.speculation import draft_lengths

    lengths = draft_lengths(LONGEST, None)
    settings = grid((1, 2), lengths)
    body: dict[str, Any] = {}
    text = (
        f"Model {name}, responses of {new_tokens} tokens, temperature {TEMPERATURE:g}; seconds of "
        f"a batch, median (low-high) of {repeats}, and the accepted share of the draft tokens. "
        f"n-grams, `num_speculative_tokens` {LONGEST}.\n\n"
    )
    with Engine(flags(name) | ngram(LONGEST) | pat(1), BIND) as engine:
        engine.wait_until_ready()
        for count in live:
            served: dict[tuple[int, int], list[Served]] = {one: [] for one in settings}
            for repeat in range(repeats + 1):
                prompts = repeating_prompts(name, count, seed=repeat)
                for tp, length in shuffled(settings, seed=repeat):
                    # The first ones warm up.
                    tokens = new_tokens if repeat else min(32, new_tokens)
                    batch = Batch(prompts, tokens, TEMPERATURE, length, tp)
                    one: Served = engine.call(serve, batch)
                    if repeat:
                        served[tp, length].append(one)
            cells = [_cell(tp, length, served[tp, length]) for tp, length in settings]
            best, plain, ratio = room(cells)
            body[f"{count} responses"] = {
                "cells": cells,
                "best": [best.layout, best.length],
                "best_without": plain.layout,
                "ratio": ratio,
            }
            text += f"## {count} responses\n\n" + _table(cells) + "\n"
            text += (
                f"Best is {best.layout} with draft length {best.length}: {ratio.show()} of the "
                f"time of {plain.layout}, which is best without drafts.\n\n"
            )
    return body, text


def _cell(tp: int, length: int, served: list[Served]) -> Cell:
    drafted = sum(one.drafted for one in served)
    accepted = sum(one.accepted for one in served)
    assert bool(drafted) == bool(length)
    seconds = tuple(one.ended - one.began for one in served)
    return Cell(str(Layout.of(tp, 2)), length, seconds, accepted / drafted if drafted else None)


def _table(cells: list[Cell]) -> str:
    lengths = sorted({cell.length for cell in cells})
    rows = []
    for layout in dict.fromkeys(cell.layout for cell in cells):
        row = [layout]
        for length in lengths:
            cell = next(c for c in cells if (c.layout, c.length) == (layout, length))
            share = "" if cell.accepted is None else f"; {cell.accepted:.2f}"
            row.append(Summary.of(cell.seconds).show(digits=2) + share)
        rows.append(row)
    return table(["layout", f"draft length {lengths[0]}", *map(str, lengths[1:])], rows)
