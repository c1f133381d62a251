"""Drafts of a mixture of experts: cut in one layout of both ranks, spread in the other."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import pat_vllm
from tests.engines import run
from tests.speculation.batch import batch, speculating, take_way
from tests.test_switch import PLAIN_TOLERANCE
from tests.v2.batch import tour

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module")
def llm() -> Iterator[Any]:
    # Its metrics would take the place of the package's engine's in this process.
    inplace: Any = {"pat": {"weights": "inplace"}, "disable_log_stats": True}
    with speculating(2, model="repeating_moe", **inplace) as llm:
        yield llm


@pytest.mark.parametrize("in_flight", [False, True])
def test_a_tour_of_all_layouts(llm: Any, in_flight: bool) -> None:
    """Between every two of them, with another draft length before each step."""
    names = [str(layout) for layout in pat_vllm.report(llm).layouts]
    assert names == ["tp1dp2", "tp2dp1", "tp2dp1ep"]
    assert pat_vllm.switch(llm, tp=names[0])
    pat_vllm.speculate(llm, 0)
    static = run(llm, batch())
    take_way(llm, tour(names), batch(), static, PLAIN_TOLERANCE, in_flight=in_flight)
