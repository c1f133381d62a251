"""A second stream, for work beside that of a device's current stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class SideStream:
    """A second stream of a device. On CPU, where nothing is queued, work is done in order."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = None
        self._stream: Any = None
        if device.type != "cpu":
            self._module = torch.get_device_module(device)
            self._stream = self._module.Stream()

    @contextmanager
    def overlap(self) -> Iterator[None]:
        """Queue what is done inside after what is queued so far, and beside what comes later."""
        if self._module is None:
            yield
            return
        self._stream.wait_stream(self._module.current_stream())
        with self._module.stream(self._stream):
            yield

    def wait(self) -> None:
        """Block until that work is done. All that is queued from then on comes after it."""
        if self._module is not None:
            self._stream.synchronize()

    def wait_for_current(self) -> None:
        """Block until the work of the current stream is done."""
        if self._module is not None:
            self._module.current_stream().synchronize()
