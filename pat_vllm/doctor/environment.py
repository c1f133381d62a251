"""Facts of the machine, and of what vLLM would choose: `python -m pat_vllm.doctor.environment`.

In a process of its own: a driver or library that crashes is then a failed stage.
"""

from __future__ import annotations

import importlib
import json
import platform
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from traceback import walk_tb
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pat_vllm.doctor.child import Events
from pat_vllm.doctor.report import Check
from pat_vllm.files.reading import first_problem
from pat_vllm.models.layer_sizes import fields_of
from pat_vllm.start.found_device import found_device
from pat_vllm.start.gpus import Device, GiB, gib
from pat_vllm.start.text_only import PACKAGES

_PROCESS_BYTES = 600 << 20
"""Of host memory, about what each of an engine's processes takes on CPU with a tiny model."""
_LONGEST_SENTENCE = 4000
_LINKS: Mapping[str, str] = {"nvlink": "NVLink, or AMD's Infinity Fabric", "pcie": "PCIe"}
_LIBRARIES = ("transformers", "torchvision", "triton", "flashinfer-python", "ray", "numpy")


@dataclass(frozen=True, kw_only=True)
class FoundDevice(Device):
    """A GPU that is here; `free` of its memory, bytes."""

    free: int


@dataclass(frozen=True)
class EnvironmentFacts:
    """What was found.

    Attributes:
        versions: of Python, vLLM, torch and so on; of CUDA and NCCL where torch has them.
        platform: "cpu", "cuda" or "rocm".
        cpu: kind and NUMA nodes, in words.
        memory, free: of the host, bytes.
        devices: GPUs.
        peers: whether GPU i can reach the memory of GPU j.
        attention, runner: what vLLM would choose for the engine; None where it refuses it.
        refused: why PAT, or vLLM, does not run the engine; None if it does.
        config: of the model, as in its config.json.
        graphs: by "piecewise" and "full", what vLLM makes of that `cudagraph_mode` here. A mode
            that vLLM refuses is left out: its stage shows why.
    """

    versions: dict[str, str]
    platform: str
    cpu: str
    memory: int
    free: int
    devices: tuple[FoundDevice, ...] = ()
    peers: tuple[tuple[bool, ...], ...] = ()
    attention: str | None = None
    runner: str | None = None
    refused: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    graphs: dict[str, str] = field(default_factory=dict)

    @property
    def on_cpu(self) -> bool:
        """Whether vLLM runs without GPUs."""
        return self.platform == "cpu"


FACTS = TypeAdapter(EnvironmentFacts)


def inspect_environment(engine: dict[str, Any], events: Events) -> EnvironmentFacts:
    """Import everything that an engine would, and ask it.

    Args:
        engine: keyword arguments of `vllm.LLM`, for an engine with PAT.
    """
    events.tell(doing="importing torch and vLLM")
    import psutil
    import torch

    _import_vllm(str(torch.__version__))
    from vllm.platforms import current_platform

    events.tell(doing="looking at devices")
    kind = "cpu" if current_platform.is_cpu() else "cuda" if torch.version.cuda else "rocm"
    devices, peers = ((), ()) if kind == "cpu" else _devices(engine["tensor_parallel_size"])
    events.tell(doing="asking what vLLM and PAT make of the engine")
    chosen = _choices(engine)
    memory = psutil.virtual_memory()
    return EnvironmentFacts(
        _versions(), kind, _cpu(), memory.total, memory.available, devices, peers, **chosen
    )


def _import_vllm(torch_version: str) -> None:
    """As a user's program does, or say which package is in the way, and what to do."""
    try:
        from vllm import LLM  # noqa: F401
    except Exception:  # whatever a package raises
        if not (broken := incompatible_packages()):
            raise
        reasons = "; ".join(
            f"{name} {_version(name) or 'of an unknown version'}: {why}"
            for name, why in broken.items()
        )
        raise ImportError(
            f"vLLM cannot be imported, as packages do not fit torch {torch_version} ({reasons}). "
            f"Text models need none of them: pip uninstall {' '.join(PACKAGES)}"
        ) from None


