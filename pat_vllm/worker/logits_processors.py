"""Carrying what logits processors keep for each request, beside its tokens, to another runner.

vLLM's own processors that need it, and all that users bring. What vLLM's others keep follows from
the sampling parameters and the tokens, from which they make it when a request comes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection, Iterable, Mapping
from typing import Any, TypeAlias

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from pat_vllm.worker.row_state import Path, RowState

logger = init_logger(__name__)

Lists: TypeAlias = Mapping[str, list[int] | None]
"""A request's lists of tokens that its runner goes on to append to, by name. Processors refer to
them."""

Packed: TypeAlias = dict[Path, bytes]
"""What a processor keeps for one request: pickled, but for references to `Lists` and the device."""


def is_users(processor: Any) -> bool:
    """Whether a logits processor is not vLLM's own."""
    return not type(processor).__module__.startswith("vllm.")


class CarriedState:
    """What one logits processor keeps for requests that come from another runner, or leave.

    Attributes:
        waiting: of requests that have come, and have no row yet, by id.
    """

    def __init__(
        self, processor: Any, num_rows: int, device: torch.device, foreign: Iterable[Any] = ()
    ) -> None:
        """Look at a processor that has no requests yet. See `RowState`."""
        self.waiting: dict[str, Packed] = {}
        self._rows = RowState(processor, num_rows, tuple(foreign))
        self._take = self._rows.look()
        self._device = device
        self._users = is_users(processor)

    def keep(self, request_ids: Collection[str]) -> None:
        """Forget those that wait and are not among these: they have ended."""
        for request_id in self.waiting.keys() - set(request_ids):
            del self.waiting[request_id]

    def look(self) -> None:
        """Find what is kept by row now. To be called before what is kept for requests is taken."""
        self._take = self._rows.look()
        if self._users and (changed := self._rows.changed_beside()):
            logger.warning_once(
                "The logits processor %s has changed %s, which is not kept by row of its batch: a "
                "switch does not carry it, and each layout goes on with its own",
                self._rows.name,
                ", ".join(changed),
            )

    def take(self, request_id: str, row: int | None, lists: Lists) -> Packed | None:
        """What is kept for a request, which may wait for its row still.

        Args:
            row: None: it has none.
        """
        if row is None:
            return self.waiting.get(request_id)
        packed: Packed = {}
        for path, value in self._take(row).items():
            try:
                packed[path] = _dumps(value, lists)
            except Exception as error:
                logger.warning_once(
                    "A switch cannot carry what the logits processor %s keeps for a request in "
                    "%s, which begins anew: %s",
                    self._rows.name,
                    ".".join(path),
                    error,
                )
        return packed

    def restore(self, request_id: str, row: int, lists: Lists) -> None:
        """Give a request that waits, and has a row now, what was kept for it."""
        packed = self.waiting.pop(request_id)
        values = {path: _loads(data, lists, self._device) for path, data in packed.items()}
        if lost := self._rows.restore(row, values):
            logger.warning_once(
                "The logits processor %s has no %s in this layout for what a switch carried",
                self._rows.name,
                ", ".join(map(".".join, lost)),
            )


class _Pickler(pickle.Pickler):
    """Pickles but for what every runner has its own of."""

    def __init__(self, file: io.BytesIO, lists: Lists) -> None:
        super().__init__(file)
        self._names = {id(tokens): name for name, tokens in lists.items() if tokens is not None}

    def persistent_id(self, obj: Any) -> Any:
        if (name := self._names.get(id(obj))) is not None:
            return "tokens", name
        if isinstance(obj, torch.device):
            return "device", obj.type == "cpu"
        if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return "tensor", obj.detach().cpu()
        if isinstance(obj, VllmConfig):
            raise ValueError("it refers to the engine's config")
        return None


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote."""

    def __init__(self, file: io.BytesIO, lists: Lists, device: torch.device) -> None:
        super().__init__(file)
        self._lists = lists
        self._device = device

    def persistent_load(self, pid: Any) -> Any:
        kind, value = pid
        if kind == "tokens":
            return self._lists[value]
        if kind == "device":
            return torch.device("cpu") if value else self._device
        return value.to(self._device)


def _dumps(value: Any, lists: Lists) -> bytes:
    file = io.BytesIO()
    _Pickler(file, lists).dump(value)
    return file.getvalue()


def _loads(data: bytes, lists: Lists, device: torch.device) -> Any:
    return _Unpickler(io.BytesIO(data), lists, device).load()
