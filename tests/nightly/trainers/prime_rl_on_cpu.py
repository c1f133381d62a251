"""prime-rl's worker extension, without what its package does to vLLM when it is imported.

prime-rl 0.8.0 replaces methods of vLLM by some for versions before 0.30, and vLLM fails by that.
"""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType

_NAME = "prime_rl.inference.vllm.worker"
_found = importlib.util.find_spec("prime_rl.inference.vllm")
assert _found is not None and _found.submodule_search_locations
_package = ModuleType(_NAME)
_package.__path__ = [f"{folder}/worker" for folder in _found.submodule_search_locations]
sys.modules[_NAME] = _package

from prime_rl.inference.vllm.worker.filesystem import (  # noqa: E402
    FileSystemWeightUpdateWorker,
)

__all__ = ["FileSystemWeightUpdateWorker"]
