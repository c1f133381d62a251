"""What engines with Model Runner V2 run."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.v2.batch import Served, batch, serve
from tests.support.pool import EnginePool


@pytest.fixture
def served(llm: Any, engines: EnginePool) -> Served:
    """The shared engine, idle and in its default layout, and its batch."""
    return engines.keep("served", lambda: serve(llm, batch))
