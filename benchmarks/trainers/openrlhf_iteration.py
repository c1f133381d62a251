"""OpenRLHF's rollouts and weight syncs with PAT, against those with its own engines.

    python -m benchmarks.trainers.openrlhf_iteration

Runs in the environment of `make test-openrlhf`, on CPU with the tests' stand-ins. Three sides:
OpenRLHF's default of one engine per device, one engine over all devices, and PAT over all devices.
All stay alive and take turns: weights are synced as OpenRLHF's actor does it, then its
`SamplesGenerator` makes a rollout with the same prompts and response lengths for each side. What an
iteration has beside these two, the training, is the same for all sides. With `--clairvoyant` a
further engine of PAT's is told each response's length; memory holds it beside one other side.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.bench.workloads import MAX_TOKENS, WORKLOADS, Workload
from benchmarks.common import ENVIRONMENT, PARK_SECONDS, ROOT, machine
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

DEVICES = 2
DEFAULT = f"default: {DEVICES} engines of tp=1"
ONE = f"1 engine of tp={DEVICES}"
STATIC = {"default": DEFAULT, "one": ONE}

_SHAPES = {DEFAULT: (DEVICES, 1), ONE: (1, DEVICES)}
"""Engines, and the tp of each."""
_SUPPORT = ROOT / "tests" / "support" / "openrlhf_on_cpu"
_ADAPTER = ROOT / "integrations" / "openrlhf"
_KV_BYTES = 1 << 28
_MAX_LEN = 512
_WORDS = ("how", "many", "apples", "has", "Anna", "if", "the", "river", "is", "blue")


@dataclass
class OpenRLHFSide:
    """A way to make rollouts.

    Attributes:
        engines: OpenRLHF's rollout actors.
        group: the trainer's end of the weight sync.
    """

    engines: list[Any]
    group: Any
    times: Times = field(default_factory=Times)


def main() -> None:
    """Command line."""
    options = parser(__doc__, STATIC)
    args = options.parse_args()
    _enter_environment()

    workload = WORKLOADS[args.workload]
    facts = machine()
    static = static_sides(args, STATIC)
    sides = measure(workload, static, args.repeats, args.seed, args.clairvoyant)
    write("openrlhf", args, facts, workload.trace(1, seed=args.seed), sides)


def _enter_environment() -> None:
    """Start again with the stand-ins, which have to be there when Python starts."""
    path = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if str(_SUPPORT) in path:
        return
    variables = {
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join([str(_SUPPORT), str(ROOT), str(_ADAPTER)]),
        "PAT_TEST_GPUS": str(4 * DEVICES),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "DS_ACCELERATOR": "cpu",
        "RAY_USAGE_STATS_ENABLED": "0",
    }
    arguments = ["-m", "benchmarks.trainers.openrlhf_iteration", *sys.argv[1:]]
    os.execve(sys.executable, [sys.executable, *arguments], {**os.environ, **variables})


# -------------------------------------------------------------------- measuring


def measure(
    workload: Workload, static: Sequence[str], repeats: int, seed: int, clairvoyant: bool = False
) -> dict[str, Times]:
    """Start the sides, PAT first: it measures its profile while nothing else runs."""
    import ray
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pat_vllm.cli.demo_batch import demo_model

    path = str(demo_model(ROOT / ".models"))
    tokenizer = AutoTokenizer.from_pretrained(path)
    weights = AutoModelForCausalLM.from_pretrained(path)
    ray.init(log_to_driver=False)
    try:
        hidden: dict[str, Any] = {"kind": "predictor", "length_bound": MAX_TOKENS}
        engines = {PAT: _start(path, 1, DEVICES, policy=hidden)}
        if clairvoyant:
            # Without a bound, `max_tokens` tells each length.
            engines[CLAIRVOYANT] = _start(path, 1, DEVICES, policy={"kind": "predictor"})
        for name, (count, tp) in _SHAPES.items():
            if name in static:
                engines[name] = _start(path, count, tp)
        sides = {name: OpenRLHFSide(made, _sync_group(made)) for name, made in engines.items()}
        for repeat, order in enumerate(turns(list(sides), repeats + 1)):
            batch = _batch(workload, repeat, seed)
            for name in order:
                _turn(sides[name], batch, tokenizer, weights, count=repeat > 0)
    finally:
        ray.shutdown()
    return {name: sides[name].times for name in (*static, *engines)}


def _start(path: str, engines: int, tp: int, policy: dict[str, Any] | None = None) -> list[Any]:
    """Have OpenRLHF make its engines, or PAT's with this policy."""
    from openrlhf.trainer.ray import create_vllm_engines, vllm_engine
    from pat_openrlhf.engines import PatEngines
    from pat_openrlhf.options import EngineOptions

    stock = vllm_engine.RolloutRayActor
    pat = None if policy is None else PatEngines(EngineOptions(pat={"policy": policy}))
    vllm_engine.RolloutRayActor = _Options(pat or stock)
    made = create_vllm_engines(
        num_engines=engines,
        tensor_parallel_size=tp,
        pretrain=path,
        seed=0,
        full_determinism=False,
        enable_prefix_caching=False,
        enforce_eager=True,
        max_model_len=_MAX_LEN,
        gpu_memory_utilization=0.5,  # has no effect beside `kv_cache_memory_bytes`
        agent_func_path=str(Path(__file__).with_name("openrlhf_lengths.py")),
    )
    vllm_engine.RolloutRayActor = stock
    return made


