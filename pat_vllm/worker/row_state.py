"""What an object keeps for each row of a batch, read and written from outside.

vLLM's interface of logits processors says how rows come, go and move within a batch, but not how a
request's row leaves for another batch. So their rows are found by how such classes keep them: dicts
by row, and lists and arrays with an element for each row.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import torch

Path: TypeAlias = tuple[str, ...]
"""Names of the attributes that lead from the object to what it keeps."""

RowValues: TypeAlias = dict[Path, Any]
"""What belongs to one row, by where it is kept."""


class Entry(Enum):
    """What stands for a value that is not there."""

    NONE = "a dict has no entry for the row"


_BUFFERS = {"UvaBackedTensor": ("np",), "StagedWriteTensor": ("gpu",)}
"""vLLM's classes of arrays that are on the host and the device, and where their values are."""
_PLAIN = (int, float, str, bytes, type(None))
_FEW = 4096
"""Elements of what is compared by its contents, where it belongs to no row."""


class RowState:
    """Finds what an object keeps by row.

    The object is looked at when it is made, before it has a row:

    * A dict belongs to rows if it was empty, or had an equal value for every row, and has no other
      keys than rows.
    * A list or array with an element for each row belongs to rows if all elements were equal, or if
      it is an array that came later. If they were not, it may be a table, and only elements that
      have changed since belong to rows.

    Objects of the owner's own package are looked into, those of other packages are not. What cannot
    be looked at, whatever it raises, belongs to no row.
    """

    def __init__(self, owner: Any, num_rows: int, foreign: Collection[Any] = ()) -> None:
        """Look at `owner`, which has no row yet.

        Args:
            owner: for example a logits processor.
            num_rows: the most rows of its batch.
            foreign: objects that it refers to and does not own, with what these consist of.
        """
        self.owner = owner
        self._num_rows = num_rows
        parts = [part for value in foreign for part in (value, *_fields(value).values())]
        self._foreign = {id(part) for part in parts if not isinstance(part, _PLAIN)}
        self._lists: set[Path] = set()
        self._dicts: set[Path] = set()
        self._elements: dict[Path, list[int]] = {}
        self._beside: dict[Path, Any] = {}
        for path, value in self._attributes():
            if not self._begin(path, value):
                self._beside[path] = _print_beside(value)

    @property
    def name(self) -> str:
        """The owner's class, as its user knows it."""
        return type(self.owner).__qualname__

    def _begin(self, path: Path, value: Any) -> bool:
        """Remember what may belong to rows; False: this does not."""
        try:
            if isinstance(value, dict):
                filled = set(value) == set(range(self._num_rows)) and _uniform([*value.values()])
                if not value or filled:
                    self._dicts.add(path)
                return path in self._dicts
            if not self._has_elements(value):
                return False
            if not _uniform(value):
                self._elements[path] = [_print_of(element) for element in value]
            if isinstance(value, list):
                self._lists.add(path)
            return True
        except Exception:
            return False

    def look(self, rows: Collection[int] | None = None) -> Callable[[int], RowValues]:
        """Find what belongs to rows now.

        Args:
            rows: those that have requests; None: any may have.

        Returns:
            What takes a row: its values, arrays as copies on the CPU.
        """
        taken = range(self._num_rows) if rows is None else set(rows)
        places = list(self._places(taken))

        def take(row: int) -> RowValues:
            values: RowValues = {}
            for path, place in places:
                if isinstance(place, dict):
                    values[path] = place.get(row, Entry.NONE)
                    continue
                element, before = place[row], self._elements.get(path)
                if before is None or before[row] != _print_of(element):
                    values[path] = _copied(element)
            return values

        return take

    def _places(self, rows: Collection[int]) -> Iterator[tuple[Path, Any]]:
        """What belongs to rows, of which these have requests."""
        for path, value in self._attributes():
            if isinstance(value, dict):
                found = path in self._dicts and all(key in rows for key in value)
            else:
                # A list that was not there at first has grown to this length.
                grown = isinstance(value, list) and path not in self._lists
                found = self._has_elements(value) and not grown
            if found:
                yield path, value

    def restore(self, row: int, values: Mapping[Path, Any]) -> list[Path]:
        """Give a row what was taken from another one of the same class.

        Returns:
            Where the owner has no place for it.
        """
        attributes = dict(self._attributes())
        lost = []
        for path, value in values.items():
            try:
                place = attributes[path]
                if value is Entry.NONE:
                    place.pop(row, None)
                elif isinstance(place, torch.Tensor):
                    place[row] = torch.as_tensor(value)
                else:
                    place[row] = value
            except Exception:
                lost.append(path)
        return lost

    def references(self) -> dict[Path, Any]:
        """The owner and what it keeps beside rows: objects that rows may refer to."""
        shared: dict[Path, Any] = {(): self.owner}
        for path, value in self._attributes():
            if path in self._beside and not isinstance(value, (*_PLAIN, tuple, frozenset)):
                shared[path] = value
        return shared

    def changed_beside(self) -> list[str]:
        """Attributes that belong to no row, and are not as they were at first."""
        now = dict(self._attributes())
        return [
            ".".join(path)
            for path, value in self._beside.items()
            if path in now and _print_beside(now[path]) != value
        ]

    def _attributes(self) -> Iterator[tuple[Path, Any]]:
        """Every attribute of the owner, and of what it owns of its own package."""
        package = type(self.owner).__module__.partition(".")[0]
        seen = {id(self.owner), *self._foreign}
        queue: list[tuple[Path, Any]] = [((), self.owner)]
        for path, holder in queue:
            names = _BUFFERS.get(type(holder).__name__)
            for name, value in _fields(holder).items():
                if id(value) in seen or (names is not None and name not in names):
                    continue
                yield (*path, name), value
                kind = type(value)
                own = kind.__module__.partition(".")[0] == package and not isinstance(value, type)
                # An object of vLLM's may refer to the whole engine.
                if kind.__name__ in _BUFFERS or (own and package != "vllm"):
                    seen.add(id(value))
                    queue.append(((*path, name), value))

    def _has_elements(self, value: Any) -> bool:
        """Whether it is a list or array with an element for each row."""
        try:
            if isinstance(value, torch.Tensor):
                plain = value.layout == torch.strided and not (value.is_meta or value.is_nested)
                return plain and value.ndim > 0 and len(value) == self._num_rows
            if isinstance(value, np.ndarray):
                return value.ndim > 0 and len(value) == self._num_rows
            return isinstance(value, list) and len(value) == self._num_rows
        except Exception:
            return False