def incompatible_packages() -> dict[str, str]:
    """Packages for pictures and sound that are installed and cannot be imported, and why."""
    reasons = {}
    for name in PACKAGES:
        if find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a package raises
            lines = str(error).strip().splitlines() or [""]
            reasons[name] = f"{type(error).__name__}: {lines[0]}"
    return reasons


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _versions() -> dict[str, str]:
    import torch
    import vllm.version

    import pat_vllm

    versions: dict[str, str | None] = {
        "pat-vllm": pat_vllm.__version__,
        "vllm": vllm.version.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        **{name: _version(name) for name in _LIBRARIES},
    }
    if torch.version.cuda:
        versions["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return {name: version for name, version in versions.items() if version}


def _cpu() -> str:
    from pat_vllm.profiling.key import hardware

    nodes = len(list(Path("/sys/devices/system/node").glob("node[0-9]*"))) or 1
    return f"{hardware()}, {nodes} NUMA node(s)"


def _devices(ranks: int) -> tuple[tuple[FoundDevice, ...], tuple[tuple[bool, ...], ...]]:
    import torch

    count = torch.cuda.device_count()
    devices = []
    for index in range(count):
        free, total = torch.cuda.mem_get_info(index)
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        # As an engine sees it.
        device = found_device(ranks, index)
        device = device or Device(total, capability, torch.cuda.get_device_name(index))
        devices.append(FoundDevice(**asdict(device), free=free))
    peers = tuple(
        tuple(a == b or torch.cuda.can_device_access_peer(a, b) for b in range(count))
        for a in range(count)
    )
    return tuple(devices), peers


def _choices(engine: dict[str, Any]) -> dict[str, Any]:
    """What becomes of an engine's options: by vLLM's own config, and PAT's own check of it."""
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.v1.attention.selector import get_attn_backend

    from pat_vllm.plugin import check_vllm_version
    from pat_vllm.start.prepare import prepare

    try:
        check_vllm_version()
        config = EngineArgs(**engine).create_engine_config()
    except Exception as error:  # a user's mistake may be any exception of vLLM's
        return {"refused": _sentence(error)}
    options = fields_of(config.model_config.hf_text_config)
    model = json.loads(json.dumps(options, default=str))
    try:
        prepare(config)
    except ValueError as error:
        return {"refused": str(error), "config": model}
    graphs = {}
    for mode in ("PIECEWISE", "FULL"):
        compilation = {**engine.get("compilation_config", {}), "cudagraph_mode": mode}
        eager = {**engine, "enforce_eager": False, "compilation_config": compilation}
        with suppress(Exception):  # as above
            resolved = EngineArgs(**eager).create_engine_config().compilation_config
            graphs[mode.lower()] = resolved.cudagraph_mode.name
    head, dtype = config.model_config.get_head_size(), config.model_config.dtype
    kv_dtype, latent = config.cache_config.cache_dtype, config.model_config.use_mla
    with set_current_vllm_config(config):
        backend = get_attn_backend(head, dtype, kv_dtype, use_mla=latent)
    return {
        "attention": str(backend.get_name()),
        "runner": "V2" if config.use_v2_model_runner else "V1",
        "config": model,
        "graphs": graphs,
    }


def _sentence(error: Exception) -> str:
    """What an error says in one sentence, after "vLLM" if it is not PAT's own."""
    raised, said = error, str(error)
    if isinstance(error, ValidationError):  # vLLM's configs are pydantic's, which wraps an error
        raised = error.errors()[0].get("ctx", {}).get("error", error)
        said = first_problem(error, _LONGEST_SENTENCE)
    modules = [frame.f_globals["__name__"] for frame, _ in walk_tb(raised.__traceback__)]
    if isinstance(raised, ValueError) and modules and modules[-1].startswith("pat_vllm."):
        return said
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    return f"vLLM: {(lines or [type(error).__name__])[0]}"


def environment_checks(facts: EnvironmentFacts, ranks: int, machine: bool) -> list[Check]:
    """What the facts say of this machine.

    Args:
        machine: whether an engine of so many ranks is to be started on it.
    """
    versions = ", ".join(f"{name} {version}" for name, version in facts.versions.items())
    memory = f"{facts.free / GiB:.1f} of {gib(facts.memory)} free"
    need = (ranks + 2) * _PROCESS_BYTES
    problem = None
    if facts.on_cpu and machine and facts.free < need:
        needed = f"{ranks} ranks on CPU need about {gib(need)}"
        problem = f"too little memory: {needed}, {memory}"
    checks = [
        Check("versions", versions, values=dict(facts.versions)),
        Check("CPU", facts.cpu),
        Check("host memory", memory, problem),
    ]
    if not facts.on_cpu:
        checks += _device_checks(facts, ranks, machine)
    if facts.refused is None:
        chosen = f"{facts.platform}: attention {facts.attention}, model runner {facts.runner}"
        checks.append(Check("vLLM would choose", chosen))
    return checks


def _device_checks(facts: EnvironmentFacts, ranks: int, machine: bool) -> list[Check]:
    counted = Counter(
        f"{device.name} ({device.memory / GiB:.0f} GiB, {device.capability})"
        for device in facts.devices
    )
    kinds = ", ".join(f"{count} x {text}" for text, count in counted.items()) or "none"
    few = machine and len(facts.devices) < ranks
    problem = f"--ranks {ranks} needs as many GPUs, {len(facts.devices)} are here" if few else None
    apart = [
        f"{a}-{b}"
        for a, row in enumerate(facts.peers)
        for b, reaches in enumerate(row)
        if a < b and not (reaches and facts.peers[b][a])
    ]
    links = "every GPU reaches every other's memory"
    if facts.devices and (link := facts.devices[0].link) is not None:
        links += f", over {_LINKS[link]}"
    if apart:
        links = f"no peer access between {', '.join(apart)}: slow, by way of the host"
    busy = [
        f"GPU {index}: {gib(device.free)} free"
        for index, device in enumerate(facts.devices)
        if device.free < 0.9 * device.memory
    ]
    matrix = [[int(peer) for peer in row] for row in facts.peers]
    return [
        Check("GPUs", "; ".join([kinds, *busy]), problem),
        Check("links", links, values={"peer_access": matrix}),
    ]


def main(request: str, events: str) -> None:
    """The child: an engine's keyword arguments in, its facts out."""
    lines, began = Events(events), time.monotonic()
    try:
        facts = inspect_environment(json.loads(Path(request).read_text()), lines)
    except Exception as error:  # it is told, whatever it was
        seconds = round(time.monotonic() - began, 2)
        problem = f"{type(error).__name__}: {error}"
        check = Check("importing vLLM and asking it", problem=problem, seconds=seconds)
        lines.tell(check=asdict(check), last=True)
        raise
    lines.tell(answer=FACTS.dump_python(facts, mode="json"))


if __name__ == "__main__":
    main(*sys.argv[1:])
