"""How far predicted step times are off, beside what a repeat of the same step tells about another.

    python -m benchmarks.step_error

An engine with the default policy takes its profile. Then it decodes batches of several sizes in
each layout, in an order that is drawn anew in each round, so that equal steps are repeated minutes
apart. The policy predicts each step before it learns from it, as it always does. Of each visit the
median step counts.

The floor is the machine's: how far the median of one visit is from that of the visit before, of the
same steps. Bar: the error is at most 4%, or 1.3 times the floor where that is more.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from typing import Any

from benchmarks.common import ROOT, Engine, machine, random_prompts, table, write_results
from pat_vllm.cli.demo import demo_model
from pat_vllm.layout import Layout
from pat_vllm.profiling.cache import CACHE_DIR

BAR = 0.04
FLOORS = 1.3
"""Of the machine's floor, where that is more."""

RANKS = 2
_SHORT, _LONG = 16, 256
"""Prompt tokens."""
KINDS = (*((n, _SHORT) for n in (1, 2, 4, 8, 16, 32, 64, 128)), (4, _LONG), (16, _LONG))
"""Requests and their prompts' tokens."""
_UNSETTLED = 3
"""First steps of a visit that do not count, besides those that the policy leaves out."""


# -------------------------------------------------------------------- arithmetic


@dataclass(frozen=True)
class Visit:
    """Steps of one kind that followed each other, of all replicas: seconds, at least one."""

    predicted: Sequence[float]
    real: Sequence[float]


@dataclass(frozen=True)
class StepError:
    """Mean absolute relative errors, from the second visit of each kind on.

    Attributes:
        error: of the predicted medians of visits.
        floor: of the median of the visit before in place of a prediction.
        single_error, single_floor: of single steps, by their predictions and by the median of the
            visit before.
        bias: mean signed error of the predicted medians: positive where they are too long.
        visits: that were compared.
    """

    error: float
    floor: float
    single_error: float
    single_floor: float
    bias: float
    visits: int

    @classmethod
    def of(cls, kinds: Iterable[Sequence[Visit]]) -> StepError:
        """Over kinds of steps; of each its visits in the order in which they were made.

        Raises:
            ValueError: no kind has two visits.
        """
        signed, repeat, single, of_single = [], [], [], []
        for visits in kinds:
            for before, visit in pairwise(visits):
                earlier, real = statistics.median(before.real), statistics.median(visit.real)
                signed.append(statistics.median(visit.predicted) / real - 1)
                repeat.append(abs(earlier / real - 1))
                pairs = zip(visit.predicted, visit.real, strict=True)
                single.append(statistics.mean(abs(p / r - 1) for p, r in pairs))
                of_single.append(statistics.mean(abs(earlier / r - 1) for r in visit.real))
        if not signed:
            raise ValueError("a repeat of a step needs two visits")
        return cls(
            error=statistics.mean(map(abs, signed)),
            floor=statistics.mean(repeat),
            single_error=statistics.mean(single),
            single_floor=statistics.mean(of_single),
            bias=statistics.mean(signed),
            visits=len(signed),
        )

    @property
    def bar(self) -> float:
        """The largest error that is good enough on this machine."""
        return max(BAR, FLOORS * self.floor)


# -------------------------------------------------------------------- in the engine's process