class _Options:
    """Rollout actors with options of vLLM that OpenRLHF does not offer, alike on all sides.

    The model's crossover is in float32 on CPU, where bfloat16 costs more than it saves.
    """

    def __init__(self, actors: Any) -> None:
        self._actors = actors

    def options(self, **placement: Any) -> Any:
        made = self._actors.options(**placement)
        extra = {"dtype": "float32", "kv_cache_memory_bytes": _KV_BYTES}
        return SimpleNamespace(remote=lambda **arguments: made.remote(**arguments | extra))


def _sync_group(engines: Sequence[Any]) -> Any:
    """As OpenRLHF's actor makes it."""
    import ray
    from openrlhf.utils.distributed_util import stateless_init_process_group

    host = ray.util.get_node_ip_address()
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    # An engine that could not start would be waited for in what follows.
    ray.get([engine.get_num_unfinished_requests.remote() for engine in engines])
    tp = DEVICES // len(engines)
    world = DEVICES + 1
    joined = [
        engine.init_process_group.remote(
            host, port, i * tp + 1, world, "openrlhf", backend="gloo", use_ray=False
        )
        for i, engine in enumerate(engines)
    ]
    group = stateless_init_process_group(host, port, 0, world, "cpu")
    ray.get(joined)
    return group


def _batch(workload: Workload, repeat: int, seed: int) -> list[tuple[Any, ...]]:
    """The rollout's prompts as OpenRLHF's data loader gives them; labels say the lengths."""
    import random

    lengths = workload.trace(repeat, seed=seed).lengths
    rng = random.Random(f"{seed} {repeat}")
    prompts, labels = [], []
    for at in range(0, len(lengths), SAMPLES):
        words = rng.choices(_WORDS, k=rng.randint(6, 24))
        prompts.append(" ".join([f"{repeat}.{at}", *words]))
        labels.append(json.dumps(lengths[at : at + SAMPLES]))
    return [("", prompts, labels, [None] * len(prompts))]


def _turn(
    side: OpenRLHFSide, batch: list[tuple[Any, ...]], tokenizer: Any, weights: Any, count: bool
) -> None:
    """A sync and a rollout."""
    import ray
    from openrlhf.trainer.ppo_utils.samples_generator import SamplesGenerator

    _, prompts, labels, _ = batch[0]
    total = sum(sum(json.loads(label)) for label in labels)
    generator = SamplesGenerator(_strategy(len(prompts)), batch, None, tokenizer, side.engines)
    time.sleep(PARK_SECONDS)

    began = time.monotonic()
    for name, weight in weights.named_parameters():
        received = [
            engine.update_weight.remote(name, dtype=weight.dtype, shape=weight.shape)
            for engine in side.engines
        ]
        side.group.broadcast(weight.data, src=0)
        ray.get(received)
    synced = time.monotonic()
    samples, *_ = generator.generate_samples(max_len=_MAX_LEN, temperature=1.0)
    done = time.monotonic()

    made = sum(int(sample.response_length.item()) for sample in samples)
    assert made == total, f"{made} tokens in place of {total}"
    if count:
        first = side.engines[0]
        report = ray.get(first.pat_report.remote()) if hasattr(first, "pat_report") else None
        side.times.add(began, synced, done, report)


def _strategy(prompts: int) -> Any:
    """As much of OpenRLHF's arguments as its `SamplesGenerator` reads."""
    args = SimpleNamespace(
        rollout=SimpleNamespace(
            batch_size=prompts, n_samples_per_prompt=SAMPLES, vllm_generate_batch_size=None
        ),
        vllm=SimpleNamespace(enable_sleep=False),
        algo=SimpleNamespace(
            dynamic_filtering_enable=False,
            advantage=SimpleNamespace(is_correction_level="off"),
        ),
    )
    return SimpleNamespace(args=args)


if __name__ == "__main__":
    main()
