"""How well the length model knows how many responses will still be running.

    python -m benchmarks.calibration

Pure: synthetic lengths, no engine. For each kind of lengths several runs of several batches; errors
and coverage of the live-request curves that the model predicts, for first batches and later ones.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

from benchmarks.calibration_plot import CalibrationResult, calibration_figure
from benchmarks.common import RESULTS, machine, table, write_results
from pat_vllm.simulator import traces
from pat_vllm.simulator.traces import LengthTrace

MAX_TOKENS = 24_576
KINDS: dict[str, Callable[[int], LengthTrace]] = {
    "deepscaler": lambda seed: traces.deepscaler(128, MAX_TOKENS, seed),
    "log-normal": lambda seed: traces.lognormal(128, 2000, 1.0, MAX_TOKENS, seed),
    "two modes": lambda seed: traces.two_mode(128, max_tokens=MAX_TOKENS, seed=seed),
    "uniform": lambda seed: traces.uniform(128, 1000, 8000, MAX_TOKENS, seed),
}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=8, help="of a run")
    parser.add_argument("--runs", type=int, default=5, help="of each kind of lengths")
    args = parser.parse_args()

    facts = machine()
    rows = []
    body: dict[str, Any] = {}
    for kind, make in KINDS.items():
        results = []
        for run in range(args.runs):
            batches = [make(1000 * run + number) for number in range(args.batches)]
            name = f"{facts['date'][:10]}-calibration-{kind.replace(' ', '-')}.png"
            results.append(calibration_figure(batches, RESULTS / name))
        body[kind] = results
        rows.append([kind, *_cells(results)])
    header = ["lengths"]
    for part in ("first batch", "later batches"):
        header += [f"{part}: error", "live in band", "length in band"]
    text = (
        f"{args.runs} runs of {args.batches} batches of 128 responses, looked at when 75%, 50%, "
        "25% and 10% of a batch are live. Error: mean absolute difference of the predicted and the "
        "actual number of live responses, as a share of the batch. In band: how often the actual "
        "number of live responses, and the actual rest of a response, are within their predicted "
        "80% bands. Mean over runs (low-high).\n\n"
    )
    write_results("calibration", facts, body, text + table(header, rows))


def _cells(results: list[CalibrationResult]) -> list[str]:
    def show(values: list[float]) -> str:
        return f"{statistics.fmean(values):.1%} ({min(values):.1%}-{max(values):.1%})"

    cells = []
    for parts in ([one.first for one in results], [one.later for one in results if one.later]):
        cells.append(show([one.live_error for one in parts]))
        cells.append(show([one.live_coverage for one in parts]))
        cells.append(show([one.coverage_80 for one in parts]))
    return cells


if __name__ == "__main__":
    main()
