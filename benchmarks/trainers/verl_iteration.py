"""verl's rollouts and weight pushes with PAT, against those with its own vLLM engines.

    python -m benchmarks.trainers.verl_iteration

Runs in the environment of `make test-verl`, on CPU with the tests' stand-ins. Three sides: verl's
default of one engine with tensor parallelism over all devices, one engine per device, and PAT over
all devices. All stay alive and take turns: weights are pushed as verl's checkpoint engine does it,
then verl's client makes a rollout with the same prompts and response lengths for each side. What an
iteration has beside these two, the training, is the same for all sides.

All three take about 20 GiB of memory; `--static` names the one other side to compare PAT with. With
`--clairvoyant` a further engine of PAT's is told each response's length; with `--static none` it is
the only other side.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bench.workloads import SCALES, WORKLOADS
from benchmarks.common import PARK_SECONDS, ROOT, machine, stock_limits
from benchmarks.paired import turns
from benchmarks.trainers.iteration import (
    CLAIRVOYANT,
    PAT,
    SAMPLES,
    Times,
    parser,
    static_sides,
    write,
)
from pat_vllm.simulator.traces import LengthTrace
from tests.verl.environment import variables
from tests.verl.servers import RANKS, Response, Server, ray_cluster, start

DEFAULT = f"default: 1 engine of tp={RANKS}"
REPLICAS = f"{RANKS} engines of tp=1"
STATIC = {"default": DEFAULT, "replicas": REPLICAS}
_KV_BYTES = 1 << 28
_LIMITS: dict[str, Any] = {"max_num_seqs": 128, "max_num_batched_tokens": 2048}
_INSIDE = "PAT_BENCHMARK_INSIDE"


@dataclass
class VerlSide:
    """A way to make rollouts."""

    server: Server
    times: Times = field(default_factory=Times)


def main() -> None:
    """Command line."""
    options = parser(__doc__, STATIC)
    options.add_argument("--scale", choices=SCALES, default="full", help="of the batches")
    args = options.parse_args()
    _enter_environment()

    workload = WORKLOADS[args.workload]
    facts = machine()
    traces = [
        workload.trace(repeat, SCALES[args.scale], args.seed) for repeat in range(args.repeats + 1)
    ]
    static = static_sides(args, STATIC)
    sides = measure(traces, static, args.clairvoyant)
    write("verl", args, facts, traces[1], sides)


def _enter_environment() -> None:
    """Start again with the stand-ins, which have to be there when Python starts."""
    if os.environ.get(_INSIDE):
        return
    inside = variables() | {_INSIDE: "1", "VLLM_LOGGING_LEVEL": "WARNING"}
    inside["PYTHONPATH"] = os.pathsep.join([inside["PYTHONPATH"], str(ROOT)])
    arguments = ["-m", "benchmarks.trainers.verl_iteration", *sys.argv[1:]]
    os.execve(sys.executable, [sys.executable, *arguments], inside)


# -------------------------------------------------------------------- measuring


def measure(
    traces: Sequence[LengthTrace], static: Sequence[str], clairvoyant: bool = False
) -> dict[str, Times]:
    """Start the sides, and have each make a rollout of each trace; the first warms up."""
    from pat_vllm.cli.demo_batch import demo_model

    model = demo_model(ROOT / ".models")
    # `max_tokens` tells the predictor each length, unless it may not look at it.
    policy = "engine_kwargs.vllm.additional_config.pat.policy"
    hidden = f"{policy}={{kind:predictor,length_bound:{traces[0].max_tokens}}}"
    with ray_cluster(gpus=(1 + clairvoyant + len(static)) * RANKS):
        # The first: it measures its profile while nothing else runs.
        sides = {PAT: _start(model, hidden)}
        if clairvoyant:
            told = f"{policy}={{kind:predictor}}"
            sides[CLAIRVOYANT] = _start(model, told, first_replica=4)
        if DEFAULT in static:
            limits = stock_limits(_LIMITS, tp=RANKS)
            sides[DEFAULT] = _start(model, name="vllm", first_replica=1, **limits)
        if REPLICAS in static:
            sides[REPLICAS] = _start(model, name="vllm", tp=1, first_replica=2)
        for repeat, order in enumerate(turns(list(sides), len(traces))):
            for name in order:
                _turn(sides[name], model, traces[repeat], repeat)
    last = sorted(sides, key=lambda name: name == PAT)
    return {name: sides[name].times for name in last}


def _start(model: Path, *overrides: str, **options: Any) -> VerlSide:
    """Servers of verl over all devices, with the same limits on each side, if not given."""
    kv = f"engine_kwargs.vllm.kv_cache_memory_bytes={_KV_BYTES}"
    # Of a weight that is larger than a bucket verl sends no part.
    bucket = {"checkpoint_engine.update_weights_bucket_megabytes": 320}
    return VerlSide(start(model, kv, *overrides, **bucket, **_LIMITS | options))


def _turn(side: VerlSide, model: Path, trace: LengthTrace, repeat: int) -> None:
    """A push and a rollout; that of repeat 0 does not count."""
    prompts = _prompts(trace)
    server = side.server

    async def rollout() -> list[Response]:
        requests = [
            server.generate(prompt, temperature=1.0, max_tokens=length, ignore_eos=True)
            for prompt, length in zip(prompts, trace.lengths, strict=True)
        ]
        return await asyncio.gather(*requests)

    time.sleep(PARK_SECONDS)
    began = time.monotonic()
    server.do(server.push(model, step=repeat))
    pushed = time.monotonic()
    responses = server.do(rollout())
    done = time.monotonic()

    assert [len(response.token_ids) for response in responses] == list(trace.lengths)
    if repeat:
        report = server.call("pat_report") if hasattr(server.actor, "pat_report") else None
        side.times.add(began, pushed, done, report)


def _prompts(trace: LengthTrace) -> list[list[int]]:
    """`SAMPLES` requests for each prompt, which has the tokens that the trace gives its first."""
    rng = random.Random(str(trace.lengths))
    prompts: list[list[int]] = []
    for tokens in trace.num_prompt_tokens[::SAMPLES]:
        prompts += [[rng.randrange(300, 4000) for _ in range(tokens)]] * SAMPLES
    return prompts[: len(trace)]


if __name__ == "__main__":
    main()
