"""Tests with real engines, those of one engine after each other."""

from __future__ import annotations

from tests.support.engine_fixtures import (
    engines,
    llm,
    pytest_collection_modifyitems,
    pytest_generate_tests,
    pytest_runtest_teardown,
    spec,
)

__all__ = [
    "engines",
    "llm",
    "pytest_collection_modifyitems",
    "pytest_generate_tests",
    "pytest_runtest_teardown",
    "spec",
]
