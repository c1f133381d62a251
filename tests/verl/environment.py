"""The environment in which verl's own code runs on CPU: stand-ins, Ray, models."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.support import patient_ray

ROOT = Path(__file__).resolve().parents[2]
SUPPORT = ROOT / "tests" / "support"


def apply() -> None:
    """Set it in this process, if verl is installed: before anything imports verl or vLLM.

    Ray's workers and the engines inherit it.
    """
    if importlib.util.find_spec("verl") is None or _applied():
        return
    os.environ.update(variables())
    sys.path[:0] = os.environ["PYTHONPATH"].split(os.pathsep)[:2]


def _applied() -> bool:
    return os.environ.get("VERL_USE_EXTERNAL_MODULES") == "verl_on_cpu"


def variables(outer: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Environment variables of a verl process on CPU, its Ray workers and its engines."""
    inside = {name: value for name, value in outer.items() if name not in _UNWANTED}
    path = [str(SUPPORT / "verl_on_cpu"), str(SUPPORT / "plain_weights")]
    if inside.get("PYTHONPATH"):
        path.append(inside["PYTHONPATH"])
    return inside | _VARIABLES | {"PYTHONPATH": os.pathsep.join(path)}


_UNWANTED = ("CUDA_VISIBLE_DEVICES", "VLLM_CPU_KVCACHE_SPACE", "RAY_ADDRESS")

_VARIABLES = patient_ray.ENVIRONMENT | {
    "VERL_PLATFORM": "cpu",
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
    # verl registers its FSDP engine for "cuda" only.
    "VERL_ENGINE_DEVICE": "cuda",
    # Or Ray clears what verl puts into CUDA_VISIBLE_DEVICES of an actor without GPUs.
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_DEDUP_LOGS": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    "VLLM_NO_USAGE_STATS": "1",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "TORCHDYNAMO_DISABLE": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
