"""On the bare machine: `python -m benchmarks.gpu.bare.run STEP [ARGUMENT...] [+ STEP...]`.

Results and a log of each step go to the folder OUT, and the end of the log is shown.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from itertools import groupby
from pathlib import Path

from benchmarks.gpu.bare.receive import SITE
from benchmarks.gpu.known import write_config
from pat_vllm.known_models import MODEL_SHAPES

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
OUT = Path(os.environ.get("OUT", ROOT / "build" / "bare" / "results"))
MODEL = Path("/tmp/pat-bare/model")
SHOWN = 4000  # characters of a log

ENVIRONMENT = {
    "PYTHONPATH": os.pathsep.join(map(str, (HERE / "start", SITE, ROOT))),
    "PYTHONUNBUFFERED": "1",
    "HF_HUB_OFFLINE": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "VLLM_CACHE_ROOT": "/tmp/pat-bare/cache",
    "VLLM_NO_USAGE_STATS": "1",
    # FlashInfer is not packed.
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    # There is no network.
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_HOST_IP": "127.0.0.1",
}
ONE_GPU = ("two", "twographs", "tests")
"""Steps whose ranks share the GPU."""


def commands(step: str, arguments: Sequence[str], out: Path, ranks: int) -> list[list[str]]:
    """The commands of a step, which begin with "pat-vllm" or "python".

    Args:
        arguments: further ones; the first of "profile" is the name of a model.

    Raises:
        ValueError: there is no such step, or model.
    """
    # vLLM counts what the other ranks hold as its own.
    doctor = f"pat-vllm doctor --ranks {ranks} --output-dir {out / step} --engine".split()
    small = {"gpu_memory_utilization": 0.4 / ranks}
    if step == "smoke":
        return [["python", "-m", "benchmarks.gpu.bare.smoke", *arguments]]
    if step == "kernels":
        return [["python", "-m", "benchmarks.gpu", "--out", str(out), *arguments]]
    if step == "profile":
        name, *more = arguments
        if name not in MODEL_SHAPES:
            raise ValueError(f"no model {name!r}: {', '.join(MODEL_SHAPES)}")
        limits = "--max-model-len 16384 --max-num-seqs 256 --tensor-parallel-size 1"
        command = f"pat-vllm profile {MODEL} --load-format dummy --output {out}/profile-{name}.json"
        return [[*f"{command} {limits}".split(), *more]]
    if step == "two":
        return [[*doctor, json.dumps({**small, "disable_custom_all_reduce": True}), *arguments]]
    if step == "twographs":
        return [[*doctor, json.dumps(small), "--all", *arguments]]
    if step == "tests":
        return [["python", "-m", "pytest", "-m", "gpu", "tests/gpu", *arguments]]
    raise ValueError(f"no step {step!r}: smoke, kernels, profile, two, twographs, tests")


def run(step: str, arguments: Sequence[str], ranks: int) -> bool:
    """Run the commands of a step until one fails; whether none did."""
    programs = {
        "python": [sys.executable],
        "pat-vllm": [sys.executable, "-c", "from pat_vllm.cli import app; app()"],
    }
    environment = {**os.environ, **ENVIRONMENT}
    if step in ONE_GPU:
        environment["PAT_ONE_GPU"] = str(ranks)
    OUT.mkdir(parents=True, exist_ok=True)
    if step == "profile":
        write_config(MODEL, arguments[0])
    log, begun = OUT / f"{step}.log", time.monotonic()
    with log.open("wb") as file:
        call = partial(subprocess.call, cwd=ROOT, env=environment, stdout=file, stderr=file)
        todo = commands(step, arguments, OUT, ranks)
        passed = all(call([*programs[program], *words]) == 0 for program, *words in todo)
    print(log.read_text(errors="replace")[-SHOWN:])
    seconds = time.monotonic() - begun
    print(f"== {step} {'passed' if passed else 'FAILED'} after {seconds:.0f} s", flush=True)
    return passed


def main(words: Sequence[str]) -> int:
    """Run the steps that are given; the exit status."""
    steps = [list(step) for plus, step in groupby(words, "+".__eq__) if not plus]
    ranks = int(os.environ.get("RANKS", "2"))
    return int(not all([run(step, arguments, ranks) for step, *arguments in steps]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
