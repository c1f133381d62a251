"""How a method of vLLM's is replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

_PATCHED = "_pat_patch"
"""Attribute that marks a replaced method."""


def replace(
    owner: Any, name: str, wrap: Callable[[Any], Callable[..., Any]], static: bool = False
) -> None:
    """Replace `owner.name` by `wrap(original)`, unless that was done before."""
    original = getattr(owner, name)
    if getattr(original, _PATCHED, False):
        return
    inner = wrap(original)

    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return inner(*args, **kwargs)

    setattr(replacement, _PATCHED, True)
    setattr(owner, name, staticmethod(replacement) if static else replacement)


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Inside, `owner.name` is `value`."""
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)
