"""A killed worker: the engine fails clearly, and leaves nothing."""

from __future__ import annotations

import pytest

from tests.engine.specs import V2
from tests.support.engines import engine_processes
from tests.support.faults import assert_a_worker_killed_in_a_switch_ends_the_engine, assert_gone
from tests.support.pool import EnginePool, EngineSpec, go_home


@pytest.mark.engine(V2)
def test_a_worker_killed_in_a_switch_ends_the_engine(spec: EngineSpec, engines: EnginePool) -> None:
    llm = engines.get(spec)
    go_home(llm)
    workers = engine_processes()
    try:
        assert len(workers) == spec.ranks
        assert_a_worker_killed_in_a_switch_ends_the_engine(llm)
        assert_gone(workers)
    finally:
        del llm
        engines.close()
