"""What the engine core does at a switch of eight ranks with the memory of large GPUs.

    python -m benchmarks.switch_plan

No workers: an executor that has nothing to move stands for them, so this is the part of a switch
that is alike on every device: placing requests, making the new layout's schedulers, allocating
blocks, listing moves, handing over. 20,000 blocks of 16 tokens per rank in the base layout, as an
8B model has them on a GPU of 80 GB; in the widest layout they make one pool of 160,000.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

from benchmarks.common import ENVIRONMENT, Summary, machine, table, write_results
from benchmarks.without_workers import answer, engine_config, request

WAYS = ((1, 8), (8, 1), (1, 2), (2, 4), (4, 1))
LIVE = (8, 128, 512)
CONTEXT = 2048


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7, help="of each way")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)

    rows, body = [], []
    for live in LIVE:
        for way, switches in _measure(live, args.repeats).items():
            parts = {
                part: Summary.of([one[part] for one in switches])
                for part in ("plan", "finish", "discard")
            }
            body.append({"live": live, "way": way, "switches": switches})
            rows.append([live, way, *(part.show(1e3, 2) for part in parts.values())])
    header = ["live requests", "switch", "plan, ms", "hand over, ms", "discard, ms"]
    text = (
        f"Contexts of {CONTEXT} tokens, all migrated; median (low-high) of {args.repeats}. "
        "`discard` empties the old layout's schedulers, while the workers run their next step.\n\n"
    )
    write_results("switch-plan", machine(), {"ways": body}, text + table(header, rows))


def _measure(live: int, repeats: int) -> dict[str, list[dict[str, float]]]:
    """Seconds of the parts of each switch, by way."""
    from pat_vllm.executor.executor import StepResult
    from pat_vllm.scheduler.scheduler import PATScheduler

    config, stock = engine_config(1)
    scheduler: Any = PATScheduler(vllm_config=config, **stock)
    scheduler.controller.costs.mode = "migrate"

    def step() -> None:
        output = scheduler.schedule()
        results = [StepResult(i, answer(one), 0.01) for i, one in output.steps.items()]
        scheduler.update_from_output(output, results)

    for index in range(live):
        scheduler.add_request(request(f"r{index}", index, CONTEXT))
    while any(one.num_output_tokens < 2 for one in _requests(scheduler)):
        step()
    found: dict[str, list[dict[str, float]]] = {}
    for repeat in range(repeats + 1):
        for source, target in WAYS:
            for tp in (source, target):
                scheduler.controller.request(tp)
                begun = time.perf_counter()
                scheduler.replica_set.discard_retired()
                discard = time.perf_counter() - begun
                step()
            report = scheduler.controller.report().switches[-1]
            assert (report.source.tp, report.target.tp) == (source, target)
            assert report.migrated == report.num_seqs == live
            if repeat:
                found.setdefault(f"{report.source} -> {report.target}", []).append(
                    {"plan": report.plan, "finish": report.finish, "discard": discard}
                )
    return found


def _requests(scheduler: Any) -> list[Any]:
    return [one for r in scheduler.replica_set.replicas for one in r.scheduler.requests.values()]


if __name__ == "__main__":
    main()
