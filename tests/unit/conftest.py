"""Tests here are pure: neither they nor what they import may import vLLM or what belongs to it."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator

import pytest

FORBIDDEN = frozenset({"ray", "torch", "transformers", "triton", "vllm", "zmq"})


def _imported() -> frozenset[str]:
    return FORBIDDEN & sys.modules.keys()


def _describe(names: frozenset[str], where: str) -> str:
    return (
        f"{where} has imported {', '.join(sorted(names))}, directly or through what it imports: "
        "move the test to tests/vllm, or make the import lazy"
    )


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Fail the collection of a file that imports one of the forbidden packages."""
    before = _imported()
    report = yield
    if new := _imported() - before:
        report.outcome = "failed"
        report.longrepr = _describe(new, f"collecting {collector.nodeid}")
    return report


@pytest.fixture(scope="module", autouse=True)
def nothing_forbidden_is_imported(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fail a module whose tests import one of the forbidden packages while they run."""
    items = request.session.items
    only_unit = all(item.nodeid.startswith("tests/unit/") for item in items)
    before = frozenset() if only_unit else _imported()
    yield
    new = _imported() - before
    assert not new, _describe(new, request.node.nodeid)