def take_visit(
    llm: Any, tp: int, prompts: Sequence[Any], steps: int, name: str
) -> tuple[list[float], list[float]]:
    """Decode a batch in a layout; seconds of its steps as predicted, and as they were."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    import pat_vllm

    policy = llm.llm_engine.engine_core.engine_core.scheduler.monitor.policy
    stepped, model = policy.stepped, policy._steps
    of_replica = max(1, len(prompts) // Layout.of(tp, RANKS).replicas)
    predicted: list[float] = []
    real: list[float] = []

    def noting(now: float, layout: Layout, shape: Any, seconds: float) -> None:
        usual = not policy._skip and model.comparable(layout, shape)
        if usual and layout.tp == tp and shape.batch == of_replica:
            predicted.append(model.step(layout, shape))
            real.append(seconds)
        stepped(now, layout, shape, seconds)

    params = SamplingParams(
        temperature=1.0,
        max_tokens=steps + 2 * _UNSETTLED,
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )
    assert pat_vllm.switch(llm, tp)
    policy.stepped = noting
    try:
        for index, prompt in enumerate(prompts):
            llm.llm_engine.add_request(f"{name}-{index}", prompt, params)
        while llm.llm_engine.has_unfinished_requests():
            llm.llm_engine.step()
    finally:
        policy.stepped = stepped
    # Two replicas' steps alternate.
    first = _UNSETTLED * min(len(prompts), Layout.of(tp, RANKS).replicas)
    return predicted[first:], real[first:]


# -------------------------------------------------------------------- the command

Kind = tuple[int, int, int]
"""Tensor parallelism, requests, tokens of their prompts."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=8, help="visits of each kind of step")
    parser.add_argument("--steps", type=int, default=20, help="of a visit")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error(f"--rounds must be at least 2, got {args.rounds}")
    facts = machine()
    visits = measure(args.rounds, args.steps)
    body = {
        "arguments": vars(args),
        "kinds": [
            {"tp": tp, "requests": requests, "prompt": prompt, "visits": [asdict(v) for v in made]}
            for (tp, requests, prompt), made in visits.items()
        ],
    }
    write_results("step-error", facts, body, report(visits, args.rounds, args.steps))


def measure(rounds: int, steps: int) -> dict[Kind, list[Visit]]:
    """All visits, by kind and in order."""
    options = dict(
        model=str(demo_model(ROOT / ".models")),
        dtype="float32",
        tensor_parallel_size=RANKS,
        distributed_executor_backend="pat",
        enforce_eager=True,
        enable_prefix_caching=False,
        max_model_len=512,
        max_num_seqs=128,
        max_num_batched_tokens=4096,
        kv_cache_memory_bytes=1 << 28,
    )
    kinds = [(tp, *kind) for tp in (1, RANKS) for kind in KINDS]
    made: defaultdict[Kind, list[Visit]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="pat-vllm-steps-") as cache:
        os.environ[CACHE_DIR] = cache  # the profile is this engine's
        bind = "|".join(str(core) for core in range(RANKS))
        with Engine(options, bind, core_inside=True) as engine:
            engine.wait_until_ready()
            for number in range(rounds):
                for tp, requests, prompt in random.Random(number).sample(kinds, len(kinds)):
                    prompts = random_prompts(requests, prompt, seed=number)
                    name = f"{number}-{tp}-{requests}-{prompt}"
                    taken = engine.call(take_visit, tp, prompts, steps, name)
                    made[tp, requests, prompt].append(Visit(*taken))
    return {kind: made[kind] for kind in kinds}


def report(visits: Mapping[Kind, Sequence[Visit]], rounds: int, steps: int) -> str:
    """Markdown."""
    rows, by_kind = [], []
    for tp in sorted({tp for tp, *_ in visits}):
        own = {kind: made for kind, made in visits.items() if kind[0] == tp}
        found = StepError.of(own.values())
        met = "met" if found.error <= found.bar else "**missed**"
        rows.append(
            [
                Layout.of(tp, RANKS),
                f"{found.error:.1%}",
                f"{found.floor:.1%}",
                f"{found.bar:.1%}",
                met,
                f"{found.bias:+.1%}",
                f"{found.single_error:.1%}",
                f"{found.single_floor:.1%}",
            ]
        )
        for (_, requests, prompt), made in own.items():
            one = StepError.of([made])
            real = statistics.median(statistics.median(v.real) for v in made)
            cells = [f"{value:.1%}" for value in (one.error, one.floor)]
            by_kind.append(
                [Layout.of(tp, RANKS), requests, prompt, f"{1e3 * real:.1f}", *cells,
                 f"{one.bias:+.1%}"]
            )  # fmt: skip
    return (
        f"Decode steps of the demo's model, float32, {RANKS} ranks: {rounds} visits of {steps} "
        "steps of each kind, in an order drawn anew in each round. `error`: mean absolute error of "
        "the predicted median of a visit. `floor`: that of the median of the visit before, of the "
        f"same steps. Bar: {BAR:.0%}, or {FLOORS} floors where that is more. Single steps: "
        "each against its prediction, and against the median of the visit before.\n\n"
        + table(
            ["layout", "error", "floor", "bar", "", "bias", "single steps: error", "floor"], rows
        )
        + "\nBy kind of step:\n\n"
        + table(["layout", "requests", "prompt", "median, ms", "error", "floor", "bias"], by_kind)
    )


if __name__ == "__main__":
    main()
