"""Replay with the suffix tree of arctic-inference, in an environment of its own.

    python -m benchmarks.rollouts.oracle .models/rollouts/rollouts.npz

`arctic_inference.suffix_decoding` has to be importable. The package's own build wants torch and
compiles more; of its source distribution (0.3.0) the tree alone is built by
`cmake -S csrc/suffix_decoding`, with nanobind, and goes to `arctic_inference/suffix_decoding`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import machine, write_results
from benchmarks.record import table
from benchmarks.rollouts.records import Response, Rollouts

TREE_DEPTH = 24
"""As vLLM's default for its method `suffix`."""
AS_SHIPPED = dict(max_spec_factor=1.0, min_token_prob=0.1)
AT_LENGTH = dict(max_spec_factor=1.0, max_spec_offset=64.0, min_token_prob=0.0)
"""As many tokens as the tree knows, however short the match or unlikely the token."""


def oracle_epoch(
    rollouts: Rollouts, epoch: int, visits: int, siblings: bool, k: int, options: dict[str, float]
) -> np.ndarray:
    """An epoch's rollout in lockstep, as `replay_epoch`.

    Returns:
        int64 `[4]`: tokens of decode steps, decode steps, draft tokens verified, accepted.
    """
    epochs = rollouts.epochs
    total = np.zeros(4, np.int64)
    for index, prompt in enumerate(rollouts.prompts):
        live = [one for one in epochs[epoch] if one.prompt == index]
        before = epochs[max(0, epoch - visits) : epoch]
        past = [one for done in before for one in done if one.prompt == index]
        total += _prompt(prompt, live, past, siblings, k, options)
    return total


def _prompt(
    prompt: np.ndarray,
    live: Sequence[Response],
    past: Sequence[Response],
    siblings: bool,
    k: int,
    options: dict[str, float],
) -> np.ndarray:
    # A tree for all, or one for each request if it may not see the others.
    first = _cache(prompt, past, bool(past) or siblings)
    caches = [first if siblings else _cache(prompt, past, bool(past)) for _ in live]
    rows = [np.concatenate([prompt, one.tokens]).astype(np.int32) for one in live]
    ends = [min(len(prompt) + 1, len(row)) for row in rows]
    for i, (cache, row, end) in enumerate(zip(caches, rows, ends, strict=True)):
        cache.start_request(i, prompt)
        cache.add_active_response(i, row[len(prompt) : end])
    counts = np.array([sum(len(row) - end for row, end in zip(rows, ends, strict=True)), 0, 0, 0])
    while True:
        going = [i for i, row in enumerate(rows) if ends[i] < len(row)]
        if not going:
            return counts
        gained = []
        for i in going:
            row, end = rows[i], ends[i]
            draft = caches[i].speculate(i, row[:end], max_spec_tokens=k, **options).token_ids
            accepted = 0
            while (
                accepted < min(len(draft), len(row) - end)
                and draft[accepted] == row[end + accepted]
            ):
                accepted += 1
            gained.append(min(accepted + 1, len(row) - end))
            counts[1:] += (1, len(draft), accepted)
        for i, count in zip(going, gained, strict=True):
            caches[i].add_active_response(i, rows[i][ends[i] : ends[i] + count])
            ends[i] += count


def _cache(prompt: np.ndarray, past: Sequence[Response], shared: bool) -> Any:
    from arctic_inference.suffix_decoding import SuffixDecodingCache

    cache = SuffixDecodingCache(TREE_DEPTH, -1 if shared else 0)
    for number, one in enumerate(past):
        name = f"past {number}"
        cache.start_request(name, prompt)
        cache.add_active_response(name, one.tokens)
        cache.stop_request(name)
    return cache


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("rollouts", type=Path)
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 8], help="draft tokens")
    parser.add_argument("--name", default="rollouts-oracle", help="of the results")
    args = parser.parse_args()
    rollouts = Rollouts.load(args.rollouts)
    last = len(rollouts.epochs) - 1
    rows = []
    for says, visits, siblings in (
        ("own text", 0, False),
        ("own text and live siblings", 0, True),
        ("own text and 1 visit", 1, False),
        ("own text and 4 visits", 4, False),
        ("own text and 9 visits", 9, False),
        ("own text, 9 visits, live siblings", 9, True),
    ):
        if visits <= last:
            cells = []
            for k in args.drafts:
                for options in (AS_SHIPPED, AT_LENGTH):
                    tokens, steps, drafted, accepted = oracle_epoch(
                        rollouts, last, visits, siblings, k, options
                    )
                    cells.append(f"{tokens / steps:.3f} ({accepted / max(1, drafted):.2f})")
            rows.append([says, *cells])
            print(rows[-1], flush=True)
    head = ["suffix tree: tokens a step (accepted share)"]
    for k in args.drafts:
        head += [f"k = {k}", f"k = {k}, at length"]
    write_results(args.name, machine(), {"rows": rows}, table(head, rows))


if __name__ == "__main__":
    main()
