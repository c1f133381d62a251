"""The table of the trainers' iterations."""

from __future__ import annotations

import pytest

from benchmarks.bench.workloads import WORKLOADS
from benchmarks.trainers.iteration import CLAIRVOYANT, PAT, Times, parser, report, static_sides


def times(*rollouts: float) -> Times:
    return Times(syncs=[1.0] * len(rollouts), rollouts=list(rollouts), switches=[1] * len(rollouts))


def test_ratios_are_those_of_equal_batches() -> None:
    workload = WORKLOADS["lognormal"]
    sides = {"slow": times(20, 40), "fast": times(10, 20), PAT: times(9, 18)}
    text = report(workload, workload.trace(1), sides)
    rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert "rollout / fast" in rows[0]
    assert "| 2.00 (2.00-2.00) | 2.00 (2.00-2.00) |" in rows[1]
    assert "| 31.00 (21.00-41.00) | 1.93 (1.91-1.95) |" in rows[1]  # with the sync
    assert rows[-1].startswith(f"| {PAT} | 13.50 (9.00-18.00) | 0.90 (0.90-0.90) |")
    assert CLAIRVOYANT not in text


def test_the_clairvoyant_is_no_static_side() -> None:
    workload = WORKLOADS["lognormal"]
    sides = {"static": times(10, 20), PAT: times(9, 18), CLAIRVOYANT: times(6, 12)}
    text = report(workload, workload.trace(1), sides)
    assert "rollout / static" in text
    assert f"{PAT} / {CLAIRVOYANT}: 1.50 (1.50-1.50)" in text


def test_sides_to_compare_with() -> None:
    names = {"default": "4 engines", "one": "1 engine"}

    def chosen(*arguments: str) -> list[str]:
        return static_sides(parser(None, names).parse_args(arguments), names)

    assert chosen() == ["4 engines", "1 engine"]
    assert chosen("--static", "one") == ["1 engine"]
    assert chosen("--static", "none", "--clairvoyant") == []
    with pytest.raises(SystemExit, match="add --clairvoyant"):
        chosen("--static", "none")
    workload = WORKLOADS["lognormal"]
    text = report(workload, workload.trace(1), {CLAIRVOYANT: times(6, 12), PAT: times(9, 18)})
    assert f"{PAT} / {CLAIRVOYANT}: 1.50 (1.50-1.50)" in text
