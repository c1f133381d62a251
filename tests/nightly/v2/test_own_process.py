"""Engines whose core has a process of its own, as for users: `AsyncLLM`, and a killed worker.

With Model Runner V2 and asynchronous scheduling.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.faults import assert_a_dead_worker_is_noticed, die_in_exchange, die_soon
from tests.support.v2_on_cpu.v2_on_cpu import model_runner_v2, scheduled_asynchronously


@pytest.fixture(scope="module", autouse=True)
def as_on_cuda() -> Iterator[None]:
    """Before an engine starts."""
    with model_runner_v2(), scheduled_asynchronously():
        yield


from tests.engine.test_async import (  # noqa: E402, F401
    expected,
    llm,
    loop,
    run,
    test_aborts_in_flight,
    test_pause_aborting_requests,
    test_pause_keeping_requests,
    test_pause_waiting_for_requests,
    test_streams_across_switches,
)


@pytest.mark.parametrize(("tp", "sabotage"), [(1, die_soon), (2, die_in_exchange)])
def test_a_dead_worker_fails_the_engine_and_leaves_nothing(
    tp: int, sabotage: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_a_dead_worker_is_noticed({}, sabotage, tp, monkeypatch)
