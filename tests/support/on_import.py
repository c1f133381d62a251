"""Patches modules when they are imported. For the stand-ins' `sitecustomize` modules.

Those run in every process that has their folder on PYTHONPATH, where vLLM is too slow to import.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

Patch = Callable[[Any], None]


def patch_on_import(patches: Mapping[str, Patch]) -> None:
    """Call `patches[name](module)` when the module `name` has been imported."""
    sys.meta_path.insert(0, _Finder(dict(patches)))


class _Finder(importlib.abc.MetaPathFinder):
    def __init__(self, left: dict[str, Patch]) -> None:
        self._left = left

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        patch = self._left.pop(name, None)
        if patch is None:
            return None
        spec = importlib.util.find_spec(name)
        assert spec is not None and spec.loader is not None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
