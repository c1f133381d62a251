"""`python -m benchmarks.bench`: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.bench.engines import BenchSettings, measure
from benchmarks.bench.report import markdown
from benchmarks.bench.workloads import WORKLOADS
from benchmarks.common import checkpoint
from benchmarks.engine_process import EngineFailed
from benchmarks.record import RESULTS, machine, write_results
from benchmarks.rollouts.mtp import model_with_mtp


def main(arguments: Sequence[str]) -> None:
    """Serve the same batches with static and adaptive engines in turns, and write what came."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench", description=__doc__)
    parser.add_argument("--model", default="qwen3-170m", help="or a checkpoint's folder")
    parser.add_argument("--ranks", type=int, default=2, help="of each engine")
    parser.add_argument("--repeats", type=int, default=5, help="batches of each workload")
    parser.add_argument("--workloads", nargs="+", choices=[*WORKLOADS], default=[*WORKLOADS])
    parser.add_argument("--scale", type=float, default=1.0, help="factor on requests and lengths")
    parser.add_argument(
        "--drafts",
        type=int,
        default=0,
        help="with a small model that is trained for it with its MTP module, in place of --model: "
        "the most drafts of a step; every static layout with each draft length is a side",
    )
    parser.add_argument("--seed", type=int, default=0, help="of prompts and lengths")
    parser.add_argument("--output-dir", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    workloads = tuple(WORKLOADS[name] for name in given.workloads)
    settings = BenchSettings(
        model_with_mtp() if given.drafts else checkpoint(given.model),
        given.ranks,
        workloads,
        given.repeats,
        given.scale,
        given.seed,
        given.drafts,
    )
    facts = machine()
    try:
        measured = measure(settings)
    except ValueError as error:
        parser.error(str(error))
    except EngineFailed as error:
        sys.exit(str(error))
    body = {"workloads": given.workloads, "measured": measured}
    write_results("bench", facts, body, markdown(settings, measured), given.output_dir)


if __name__ == "__main__":
    main(sys.argv[1:])
