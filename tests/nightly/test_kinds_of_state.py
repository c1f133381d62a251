"""Priorities and sleep, as `tests/engine` asks for them, of latent and of linear attention."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.specs import CHUNK, FEATURES, IN_PLACE, WITHOUT_CACHE
from tests.engine.test_features import (  # noqa: F401
    greedy,
    prompt,
    run,
    seeded,
    test_priorities,
    test_sleep_aborts_by_default,
    test_sleep_and_wake_up,
)
from tests.support.engines import Job
from tests.support.pool import EngineSpec

LATENT = EngineSpec("latent features", "deepseek_v3", 2, IN_PLACE, FEATURES)
LINEAR = EngineSpec("linear features", "qwen3_next", 2, IN_PLACE, WITHOUT_CACHE | FEATURES)
pytestmark = pytest.mark.engine(LATENT, LINEAR)


@pytest.fixture
def jobs() -> dict[str, Job]:
    return {
        "plain": Job(prompt(1, 20), greedy(50, logprobs=1)),
        "long": Job(prompt(2, 2 * CHUNK + 10), greedy(40, logprobs=1)),
        "seeded": Job(prompt(3, 20), seeded(30, 7)),
    }


@pytest.fixture
def runs(llm: Any, jobs: dict[str, Job]) -> dict[str, dict[str, Any]]:
    return {"tp=1": run(llm, jobs, {0: 1})}
