"""Faults of `tests/engine/test_faults.py` in other layouts, at other moments, by other signals."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.faults import (
    assert_a_failed_switch_ends_the_engine,
    assert_a_front_end_ended_in_a_switch_takes_its_engine_along,
    assert_a_killed_front_end_takes_its_engine_along,
    fail_in_switch,
    run_out_of_memory,
)


@pytest.mark.parametrize(
    ("in_process", "sabotage"),
    [
        (True, fail_in_switch),
        (False, fail_in_switch),
        (False, functools.partial(run_out_of_memory, part="staging")),
        (False, functools.partial(run_out_of_memory, part="hand-over")),
    ],
)
def test_a_switch_that_fails_ends_the_engine(
    in_process: bool, sabotage: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_a_failed_switch_ends_the_engine(sabotage, in_process, monkeypatch)


def test_a_front_end_that_is_terminated_in_a_switch_takes_its_engine_along(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_a_front_end_ended_in_a_switch_takes_its_engine_along(
        signal.SIGTERM, tmp_path, monkeypatch
    )


def test_a_killed_front_end_takes_its_engine_along() -> None:
    assert_a_killed_front_end_takes_its_engine_along(from_server=False)
