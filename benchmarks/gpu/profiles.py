"""Measured decode steps as a profile for `pat-vllm advise --profile`.

    python -m benchmarks.gpu.profiles RESULTS.json

writes a profile for each model beside the results. One GPU cannot measure all that is in a profile:
communication, prefill, switches and what the engine adds to a step are those of
`pat_vllm.simulator.modelled.hardware`. So its kind is "modelled"; its title, key and note say which
part was measured. This module needs pydantic, as pat-vllm does; the measurement does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.gpu.shapes import LLAMA_8B, QWEN_14B, RANKS, ModelShape
from pat_vllm.gpus import GPUS
from pat_vllm.layout import Layout
from pat_vllm.profiling.profile import Profile, StepSample
from pat_vllm.simulator.modelled.figures import STEP_OVERHEAD
from pat_vllm.simulator.modelled.hardware import modelled_profile
from pat_vllm.simulator.modelled.roofline import layer_communication

_DTYPE_BYTES = 2


def profile_of(results: Mapping[str, Any], shape: ModelShape, ranks: int = RANKS) -> Profile:
    """A profile of `ranks` GPUs of the kind on which `results` were measured.

    Raises:
        ValueError: there are no public figures of that GPU, or no decode steps of the model.
    """
    device = results["machine"]["device"]
    name = next((gpu for gpu in GPUS if gpu in device), None)
    if name is None:
        raise ValueError(f"communication between {device}s cannot be modelled, only {[*GPUS]}")
    rows = [row for row in results["decode"]["rows"] if row["model"] == shape.name]
    if not rows:
        raise ValueError(f"the results have no decode steps of {shape.name}")
    base = modelled_profile(
        {**shape.config(), "_name_or_path": shape.name},
        name,
        ranks,
        layouts={row["tp"] for row in rows},
    )
    gpu = GPUS[name]

    def sample(row: Mapping[str, Any]) -> StepSample:
        size = row["batch"] * shape.hidden * _DTYPE_BYTES
        added = shape.layers * layer_communication(gpu, gpu.link, row["tp"], size) + STEP_OVERHEAD
        return StepSample(
            layout=Layout.of(row["tp"], ranks),
            batch=row["batch"],
            context=row["batch"] * row["context"],
            longest=row["context"],
            seconds=row["ms"] / 1e3 + added,
            low=row["low_ms"] / 1e3 + added,
            high=row["high_ms"] / 1e3 + added,
            repeats=row["repeats"],
        )

    date = results["machine"]["date"]
    measured = f"decode steps of one rank measured on {device}, {date[:10]}"
    modelled = "communication, prefill, switches and engine overhead modelled"
    return base.model_copy(
        update={
            "title": f"{shape.name} on {ranks} x {name}: {measured}; {modelled}",
            "created": date,
            "key": {**base.key, "decode": measured},
            "steps": (
                *(sample(row) for row in rows if row["tp"] in base.kv_tokens),
                *(step for step in base.steps if step.prefill),
            ),
            "note": (
                f"Partly measured: {measured} (CUDA graph of the rank's shard, without "
                f"communication). To each, {STEP_OVERHEAD * 1e3:.1f} ms per step and two "
                "all-reduces per layer are added as modelled, and all else is modelled. Of the "
                f"model: {base.note}"
            ),
        }
    )


def write_profiles(path: Path) -> list[Path]:
    """Write a profile for each model of the results in `path`, beside it."""
    results = json.loads(path.read_text())
    models = {row["model"] for row in results["decode"]["rows"]}
    written = []
    for shape in (LLAMA_8B, QWEN_14B):
        if shape.name in models:
            profile = profile_of(results, shape)
            written.append(path.with_name(f"{path.stem}-profile-{shape.name}.json"))
            profile.save(written[-1])
    return written


if __name__ == "__main__":
    for given in sys.argv[1:]:
        for one in write_profiles(Path(given)):
            print(one)
