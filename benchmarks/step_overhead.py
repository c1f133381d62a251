"""What PAT's scheduler adds to an engine step, around the stock schedulers it is made of.

    python -m benchmarks.step_overhead

Bars: under 50 microseconds per engine step, reporting and the policy's check included; what the
predictor policy does, planning included, at most 1% of a decode step; a replica's step among 8
replicas with 128 requests each, at most 1.15 times that of one stock scheduler with 128. No
workers: an executor that answers at once stands for them. Each row compares `PATScheduler` with the
same number of stock schedulers stepped one after the other, requests and outputs alike; the sides
alternate step by step. In layout tp1dp8 the predictor policy decides, with a modelled profile by
which no switch pays.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from typing import Any

from benchmarks.common import ENVIRONMENT, Summary, machine, table, write_results
from benchmarks.without_workers import RANKS, answer, engine_config, request

BAR_MICROSECONDS = 50
BAR_AMONG = 1.15
SHAPES = ((8, 1, 4), (8, 1, 128), (1, 8, 1), (1, 8, 16), (1, 8, 128))
"""(tp, replicas, decoding requests of each replica)"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=9, help="of each side")
    parser.add_argument("--steps", type=int, default=100, help="in a run")
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)

    import gc

    gc.disable()  # a collection in one side's run would be taken for its work
    rows: list[list[Any]] = []
    body: dict[str, Any] = {"bar_microseconds": BAR_MICROSECONDS, "shapes": []}
    for tp, replicas, requests in SHAPES:
        ours, theirs = _compare(tp, replicas, requests, args.runs, args.steps)
        added = Summary.of([a - b for a, b in zip(ours, theirs, strict=True)])
        body["shapes"].append(
            {"tp": tp, "requests": requests, "pat": ours, "stock": theirs, "added": added}
        )
        gc.collect()
        rows.append(
            [
                f"tp{tp}dp{replicas}",
                requests,
                Summary.of(ours).show(1e6),
                Summary.of(theirs).show(1e6),
                added.show(1e6),
                BAR_MICROSECONDS,
            ]
        )
    header = ["layout", "requests per replica", "PAT us", "stock us", "added us", "bar us"]
    parts = _parts()
    body["parts"] = parts
    one, all_8 = (body["shapes"][SHAPES.index(shape)] for shape in ((8, 1, 128), (1, 8, 128)))
    among = {side: Summary.of(all_8[side]).median / RANKS for side in ("pat", "stock")}
    alone = Summary.of(one["stock"]).median
    body["replica_step_among_8"] = {side: among[side] / alone for side in among}
    text = (
        "Time of one engine step (a step of every replica) in the schedulers; median (low-high) "
        f"of {args.runs} runs, of each of which the median of {args.steps} steps is taken.\n\n"
        + table(header, rows)
        + "\nA replica's step among 8 with 128 requests each: "
        f"{among['pat'] / alone:.2f} times that of one stock scheduler with 128 (bar {BAR_AMONG}); "
        f"among 8 stock schedulers it is {among['stock'] / alone:.2f}.\n"
        "\nOf which, us per step:\n\n"
        + table(["part", "us"], [[k, f"{v * 1e6:.2f}"] for k, v in parts.items()])
    )
    write_results("step-overhead", machine(), body, text)


