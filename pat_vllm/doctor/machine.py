"""Facts of the machine for a bug report, and whether it has what so many ranks need."""

from __future__ import annotations

import platform
from collections import Counter
from collections.abc import Iterator
from functools import partial
from importlib import metadata
from itertools import combinations

from pat_vllm.doctor.report import NamedCheck, Unfit
from pat_vllm.modelled.gpus import GiB, gib

_PROCESS_BYTES = 600 << 20
"""Bytes of host memory that each of an engine's processes takes on CPU with a tiny model, about."""
_LINKS = {"nvlink": "NVLink, or AMD's Infinity Fabric", "pcie": "PCIe", None: "a link not known"}
_LIBRARIES = ("transformers", "torchvision", "triton", "flashinfer-python", "ray", "numpy")


def machine_checks(ranks: int) -> Iterator[NamedCheck]:
    """What an engine of so many ranks would find."""
    yield "versions", versions
    yield "host", partial(host, ranks)
    if not on_cpu():
        yield "GPUs", partial(gpus, ranks)
        yield "links", partial(links, ranks)


def on_cpu() -> bool:
    """Whether vLLM runs without GPUs."""
    from vllm.platforms import current_platform

    return bool(current_platform.is_cpu())


def versions() -> str:
    """Those of Python, vLLM, torch and so on; of CUDA and NCCL where torch has them."""
    import torch

    import pat_vllm
    from pat_vllm.plugin import check_vllm_version

    try:
        import vllm
        from vllm import LLM  # noqa: F401
    except Exception as error:  # whatever a package raises
        raise Unfit(
            f"vLLM cannot be imported with torch {torch.__version__}: {type(error).__name__}: "
            f"{error}. If that is a package for pictures or sound, text models need none: "
            "pip uninstall torchvision torchaudio torchcodec"
        ) from error
    check_vllm_version()
    found: dict[str, str | None] = {
        "pat-vllm": pat_vllm.__version__,
        "vllm": vllm.__version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
    }
    if torch.version.cuda:
        found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    for library in _LIBRARIES:
        try:
            found[library] = metadata.version(library)
        except metadata.PackageNotFoundError:
            found[library] = None
    return ", ".join(f"{name} {version}" for name, version in found.items() if version)


def host(ranks: int) -> str:
    """The CPU and its memory, of which ranks without GPUs take much."""
    import psutil

    from pat_vllm.profiling.key import hardware

    memory = psutil.virtual_memory()
    found = f"{memory.available / GiB:.1f} of {gib(memory.total)} of memory free"
    if on_cpu():
        found = f"{hardware()}; {found}"
    needed = (ranks + 2) * _PROCESS_BYTES
    if on_cpu() and memory.available < needed:
        raise Unfit(f"too little memory: {ranks} ranks on CPU need about {gib(needed)}: {found}")
    return found


def gpus(ranks: int) -> str:
    """How many there are of each kind, and what others leave of their memory."""
    import torch
    from vllm.platforms import current_platform

    kinds: Counter[str] = Counter()
    busy = []
    for index in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(index)
        capability = ".".join(map(str, torch.cuda.get_device_capability(index)))
        kinds[f"{torch.cuda.get_device_name(index)} ({gib(total)}, {capability})"] += 1
        if free < 0.9 * total:
            busy.append(f"GPU {index}: {gib(free)} free")
    found = "; ".join([*(f"{number} x {kind}" for kind, number in kinds.items()), *busy])
    # As vLLM counts them: ranks of a bare machine share one (`benchmarks/gpu/bare/one_gpu.py`).
    if (count := current_platform.device_count()) < ranks:
        raise Unfit(f"--ranks {ranks} needs as many GPUs, {count} are here: {found}")
    return found


def links(ranks: int) -> str:
    """Whether each GPU reaches each other's memory, both ways."""
    import torch

    from pat_vllm.start.found_device import found_device

    reaches = torch.cuda.can_device_access_peer
    apart = [
        f"{a}-{b}"
        for a, b in combinations(range(torch.cuda.device_count()), 2)
        if not (reaches(a, b) and reaches(b, a))
    ]
    if apart:
        return f"no peer access between {', '.join(apart)}: slow, by way of the host"
    device = found_device(ranks)
    link = _LINKS[None if device is None else device.link]
    return f"every GPU reaches every other's memory, over {link}"
