"""How our processes start: with no imports from the current directory, which may be anyone's."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

SAFE_PATH = {"PYTHONSAFEPATH": "1"}
"""Environment with which Python, and all that it starts, has no current directory among the places
that it imports from."""


def command_of(module: str) -> list[str]:
    """What runs a module as `python -m` does, but imports nothing from the current directory."""
    return [sys.executable, "-P", "-m", module]


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
