"""Engines that vLLM compiles, and one that it does not. A program; see `programs.py`.

Each engine has two ranks and starts in new processes, with `tests/support/compiled_on_cpu` on their
path. What a case compiles is kept in a folder that cases may share: the second one starts warm.
"""

from __future__ import annotations

import os
import random
import sys
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.gpuless.programs import answer

LITE = {"fallback_by_default": True, "use_joint_graph_passes": False}
"""Options of Inductor, with which the code that it makes calls ATen's kernels. Nothing has to go
through a C++ compiler, which takes most of the time; all else is done as without them."""


@dataclass(frozen=True)
class Case:
    """An engine to start.

    Attributes:
        cache: the folder in which vLLM keeps what it has compiled; None: it compiles nothing.
        ends: of the ranges of batch sizes to compile for, beside the largest batch.
        aot: as by default; otherwise as vLLM compiled before it had AOT artifacts.
    """

    cache: str | None
    pat: Mapping[str, Any] = field(default_factory=dict)
    inductor: Mapping[str, Any] = field(default_factory=lambda: LITE)
    ends: Sequence[int] = ()
    aot: bool = True
    own_folder: bool = False


MATERIALIZED = {"weights": "materialized"}

CASES = {
    "plain": Case(None),
    "cold": Case("a"),
    "warm": Case("a"),
    "other strides": Case("a", MATERIALIZED, ends=(16,)),
    "own folder, cold": Case("b", aot=False, own_folder=True),
    "own folder, warm": Case("b", aot=False, own_folder=True),
    "C++, cold": Case("g", inductor={}),
}

SWITCHES = {"tp=1": {0: 1}, "tp=2": {0: 2}, "there and back": {0: 1, 4: 2, 9: 1}}
"""Runs of the batch: engine step -> tp."""


def main(out: str, *wanted: str) -> None:
    """Run the cases that are wanted."""
    for name in wanted:
        print(f"{name}: starts", flush=True)
        try:
            result = run_case(CASES[name], Path(out).parent)
        except Exception as error:
            traceback.print_exc()
            result = {"failed": f"{type(error).__name__}: {error}"}
        answer(out, name, result)


def run_case(case: Case, folder: Path) -> dict[str, Any]:
    """Start the engine, look at what it compiled, and run the batch."""
    import pat_vllm
    from tests.support.engines import engine, run

    root = folder / f"cache-{case.cache}"
    os.environ |= {
        "VLLM_CACHE_ROOT": str(root),
        "VLLM_USE_AOT_COMPILE": str(int(case.aot)),
        "PAT_TEST_PLAIN_WEIGHTS": "1" if case.pat == MATERIALIZED else "",
    }
    compilation: dict[str, Any] = {"mode": 0}
    if case.cache is not None:
        compilation = {
            "mode": 3,
            "backend": "inductor",
            "compile_ranges_endpoints": list(case.ends),
            "inductor_compile_config": dict(case.inductor),
        }
        if case.own_folder:
            compilation["cache_dir"] = str(root / "own")
    options: dict[str, Any] = {
        "enforce_eager": False,
        # vLLM 0.33 would run kernels before the first step, one of which the interpreter cannot.
        "kernel_config": {"enable_jit_warmup": False},
        "max_model_len": 256,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 256,
        "compilation_config": compilation,
        "worker_extension_cls": "tests.gpuless.compiled_worker.Compiled",
    }
    pat = {"kv_transfer": "migrate", "weights": "inplace", **case.pat}
    result: dict[str, Any] = {"runs": {}}
    with engine("qwen3", 2, pat, **options) as llm:
        config = llm.llm_engine.vllm_config
        result |= {"mode": config.compilation_config.mode, "v2": config.use_v2_model_runner}
        result["compiled"] = llm.collective_rpc("compiled")
        for name, switches in SWITCHES.items():
            result["runs"][name] = run(llm, jobs(), before_step=at_steps(llm, switches))
        switched = [switch for switch in pat_vllm.report(llm).switches if switch.num_seqs]
        result["switches"] = [
            [switch.source.tp, switch.target.tp, switch.migrated] for switch in switched
        ]
        result["compiled after"] = llm.collective_rpc("compiled")
    for name, outcomes in result["runs"].items():
        result["runs"][name] = {request: asdict(outcome) for request, outcome in outcomes.items()}
    return result


def jobs() -> dict[str, Any]:
    """A batch: half greedy, half seeded."""
    from tests.support.engines import Job

    rng = random.Random(3)
    batch = {}
    for i in range(4):
        sampling: dict[str, Any] = {"max_tokens": 12 + i, "logprobs": 0, "ignore_eos": True}
        sampling |= {"temperature": 0.0} if i % 2 else {"temperature": 0.9, "seed": 100 + i}
        batch[f"r{i}"] = Job([rng.randrange(3, 400) for _ in range(5 + 12 * i)], sampling)
    return batch


def at_steps(llm: Any, switches: Mapping[int, int]) -> Any:
    """See `tests.support.engines.run`."""
    import pat_vllm

    def before_step(step: int) -> None:
        if step in switches:
            assert pat_vllm.switch(llm, tp=switches[step])

    return before_step


if __name__ == "__main__":
    main(*sys.argv[1:])
