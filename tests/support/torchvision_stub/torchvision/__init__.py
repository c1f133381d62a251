"""Stands in for torchvision, of which vLLM imports names with each vision-language class.

Test support only. pip takes a build for CUDA, which does not fit the CPU torch ("operator
torchvision::nms does not exist"). Text needs nothing of it: every module and name is there, and
none does anything.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

__version__ = "0.0"


def _name(path: str) -> Any:
    """Something that can be imported and named, and not called."""

    class Absent(type):
        def __getattr__(cls, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return _name(f"{path}.{name}")

        def __call__(cls, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError(f"{path}: the tests' stand-in for torchvision does nothing")

    return Absent(path, (), {})


def _get(module: str, name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return _name(f"{module}.{name}")


def __getattr__(name: str) -> Any:
    return _get(__name__, name)


class _Submodules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name: str, path: Any, target: Any = None) -> Any:
        if not name.startswith(f"{__name__}."):
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.__getattr__ = lambda name: _get(spec.name, name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        return


sys.meta_path.append(_Submodules())
