"""What logits processors keep by row is found, carried and given back; what cannot be is named."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from vllm import SamplingParams
from vllm.v1.sample.logits_processor import BatchUpdate, MoveDirectionality

from pat_vllm.patches.runners import restore_added_rows
from pat_vllm.worker import logits_processors
from pat_vllm.worker.logits_processors import CarriedState
from pat_vllm.worker.row_state import RowState
from tests.support.counting import EVERY, FORCED, PLACES, counted
from tests.support.logits_processors import OfEachRequest, StepCounter

ROWS = 6
CPU = torch.device("cpu")


@dataclass
class Own:
    """Another object of the processor's own package."""

    rows: dict[int, str] = field(default_factory=dict)


@dataclass(slots=True)
class Slots:
    """Another one, which has no `__dict__`."""

    count: list[int]


class Unwilling(dict):  # type: ignore[type-arg]
    """A dict that cannot be asked whether it has entries."""

    def __bool__(self) -> bool:
        raise RuntimeError


class Keeper:
    """Keeps rows in each way, and what only looks like them."""

    def __init__(self, num_rows: int) -> None:
        self.rows: dict[int, Any] = {}
        self.array = np.zeros((num_rows, 2))
        self.tensor = torch.zeros(num_rows, dtype=torch.bfloat16)
        self.flags = [False] * num_rows
        self.own = Own()
        self.history: list[list[int]] = [[] for _ in range(num_rows)]
        self.by_row = dict.fromkeys(range(num_rows), 0)
        self.slots = Slots([0] * num_rows)
        # None of these belongs to rows.
        self.order = torch.arange(num_rows)
        self.table = list(range(10, 10 + num_rows))
        self.biases = {0: 0.5, 1: 1.5}
        self.masks: dict[int, str] = {}
        self.grown: list[int] = []
        self.lock = threading.Lock()
        self.shared = SimpleNamespace(values=np.zeros(num_rows))
        self.values = self.shared.values
        self.ragged: list[Any] = [[1, 2], [3]] * (num_rows // 2)
        self.objects = np.array([*self.ragged], dtype=object)
        self.sparse = torch.zeros(num_rows, num_rows).to_sparse()
        self.meta = torch.zeros(num_rows, device="meta")
        self.columns = torch.arange(num_rows * num_rows).reshape(num_rows, num_rows).t()
        self.unwilling = Unwilling()
        self.scalar = torch.tensor(1.0)

    def use(self, row: int) -> None:
        self.rows[row] = ["seen", row]
        self.array[row] = row + 1
        self.tensor[row] = row + 0.5
        self.flags[row] = True
        self.own.rows[row] = f"row {row}"
        self.masks[1000 + row] = "a mask by token"
        self.grown.extend([row] * len(self.order))
        self.history[row].append(row)
        self.by_row[row] = row + 2
        self.slots.count[row] = row + 3
        self.values[row] = 1


def rows_of(keeper: Keeper) -> RowState:
    return RowState(keeper, len(keeper.order), foreign=[keeper.shared])


def test_a_row_of_a_batch_comes_to_a_row_of_another() -> None:
    source, target = Keeper(ROWS), Keeper(2 * ROWS)
    of_source, of_target = rows_of(source), rows_of(target)
    source.use(3)
    values = of_source.look()(3)
    source.use(3)  # which what was taken does not see
    source.array[3] = 99
    assert of_target.restore(8, values) == []
    assert target.rows == {8: ["seen", 3]} and target.own.rows == {8: "row 3"}
    assert target.array[8].tolist() == [4, 4] and target.tensor[8] == 3.5
    assert target.flags == [index == 8 for index in range(2 * ROWS)]
    assert not target.array[:8].any() and not target.array[9:].any()
    assert target.history[8][:1] == [3] and target.by_row[8] == 5 and target.slots.count[8] == 6


def test_what_only_looks_like_rows_stays() -> None:
    source, target = Keeper(ROWS), Keeper(ROWS)
    of_source, of_target = rows_of(source), rows_of(target)
    source.use(1)
    target.masks |= {4: "of token 4", 1004: "of token 1004"}
    of_target.restore(4, of_source.look()(1))
    fresh = Keeper(ROWS)
    assert target.order.tolist() == fresh.order.tolist() and target.table == fresh.table
    assert target.biases == fresh.biases and target.grown == []
    assert target.masks == {4: "of token 4", 1004: "of token 1004"}
    assert not target.values.any()


def test_that_a_dict_has_no_entry_is_carried() -> None:
    """A processor that is done with a request must not begin again."""
    source, target = Keeper(ROWS), Keeper(ROWS)
    of_source, of_target = rows_of(source), rows_of(target)
    source.use(1)
    target.rows[2] = "as a new request has it"
    of_target.restore(2, of_source.look()(0))
    assert target.rows == {}


def test_a_changed_element_of_a_table_belongs_to_its_row() -> None:
    """As of memory that was not filled at first."""
    source, target = Keeper(ROWS), Keeper(ROWS)
    of_source, of_target = rows_of(source), rows_of(target)
    source.order[2], source.table[2] = 77, 78
    of_target.restore(5, of_source.look()(2))
    assert target.order.tolist() == [0, 1, 2, 3, 4, 77]
    assert target.table == [10, 11, 12, 13, 14, 78]


def test_arrays_that_come_with_the_first_request() -> None:
    source, target, without = Keeper(ROWS), Keeper(ROWS), Keeper(ROWS)
    states = rows_of(source), rows_of(target), rows_of(without)
    for keeper in (source, target):
        keeper.late = np.zeros(ROWS)  # type: ignore[attr-defined]
    source.late[1] = 5  # type: ignore[attr-defined]
    values = states[0].look()(1)
    assert states[1].restore(0, values) == []
    assert target.late[0] == 5  # type: ignore[attr-defined]
    assert states[2].restore(0, values) == [("late",)]


# ---------------------------------------------------------------- carried


@pytest.fixture
def warnings(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    told: list[str] = []

    def warn(text: str, *args: Any) -> None:
        told.append(text % args)

    monkeypatch.setattr(logits_processors.logger, "warning_once", warn)
    return told


def test_references_to_tokens_are_to_the_requests_own(warnings: list[str]) -> None:
    source, target = Keeper(ROWS), Keeper(ROWS)
    states = CarriedState(source, ROWS, CPU), CarriedState(target, ROWS, CPU)
    old, new = [1, 2], [1, 2]
    source.rows[0] = partial(max, old)
    states[0].look()
    packed = states[0].take("a", 0, {"output": old})
    assert packed is not None
    states[1].waiting["a"] = packed
    states[1].restore("a", 4, {"output": new})
    assert target.rows[4].args[0] is new and not states[1].waiting and not warnings


def test_a_request_that_waits_is_carried_on() -> None:
    """It has no row in the layout that it leaves again."""
    state = CarriedState(Keeper(ROWS), ROWS, CPU)
    assert state.take("a", None, {}) is None
    state.waiting["a"] = [b"packed"]
    assert state.take("a", None, {}) == [b"packed"]
    state.keep(["b"])
    assert state.take("a", None, {}) is None


def test_what_cannot_be_pickled_is_named(warnings: list[str]) -> None:
    keeper = Keeper(ROWS)
    state = CarriedState(keeper, ROWS, CPU)
    keeper.use(2)
    keeper.rows[2] = threading.Lock()
    state.look()
    packed = state.take("a", 2, {})
    assert packed is not None and len(packed) > 5  # what can be pickled
    warning = warnings[-1]
    assert "Keeper" in warning and "in rows" in warning
    assert not any("in array" in each for each in warnings)


@pytest.mark.parametrize(
    ("name", "first", "then"),
    [
        ("steps", 0, 4),
        ("last", None, 3.5),
        ("grown", [], [1]),
        ("words", {"a"}, {"a", "b"}),
        ("counter", torch.zeros(1), torch.ones(1)),
        ("pair", (1, 2), (1, 3)),
        ("by_name", {"a": 1}, {"a": 2}),
        ("longer", np.zeros(ROWS + 1), np.ones(ROWS + 1)),
    ],
)
def test_what_is_kept_beside_rows_is_named(
    warnings: list[str], name: str, first: Any, then: Any
) -> None:
    keeper = Keeper(ROWS)
    keeper.not_a_number = math.nan  # type: ignore[attr-defined]
    setattr(keeper, name, first)
    state = CarriedState(keeper, ROWS, CPU)
    state.look()
    assert not warnings
    setattr(keeper, name, then)
    state.look()
    (warning,) = warnings
    assert f"Keeper has changed {name}," in warning


def test_rows_go_on_to_share_what_they_share() -> None:
    """Objects of two places of a row, the processor, and what it keeps for all rows."""
    source, target = Keeper(ROWS), Keeper(ROWS)
    for keeper in (source, target):
        keeper.vocabulary = {"a": 1}  # type: ignore[attr-defined]
    states = CarriedState(source, ROWS, CPU), CarriedState(target, ROWS, CPU)
    both: dict[str, Any] = {"owner": source, "words": source.vocabulary}  # type: ignore[attr-defined]
    source.rows[1], source.own.rows[1] = both, both  # type: ignore[assignment]
    states[0].look([1])
    packed = states[0].take("a", 1, {})
    assert packed is not None and len(packed) == 1
    states[1].waiting["a"] = packed
    states[1].restore("a", 0, {})
    assert target.rows[0] is target.own.rows[0]
    assert target.rows[0] == {"owner": target, "words": target.vocabulary}  # type: ignore[attr-defined]


def test_a_cache_by_small_numbers_is_no_row() -> None:
    """Its keys are not those of the rows that have requests."""
    source, target = Keeper(ROWS), Keeper(ROWS)
    of_source, of_target = rows_of(source), rows_of(target)
    source.masks |= {0: "of token 0", 1: "of token 1", 2: "of token 2"}
    target.masks[0] = "of token 0"
    of_target.restore(0, of_source.look([0, 1])(1))
    assert target.masks == {0: "of token 0"}


def test_what_cannot_be_written_is_named(warnings: list[str]) -> None:
    source, target = Keeper(ROWS), Keeper(ROWS)
    for keeper in (source, target):
        keeper.fixed = np.zeros(ROWS)  # type: ignore[attr-defined]
    target.fixed.setflags(write=False)  # type: ignore[attr-defined]
    states = CarriedState(source, ROWS, CPU), CarriedState(target, ROWS, CPU)
    source.use(1)
    packed = states[0].take("a", 1, {})
    assert packed is not None
    states[1].waiting["a"] = [*packed, b"no pickle"]
    states[1].restore("a", 2, {})
    assert target.array[2].tolist() == [2, 2]
    assert [warning.rpartition(": ")[2] for warning in warnings] == ["UnpicklingError", "fixed"]


# ---------------------------------------------------------------- batch updates


class Batch:
    """A processor in a batch, which some requests come to from another batch."""

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.state = CarriedState(processor, ROWS, CPU)
        self.outputs: dict[str, list[int]] = {}
        restore_added_rows(processor, "update_state", self.carried)

    def carried(self, added: Any) -> Any:
        by_list = {id(self.outputs[id_]): id_ for id_ in self.state.waiting}
        for request in added:
            if (id_ := by_list.get(id(request[3]))) is not None:
                lists = {"output": self.outputs[id_]}
                yield request, partial(self.state.restore, id_, request[0], lists)

    def update(
        self, added: dict[int, str], places: str, removed: Any = (), moved: Any = ()
    ) -> None:
        params = SamplingParams(**counted(places))
        rows: list[Any] = [
            (row, params, [], self.outputs.setdefault(id_, [])) for row, id_ in added.items()
        ]
        self.processor.update_state(BatchUpdate(ROWS, list(removed), rows, list(moved)))

    def step(self) -> list[bool]:
        """By row whether the token was forced."""
        logits = self.processor.apply(torch.zeros(ROWS, 2 * FORCED))
        for output in self.outputs.values():
            output.append(FORCED)
        return [bool(row.isinf().any()) for row in logits]


@pytest.mark.parametrize("place", [*PLACES, "adapter"])
def test_carried_rows_go_on_and_others_begin(place: str) -> None:
    """A request is carried from row 1 to row 3, from which it then moves; another comes with it."""
    make = OfEachRequest if place == "adapter" else StepCounter
    config: Any = type("Config", (), {"scheduler_config": type("", (), {"max_num_seqs": ROWS})})
    source, target = (Batch(make(config, CPU, False)) for _ in range(2))
    source.update({0: "other", 1: "carried"}, place)
    for _ in range(EVERY - 2):
        assert not any(source.step())
    source.state.look()
    packed = source.state.take("carried", 1, {"output": source.outputs["carried"]})
    assert packed is not None

    target.outputs["carried"] = [FORCED] * (EVERY - 2)
    target.state.waiting["carried"] = packed
    target.update({}, place)
    assert "carried" in target.state.waiting  # it has no row yet
    swap = (3, 5, MoveDirectionality.SWAP)
    target.update({3: "carried", 0: "new"}, place, moved=[swap])
    assert not target.state.waiting
    assert not any(target.step())
    assert target.step() == [row == 5 for row in range(ROWS)]
    for _ in range(EVERY - 3):
        assert not any(target.step())
    assert target.step() == [row == 0 for row in range(ROWS)]
