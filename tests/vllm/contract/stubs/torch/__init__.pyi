"""Stands for torch where our code is checked against vLLM's: all of it is `Any`."""

from typing import Any

def __getattr__(name: str) -> Any: ...
