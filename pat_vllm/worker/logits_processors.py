"""Carrying what logits processors keep for each request, beside its tokens, to another runner.

vLLM's own processors that need it, and all that users bring. What vLLM's others keep follows from
the sampling parameters and the tokens, from which they make it when a request comes.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from vllm.config import VllmConfig
from vllm.logger import init_logger

from pat_vllm.worker.row_state import Path, RowState, RowValues

logger = init_logger(__name__)

Lists: TypeAlias = Mapping[str, list[int] | None]
"""A request's lists of tokens that its runner goes on to append to, by name. Processors refer to
them."""

Packed: TypeAlias = list[bytes]
"""What a processor keeps for one request: pickled, but for references to `Lists`, the device, the
processor and what it keeps beside rows. It is one piece, if all of it can be pickled."""


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
        self._shared = self._rows.references()
        self._device = device
        self._users = is_users(processor)

    def keep(self, request_ids: Collection[str]) -> None:
        """Forget those that wait and are not among these: they have ended."""
        for request_id in self.waiting.keys() - set(request_ids):
            del self.waiting[request_id]

    def look(self, rows: Collection[int] | None = None) -> None:
        """Find what is kept by row now. To be called before what is kept for requests is taken.

        Args:
            rows: those that have requests; None: any may have.
        """
        self._take = self._rows.look(rows)
        self._shared = self._rows.references()
        if self._users and (changed := self._rows.changed_beside()):
            logger.warning_once(
                "The logits processor %s has changed %s, kept beside the rows of its batch: no "
                "switch carries it, and each layout goes on with its own, which does no harm to a "
                "cache or to what follows from the rows",
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
        values = self._take(row)
        try:
            return [_dumps(values, lists, self._shared)]
        except Exception:
            packed = [self._pack(path, value, lists) for path, value in values.items()]
            return [each for each in packed if each is not None]

    def _pack(self, path: Path, value: Any, lists: Lists) -> bytes | None:
        """One of the values of a row; None: it cannot be pickled, which is told."""
        try:
            return _dumps({path: value}, lists, self._shared)
        except Exception as error:
            logger.warning_once(
                "A switch cannot carry what the logits processor %s keeps for a request in %s, "
                "which begins anew: %s",
                self._rows.name,
                ".".join(path),
                type(error).__name__,
            )
            return None

    def restore(self, request_id: str, row: int, lists: Lists) -> Callable[[], object]:
        """Give a request that waits, and has a row now, what was kept for it.

        Returns:
            What gives it the tensors once more, if the processor has overwritten them.
        """
        shared = self._rows.references()
        values: RowValues = {}
        for data in self.waiting.pop(request_id):
            try:
                values |= _loads(data, lists, self._device, shared)
            except Exception as error:
                self._tell_lost(type(error).__name__)
        for path in self._rows.restore(row, values):
            self._tell_lost(".".join(path))
        tensors = {path: each for path, each in values.items() if isinstance(each, torch.Tensor)}
        return partial(self._rows.restore, row, tensors)

    def _tell_lost(self, what: str) -> None:
        logger.warning_once(
            "The logits processor %s begins anew in this layout with what a switch carried: %s",
            self._rows.name,
            what,
        )


class _Pickler(pickle.Pickler):
    """Pickles but for what every runner has its own of."""

    def __init__(self, file: io.BytesIO, lists: Lists, shared: Mapping[Path, Any]) -> None:
        super().__init__(file)
        named: list[tuple[Any, Any]] = [(("tokens", name), each) for name, each in lists.items()]
        named += [(("shared", path), value) for path, value in shared.items()]
        self._names = {id(value): name for name, value in named if value is not None}

    def persistent_id(self, obj: Any) -> Any:
        if (name := self._names.get(id(obj))) is not None:
            return name
        if isinstance(obj, torch.device):
            return "device", obj.type == "cpu"
        if isinstance(obj, torch.Tensor) and obj.device.type != "cpu":
            return "tensor", obj.detach().cpu()
        if isinstance(obj, VllmConfig):
            raise ValueError("it refers to the engine's config")
        return None


class _Unpickler(pickle.Unpickler):
    """Reads what `_Pickler` wrote."""

    def __init__(
        self, file: io.BytesIO, lists: Lists, device: torch.device, shared: Mapping[Path, Any]
    ) -> None:
        super().__init__(file)
        self._lists = lists
        self._device = device
        self._shared = shared

    def persistent_load(self, pid: Any) -> Any:
        kind, value = pid
        if kind == "tokens":
            return self._lists[value]
        if kind == "shared":
            return self._shared[value]
        if kind == "device":
            return torch.device("cpu") if value else self._device
        return value.to(self._device)


def _dumps(values: RowValues, lists: Lists, shared: Mapping[Path, Any]) -> bytes:
    file = io.BytesIO()
    _Pickler(file, lists, shared).dump(values)
    return file.getvalue()


def _loads(
    data: bytes, lists: Lists, device: torch.device, shared: Mapping[Path, Any]
) -> RowValues:
    values: RowValues = _Unpickler(io.BytesIO(data), lists, device, shared).load()
    return values
