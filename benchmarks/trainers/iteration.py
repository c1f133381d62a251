"""What the benchmarks of the trainers' iterations share: command line, record, table."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.bench.workloads import WORKLOADS, Workload
from benchmarks.common import Summary, table, write_results
from benchmarks.paired import paired_ratio
from pat_vllm.reporting import Report
from pat_vllm.simulator.traces import LengthTrace

PAT = "PAT"
CLAIRVOYANT = "PAT, told the lengths"
SAMPLES = 8
"""Responses of a prompt."""


_NONE = "none"


def parser(description: str | None, static: Iterable[str]) -> argparse.ArgumentParser:
    """The command line; `static` names the sides without PAT."""
    made = argparse.ArgumentParser(description=description)
    # Those whose requests all arrive at once, as a trainer's do.
    names = [name for name, workload in WORKLOADS.items() if not workload.waits]
    made.add_argument("--workload", choices=names, default="lognormal")
    made.add_argument("--repeats", type=int, default=4, help="after one that warms up")
    made.add_argument(
        "--static", choices=[*static, _NONE], help="the only side without PAT; default: both"
    )
    made.add_argument("--clairvoyant", action="store_true", help="also PAT with known lengths")
    made.add_argument("--seed", type=int, default=0)
    return made


def static_sides(args: argparse.Namespace, names: Mapping[str, str]) -> list[str]:
    """The sides without PAT that are asked for.

    Raises:
        SystemExit: there is nothing to compare PAT with.
    """
    if args.static == _NONE and not args.clairvoyant:
        raise SystemExit(f"--static {_NONE} leaves nothing to compare with: add --clairvoyant")
    chosen = [*names] if args.static is None else [args.static]
    return [names[one] for one in chosen if one != _NONE]


@dataclass
class Times:
    """Seconds of each repeat of one side, and how often it switched in it."""

    syncs: list[float] = field(default_factory=list)
    rollouts: list[float] = field(default_factory=list)
    switches: list[int] = field(default_factory=list)

    @property
    def both(self) -> list[float]:
        """Seconds of sync and rollout of each repeat."""
        return [sync + rollout for sync, rollout in zip(self.syncs, self.rollouts, strict=True)]

    def add(self, began: float, synced: float, done: float, report: Report | None) -> None:
        """Note a repeat, by times on the monotonic clock.

        Args:
            report: of an engine with PAT, made after it.
        """
        self.syncs.append(synced - began)
        self.rollouts.append(done - synced)
        switches = () if report is None else report.switches
        self.switches.append(sum(one.at > synced and one.reason != "idle" for one in switches))


def write(
    trainer: str,
    args: argparse.Namespace,
    facts: Mapping[str, Any],
    trace: LengthTrace,
    sides: Mapping[str, Times],
) -> None:
    """Write what was measured; `facts` are the machine's. See `report`."""
    name = "-".join(filter(None, [trainer, args.workload, args.static]))
    body = {"arguments": vars(args), "sides": sides}
    write_results(name, facts, body, report(WORKLOADS[args.workload], trace, sides))


def report(workload: Workload, trace: LengthTrace, sides: Mapping[str, Times]) -> str:
    """Markdown; PAT is the last row, `trace` that of the first repeat."""
    static = [name for name in sides if name not in (PAT, CLAIRVOYANT)] or [CLAIRVOYANT]
    better = min(static, key=lambda name: Summary.of(sides[name].rollouts).median)
    others = [name for name in sides if name != PAT]
    rows = [_row(name, sides[name], sides[better]) for name in (*others, PAT)]
    header = [
        "engines", "rollout, s", f"rollout / {better}", "the same, mean (95% CI)",
        "weight sync, s", "sync and rollout, s", f"both / {better}, mean (95% CI)", "switches",
    ]  # fmt: skip
    known = ""
    if CLAIRVOYANT in sides:
        ratio = paired_ratio(sides[PAT].rollouts, sides[CLAIRVOYANT].rollouts)
        known = f"\nRollout, {PAT} / {CLAIRVOYANT}: {ratio.show()}.\n"
    return (
        f"Workload `{workload.name}`: {workload.text}; {SAMPLES} samples of a prompt, "
        f"{len(trace)} responses of {sum(trace.lengths)} tokens in the first repeat. Random model "
        f"of `pat-vllm demo`, float32. Median (low-high) of {len(sides[PAT].rollouts)} repeats; "
        "the ratio is that of equal batches, with the bootstrap's interval of its geometric "
        "mean.\n\n" + table(header, rows) + known
    )


def _row(name: str, times: Times, better: Times) -> list[str]:
    rollouts = paired_ratio(times.rollouts, better.rollouts)
    return [
        name,
        Summary.of(times.rollouts).show(digits=2),
        Summary.of(rollouts.values).show(digits=2),
        rollouts.show(),
        Summary.of(times.syncs).show(digits=2),
        Summary.of(times.both).show(digits=2),
        paired_ratio(times.both, better.both).show(),
        f"{sum(times.switches) / len(times.switches):.1f}",
    ]
