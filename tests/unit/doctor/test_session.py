"""What the doctor asks of an engine as its user has it, and that each answer is compared."""

from __future__ import annotations

from io import StringIO
from itertools import count
from typing import Any
from unittest.mock import MagicMock, call

import pytest

from pat_vllm.doctor import session as module
from pat_vllm.doctor.compare import Agreement
from pat_vllm.doctor.journal import Ended, Journal
from pat_vllm.doctor.session import Session
from pat_vllm.layout import Layout
from tests.unit.doctor.test_compare import REFERENCE

LAYOUTS = [Layout.of(tp, 2) for tp in (1, 2)]
ENGINE = Session(
    {"model": "first"}, "other", ((1, 2),), 4, (REFERENCE, REFERENCE), (2, 0), as_used="all of it"
)
COMPARISONS = ("by_policy", "in_layout", "across", "with_drafts")


def check(patch: pytest.MonkeyPatch, session: Session, wrong: int | None = None) -> tuple[Any, int]:
    """Go through the checks; the answer of the n-th comparison is wrong.

    Returns:
        The engine, and how many comparisons there were.
    """
    llm, numbers = MagicMock(), count()

    def compare(*_: Any) -> list[Agreement]:
        bad = next(numbers) == wrong
        return [Agreement(1, 0, 0.0, "wrong token" if bad else None)]

    for name in COMPARISONS:
        patch.setattr(module, name, compare)
    patch.setattr(module, "switch_to", lambda *_: None)
    patch.setattr(module, "send_by_ipc", lambda llm, model, _: llm.ipc(model) and "IPC")
    module._check_layouts(llm, LAYOUTS, session, Journal(StringIO()))
    return llm, next(numbers)


def test_every_answer_is_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    _, comparisons = check(monkeypatch, ENGINE)
    assert comparisons == 1 + 2 + 2 + 1 + 2 + 2
    for number in range(comparisons):
        with pytest.raises(Ended):
            check(monkeypatch, ENGINE, number)


def test_lost_weights_are_replaced_before_the_kv_cache_wakes_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm, _ = check(monkeypatch, ENGINE)
    assert llm.method_calls == [
        call.sleep(level=2),
        call.wake_up(["weights"]),
        call.collective_rpc("reload_weights", kwargs={"weights_path": "other"}),
        call.wake_up(["kv_cache"]),
        call.reset_prefix_cache(),
        call.ipc("first"),
        call.reset_prefix_cache(),
    ]
