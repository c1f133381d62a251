"""One engine of two ranks that speculates, for most of these tests; what stock vLLM gives."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.engines import Outcome, run
from tests.speculation.batch import batch, leave_clean, speculating, stock


@pytest.fixture(scope="package")
def static() -> dict[str, Outcome]:
    """What stock vLLM gives for the batch, without speculation."""
    with stock() as llm:
        return run(llm, batch())


@pytest.fixture(scope="package")
def shared() -> Iterator[Any]:
    """The engine; unless another draft length is asked for, it has 1."""
    with speculating(2, usual=1) as llm:
        yield llm


@pytest.fixture(scope="module")
def llm(shared: Any) -> Any:
    """The shared engine. A module that needs another one has its own fixture."""
    return shared


@pytest.fixture
def clean(llm: Any) -> Iterator[None]:
    """A test begins at home, without requests, cached prefixes and orders."""
    leave_clean(llm)
    yield
