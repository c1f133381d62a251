"""The tool that makes mistakes on purpose."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pat_vllm.patches import runners
from tests.support.mutation import mutated


class Base:
    def value(self) -> int:
        return 1


class Derived(Base):
    def value(self) -> int:
        return super().value() + 1

    @property
    def twice(self) -> int:
        return 2 * self.value()


@contextmanager
def entered(log: list[str]) -> Iterator[None]:
    log.append("in")
    yield
    log.append("out")


def test_a_function_is_changed_and_restored() -> None:
    bound = Derived().value
    with mutated(Derived.value, {"+ 1": "+ 5"}):
        assert bound() == 6
    assert bound() == 2


def test_properties_and_decorated_functions() -> None:
    with mutated(Derived.twice, {"2 *": "3 *"}):
        assert Derived().twice == 6
    log: list[str] = []
    with mutated(entered, {'log.append("out")': "pass"}), entered(log):
        pass
    assert log == ["in"]


def test_closures() -> None:
    seven = 7

    def add(number: int) -> int:
        return number + seven

    with mutated(add, {"+ seven": "- seven"}):
        assert add(0) == -7
    assert add(0) == 7


def test_annotations_may_name_what_only_type_checkers_import() -> None:
    function: Any = runners.attention_workspace
    with mutated(function, {"return None": "return 1"}):
        assert function(object()) == 1
    assert function(object()) is None


def test_a_mutation_out_of_date_is_an_error() -> None:
    with (
        pytest.raises(AssertionError, match="occurs 0 times"),
        mutated(Derived.value, {"+ 2": "+ 3"}),
    ):
        pass
