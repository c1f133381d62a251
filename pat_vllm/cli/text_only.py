"""Processes that need nothing for pictures and sound."""

from __future__ import annotations

import sys

from pat_vllm.doctor.packages import PACKAGES


def without_vision_and_audio() -> None:
    """Have this process do as if these packages were not installed, which text models can."""
    for name in PACKAGES:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]  # what Python takes for absent