def _fields(holder: Any) -> dict[str, Any]:
    """Attributes of an object, those in slots included."""
    fields = dict(getattr(holder, "__dict__", {}))
    for kind in type(holder).__mro__:
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__") and hasattr(holder, name):
                fields[name] = getattr(holder, name)
    return fields


def _uniform(elements: list[Any] | np.ndarray | torch.Tensor) -> bool:
    """Whether all elements along the first axis are equal."""
    first = _print_of(elements[0])
    return all(_print_of(element) == first for element in elements)


def _copied(element: Any) -> Any:
    """An element that later changes of its array or list do not reach."""
    if isinstance(element, torch.Tensor):
        return element.detach().to("cpu", copy=True)
    return element.copy() if isinstance(element, np.ndarray) else element


def _print_of(element: Any) -> int:
    """A number that differs where elements differ."""
    if isinstance(element, torch.Tensor):
        element = element.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if isinstance(element, np.ndarray | np.generic) and element.dtype != object:
        return hash(element.tobytes())
    try:
        return hash(pickle.dumps(element))
    except Exception:
        return id(element)


def _print_beside(value: Any) -> Any:
    """Something cheap that differs where what belongs to no row has changed, as far as it tells."""
    try:
        if isinstance(value, _PLAIN):
            return repr(value)
        if isinstance(value, np.ndarray | torch.Tensor):
            size = value.numel() if isinstance(value, torch.Tensor) else value.size
            return _print_of(value) if size <= _FEW else size
        if isinstance(value, list | tuple | set | frozenset | dict | deque):
            inner = [*value, *value.values()] if isinstance(value, dict) else [*value]
            plain = len(inner) <= _FEW and all(isinstance(each, _PLAIN) for each in inner)
            return len(inner), repr(inner) if plain else ""
    except Exception:
        pass
    return type(value).__qualname__
