"""Fixtures of tests that share engines.

A test or module names its engines, `pytestmark = pytest.mark.engine(DENSE)`, and its tests take the
fixture `llm`. With several engines each test runs on each, but for tests for which the module's
`ENGINES` names fewer. What is expensive to make with an engine and serves several tests is made in
`engines.keep(name, make)`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.fp8_on_cpu import has_fp8_kv
from tests.support.pool import EnginePool, EngineSpec, assert_clean, go_home

_POOL = EnginePool()


@pytest.fixture(scope="session")
def engines() -> Iterator[EnginePool]:
    """The engines that tests share."""
    yield _POOL
    _POOL.close()


@pytest.fixture
def spec(request: pytest.FixtureRequest) -> EngineSpec | None:
    """The engine of this test."""
    return getattr(request, "param", None)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """A test with another engine, or with none, starts when none is left."""
    if nextitem is None or _spec_of(nextitem) is not _spec_of(item):
        _POOL.close()


def _spec_of(item: pytest.Item) -> EngineSpec | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("spec") if callspec else None


@pytest.fixture
def llm(spec: EngineSpec | None, engines: EnginePool) -> Iterator[Any]:
    """The shared engine: idle, in its default layout, with empty caches.

    An engine that a test leaves otherwise fails that test, and is not handed on.
    """
    assert spec is not None, "name an engine: pytest.mark.engine(...)"
    if spec.options.get("kv_cache_dtype", "").startswith("fp8") and not has_fp8_kv():
        pytest.skip("vLLM's attention has no KV in fp8 on this CPU")
    llm = engines.get(spec)
    try:
        go_home(llm)
        assert_clean(llm)
        yield llm
        assert not llm.llm_engine.has_unfinished_requests()
        go_home(llm)
        assert_clean(llm)
    except BaseException:
        engines.close()
        raise


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("engine")
    if mark is not None:
        own = getattr(metafunc.module, "ENGINES", {})
        specs = own.get(metafunc.function.__name__, mark.args)
        metafunc.parametrize("spec", specs, ids=str, indirect=True)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests without a shared engine first, then those of each engine after each other."""

    def place(item: pytest.Item) -> int:
        spec = _spec_of(item)
        return 0 if spec is None else 1 + order.setdefault(id(spec), len(order))

    order: dict[int, int] = {}
    items.sort(key=place)
