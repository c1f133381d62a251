"""What an object keeps for each row of a batch, read and written from outside.

vLLM's interface of logits processors says how rows come, go and move within a batch, but not how a
request's row leaves for another batch. So their rows are found by how such classes keep them: dicts
by row, and lists and arrays with an element for each row.
"""

from __future__ import annotations

import pickle
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


_BUFFERS = frozenset({"UvaBackedTensor", "StagedWriteTensor"})
"""vLLM's classes of arrays that exist on the host and the device; their fields are looked into."""


class RowState:
    """Finds what an object keeps by row.

    The object is looked at when it is made, before it has a row:

    * A dict belongs to rows if it was empty, and has no other keys than rows.
    * A list or array with an element for each row belongs to rows if all elements were equal, or if
      it is an array that came later. If they were not, it may be a table, and only elements that
      have changed since belong to rows.

    Fields of the object's own classes are looked into, those of other packages are not.
    """

    def __init__(self, owner: Any, num_rows: int, foreign: Collection[Any] = ()) -> None:
        """Look at `owner`, which has no row yet.

        Args:
            owner: for example a logits processor.
            num_rows: the most rows of its batch.
            foreign: objects that it refers to and does not own.
        """
        self.owner = owner
        self._num_rows = num_rows
        self._foreign = {id(value) for value in foreign if not isinstance(value, int | float | str)}
        self._filled: set[Path] = set()
        self._lists: set[Path] = set()
        self._elements: dict[Path, list[int]] = {}
        for path, value in self._containers():
            if isinstance(value, dict):
                self._filled |= {path} if value else set()
                continue
            if isinstance(value, list):
                self._lists.add(path)
            if not _uniform(value):
                self._elements[path] = [_print_of(element) for element in value]
        self._plain = dict(self._plain_values())

    @property
    def name(self) -> str:
        """The owner's class, as its user knows it."""
        return type(self.owner).__qualname__

    def look(self) -> Callable[[int], RowValues]:
        """Find what belongs to rows now.

        Returns:
            What takes a row: its values, arrays as copies on the CPU.
        """
        places = [
            (path, value) for path, value in self._containers() if self._has_rows(path, value)
        ]

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

    def _has_rows(self, path: Path, value: Any) -> bool:
        if isinstance(value, dict):
            return path not in self._filled and all(map(self._is_row, value))
        # A list that was not there at first has grown to this length.
        return not isinstance(value, list) or path in self._lists

    def restore(self, row: int, values: Mapping[Path, Any]) -> list[Path]:
        """Give a row what was taken from another one of the same class.

        Returns:
            Where the owner has no place for it.
        """
        places = dict(self._containers())
        lost = []
        for path, value in values.items():
            place = places.get(path)
            if place is None:
                lost.append(path)
            elif value is Entry.NONE:
                place.pop(row, None)
            elif isinstance(place, torch.Tensor):
                place[row] = torch.as_tensor(value)
            else:
                place[row] = value
        return lost

    def changed_beside(self) -> list[str]:
        """Numbers, texts and sets, which belong to no row, that are not as they were at first."""
        now = dict(self._plain_values())
        return [
            ".".join(path)
            for path, value in self._plain.items()
            if path in now and now[path] != value
        ]

    def _is_row(self, key: Any) -> bool:
        return isinstance(key, int | np.integer) and 0 <= int(key) < self._num_rows

    def _attributes(self) -> Iterator[tuple[Path, Any]]:
        """Every attribute of the owner, and of what it owns of its own package."""
        package = type(self.owner).__module__.partition(".")[0]
        seen = {id(self.owner), *self._foreign}
        queue: list[tuple[Path, Any]] = [((), self.owner)]
        for path, holder in queue:
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if id(value) in seen:
                    continue
                yield (*path, name), value
                kind = type(value)
                own = kind.__module__.partition(".")[0] == package and not isinstance(value, type)
                # An object of vLLM's may refer to the whole engine.
                if kind.__name__ in _BUFFERS or (own and package != "vllm"):
                    seen.add(id(value))
                    queue.append(((*path, name), value))

    def _containers(self) -> Iterator[tuple[Path, Any]]:
        """Dicts, and lists and arrays that have an element for each row."""
        for path, value in self._attributes():
            if isinstance(value, dict) or (
                isinstance(value, list | np.ndarray | torch.Tensor)
                and np.ndim(value) > 0
                and len(value) == self._num_rows
            ):
                yield path, value

    def _plain_values(self) -> Iterator[tuple[Path, Any]]:
        for path, value in self._attributes():
            if isinstance(value, int | float | str):
                yield path, value
            elif isinstance(value, set):
                yield path, len(value)


def _uniform(elements: list[Any] | np.ndarray | torch.Tensor) -> bool:
    """Whether all elements along the first axis are equal."""
    if isinstance(elements, list):
        return len(set(map(_print_of, elements))) == 1
    return bool((elements == elements[:1]).all())


def _copied(element: Any) -> Any:
    """An element that later changes of its array or list do not reach."""
    if isinstance(element, torch.Tensor):
        return element.detach().to("cpu", copy=True)
    return element.copy() if isinstance(element, np.ndarray) else element


def _print_of(element: Any) -> int:
    """A number that differs where elements differ."""
    if isinstance(element, torch.Tensor):
        element = element.detach().cpu().reshape(-1).view(torch.uint8).numpy()
    if isinstance(element, np.ndarray | np.generic):
        return hash(element.tobytes())
    try:
        return hash(pickle.dumps(element))
    except Exception:
        return id(element)
