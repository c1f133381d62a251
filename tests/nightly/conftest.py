"""Combinations of what `tests/engine` tests once, and what takes long."""

from __future__ import annotations

from tests.support.engine_fixtures import (
    engines,
    llm,
    pytest_collection_modifyitems,
    pytest_generate_tests,
    spec,
)

__all__ = ["engines", "llm", "pytest_collection_modifyitems", "pytest_generate_tests", "spec"]
