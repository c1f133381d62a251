"""Facts of the machine, and of what vLLM would choose: `python -m pat_vllm.doctor.environment`.

In a process of its own: a driver or library that crashes is then a failed stage.
"""

from __future__ import annotations

import os
import platform
import sys
import time
from dataclasses import asdict, dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from pat_vllm.doctor.session import Journal
from pat_vllm.doctor.values import Check
from pat_vllm.text_only import without_vision_and_audio

if __name__ == "__main__":
    without_vision_and_audio()

_LIBRARIES = ("transformers", "triton", "flashinfer-python", "ray", "numpy")


@dataclass(frozen=True)
class Question:
    """What to look at.

    Attributes:
        engine: keyword arguments of `vllm.LLM`, for an engine with PAT.
    """

    engine: dict[str, Any]


@dataclass(frozen=True)
class Device:
    """A GPU. Memory in bytes."""

    name: str
    capability: str
    memory: int
    free: int


@dataclass(frozen=True)
class Facts:
    """What was found.

    Attributes:
        versions: of Python, vLLM, torch and so on; of CUDA and NCCL where torch has them.
        platform: "cpu", "cuda" or "rocm".
        cpu: kind, usable cores and NUMA nodes.
        memory, free: of the host, bytes.
        devices: GPUs.
        peers: whether GPU i can reach the memory of GPU j.
        attention, runner: what vLLM would choose for the engine; None where it refuses it.
        refused: why PAT, or vLLM, does not run the engine; None if it does.
        config: of the model, as in its config.json.
    """

    versions: dict[str, str]
    platform: str
    cpu: dict[str, Any]
    memory: int
    free: int
    devices: tuple[Device, ...] = ()
    peers: tuple[tuple[bool, ...], ...] = ()
    attention: str | None = None
    runner: str | None = None
    refused: str | None = None
    config: dict[str, Any] = field(default_factory=dict)


QUESTION = TypeAdapter(Question)
FACTS = TypeAdapter(Facts)


def look(question: Question, journal: Journal) -> Facts:
    """Import everything that an engine would, and ask it."""
    journal.write(doing="importing torch and vLLM")
    import psutil
    import torch
    from vllm.platforms import current_platform

    journal.write(doing="looking at devices")
    kind = "cpu" if current_platform.is_cpu() else "cuda" if torch.version.cuda else "rocm"
    devices, peers = ((), ()) if kind == "cpu" else _devices()
    journal.write(doing="asking what vLLM and PAT make of the engine")
    chosen = _choices(question.engine)
    memory = psutil.virtual_memory()
    return Facts(
        _versions(), kind, _cpu(), memory.total, memory.available, devices, peers, **chosen
    )


def _versions() -> dict[str, str]:
    import torch
    import vllm.version

    import pat_vllm

    found = {
        "pat-vllm": pat_vllm.__version__,
        "vllm": vllm.version.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
    }
    if torch.version.cuda:
        found["cuda"] = torch.version.cuda
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    if torch.version.hip:
        found["hip"] = torch.version.hip
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _cpu() -> dict[str, Any]:
    from pat_vllm.profiling.key import hardware

    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {"kind": hardware(), "cores": usable, "numa_nodes": nodes}


def _devices() -> tuple[tuple[Device, ...], tuple[tuple[bool, ...], ...]]:
    import torch

    count = torch.cuda.device_count()
    devices = []
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        devices.append(Device(torch.cuda.get_device_name(index), capability, total, free))
    peers = tuple(
        tuple(a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count))
        for a in range(count)
    )
    return tuple(devices), peers


def _choices(engine: dict[str, Any]) -> dict[str, Any]:
    """What becomes of an engine's options: by vLLM's own config, and PAT's own check of it."""
    from vllm.engine.arg_utils import EngineArgs

    from pat_vllm.plugin import check_vllm_version
    from pat_vllm.support import prepare

    try:
        check_vllm_version()
        config = EngineArgs(**engine).create_engine_config()
    except Exception as error:  # a user's mistake may be any exception of vLLM's
        return {"refused": f"vLLM: {_last(error)}" if "PAT" not in str(error) else str(error)}
    model = config.model_config.hf_text_config.to_dict()
    try:
        prepare(config)
    except ValueError as error:
        return {"refused": str(error), "config": _plain(model)}
    return {
        "attention": _attention(config),
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "config": _plain(model),
    }


def _attention(config: Any) -> str:
    from vllm.config import set_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    model = config.model_config
    with set_current_vllm_config(config):
        backend = get_attn_backend(
            model.get_head_size(), model.dtype, config.cache_config.cache_dtype
        )
    return str(backend.get_name())


def _last(error: Exception) -> str:
    """Of pydantic's messages, the sentence."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    told = [line for line in lines if line.startswith("Value error,")]
    return (told or lines or [type(error).__name__])[0]


def _plain(config: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in config.items()
        if value is None or isinstance(value, (bool, int, float, str))
    }


def main(request: str, answer: str, journal: str) -> None:
    """Files in, files out."""
    question = QUESTION.validate_json(Path(request).read_text())
    with Path(journal).open("a") as file:
        lines, began = Journal(file), time.monotonic()
        try:
            facts = look(question, lines)
        except Exception as error:  # it is told, whatever it was
            problem = f"{type(error).__name__}: {error}"
            seconds = round(time.monotonic() - began, 2)
            lines.write(check=asdict(Check("environment", problem=problem, seconds=seconds)))
            raise
    Path(answer).write_bytes(FACTS.dump_json(facts))


if __name__ == "__main__":
    main(*sys.argv[1:])