def _compare(
    tp: int, replicas: int, requests: int, runs: int, steps: int
) -> tuple[list[float], list[float]]:
    """Seconds per step of `PATScheduler` and of as many stock schedulers, run by run."""
    from pat_vllm.config import layouts_of
    from pat_vllm.executor.executor import StepResult
    from pat_vllm.scheduler.replica import ReplicaFactory
    from pat_vllm.scheduler.scheduler import PATScheduler

    config, stock = engine_config(tp)
    scheduler = PATScheduler(vllm_config=config, **stock)
    if tp == 1:
        scheduler.monitor.policy = _predictor()
    kv_cache_config = stock.pop("kv_cache_config")
    layouts = layouts_of(config)
    layout = next(one for one in layouts if one.tp == tp)
    factory = ReplicaFactory(config, layouts[0], kv_cache_config, **stock)
    factory.make(layout)
    stock_config, stock_kv_cache = factory._configs[layout]
    stock_config.kv_transfer_config = None  # PAT's connector is part of what PAT adds
    scheduler_cls = stock_config.scheduler_config.get_scheduler_cls()
    plain: list[Any] = [
        scheduler_cls(vllm_config=stock_config, kv_cache_config=stock_kv_cache, **stock)
        for _ in range(replicas)
    ]

    for index in range(replicas * requests):
        scheduler.add_request(request(f"pat-{index}", index))
        plain[index % replicas].add_request(request(f"stock-{index}", index))

    def pat_step() -> None:
        assert scheduler.has_requests()
        output = scheduler.schedule()
        results = [StepResult(i, answer(step), 0.01) for i, step in output.steps.items()]
        scheduler.update_from_output(output, results)

    def stock_step() -> None:
        outputs = []
        for one in plain:
            assert one.has_requests()
            outputs.append(one.schedule())
        answers = [answer(output) for output in outputs]
        for one, output, found in zip(plain, outputs, answers, strict=True):
            one.update_from_output(output, found)

    ours: list[float] = []
    theirs: list[float] = []
    for run in range(runs + 1):
        times: dict[Any, list[float]] = {pat_step: [], stock_step: []}
        for index in range(2 * steps):
            step = (pat_step, stock_step)[(index + index // 2) % 2]  # ABBA
            begun = time.perf_counter()
            step()
            times[step].append(time.perf_counter() - begun)
        if run:  # the first one admits and prefills
            ours.append(statistics.median(times[pat_step]))
            theirs.append(statistics.median(times[stock_step]))
    assert all(replica.num_seqs == requests for replica in scheduler.replica_set.replicas)
    return ours, theirs


def _predictor() -> Any:
    """The default policy, on a profile by which it stays where it is."""
    from pat_vllm.predictor.adaptive import AdaptivePolicy
    from pat_vllm.simulator.modelled.hardware import modelled_profile

    profile = modelled_profile("llama-3.1-8b", "H100", RANKS)
    dear = tuple(one.model_copy(update={"seconds": 1e6}) for one in profile.switches)
    return AdaptivePolicy(profile.model_copy(update={"switches": dear}), bound=8000)


def _parts() -> dict[str, float]:
    """Seconds of the history's and the policies' part of a step, by themselves."""
    import numpy as np

    from pat_vllm.layout import Layout
    from pat_vllm.predictor.policy import SchedulePolicy
    from pat_vllm.predictor.state import LiveRequests, LiveState
    from pat_vllm.profiling.profile import StepShape
    from pat_vllm.reporting import History

    history = History()
    layout = Layout(1, RANKS)
    table = SchedulePolicy(layout, ((4, Layout(8, 1)), (16, Layout(4, 2)), (32, Layout(2, 4))))
    predictor = _predictor()
    shape = StepShape(16, 16_000, 2_000, 0, RANKS)
    rng = np.random.default_rng(0)

    def requests(count: int) -> LiveRequests:
        zeros = np.zeros(count, np.int64)
        generated = rng.integers(1, 3_000, count)
        return LiveRequests(
            num_prompt_tokens=zeros + 500,
            num_output_tokens=generated,
            max_tokens=zeros + 8_000,
            exact=zeros > 0,
            group=zeros,
            number=np.arange(count),
            replica_steps=zeros,
            turn=zeros,
            held=zeros,
            num_computed_tokens=zeros + 500 + generated,
        )

    def timed(function: Any, count: int = 20_000) -> float:
        for i in range(100):
            function(i)
        begun = time.perf_counter()
        for i in range(count):
            function(i)
        return (time.perf_counter() - begun) / count

    def state(now: float, live: int) -> LiveState:
        return LiveState(now, layout, live, 1.0, lambda: batches[live])

    batches = {count: requests(count) for count in range(1, 129)}
    # A step every 10 ms: what the policy looks at more seldom is spread over the steps.
    step = 0.010
    parts = {
        "History.live, number changes": timed(lambda i: history.live(layout, i % 64)),
        "History.step": timed(lambda i: history.step(layout, 0.01)),
        "SchedulePolicy.choose": timed(lambda i: table.choose(state(0.0, 64))),
        "AdaptivePolicy.stepped, 10 ms a step": timed(
            lambda i: predictor.stepped(i * step, layout, shape, step)
        ),
        "AdaptivePolicy.choose, 10 ms a step, another number of live requests each time": timed(
            lambda i: predictor.choose(state(1e3 + i * step, 1 + i % 128))
        ),
    }
    report = predictor.report()
    parts["of which a plan, mean over 1 to 128 live requests and 4 layouts"] = (
        report.planning / report.plans
    )
    return parts


if __name__ == "__main__":
    main()
