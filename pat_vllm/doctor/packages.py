"""Packages that vLLM installs for pictures and sound, which text models do not need."""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from importlib import metadata
from importlib.util import find_spec

from pat_vllm.text_only import PACKAGES


def unfit(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Those that are installed and cannot be imported, and why."""
    found = {}
    for name in names:
        if find_spec(name) is None:
            continue
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever a package raises
            lines = str(error).strip().splitlines() or [""]
            found[name] = f"{type(error).__name__}: {lines[0]}"
    return found


def what_to_do(unfit: dict[str, str], torch_version: str) -> str:
    """Of packages for which vLLM cannot be imported."""
    reasons = "; ".join(f"{name} {_version(name)}: {why}" for name, why in unfit.items())
    return (
        f"vLLM cannot be imported, as packages do not fit torch {torch_version} ({reasons}). "
        f"Text models need none of them: pip uninstall {' '.join(PACKAGES)}"
    )


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return "of an unknown version"
