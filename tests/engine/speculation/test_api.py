"""`pat_vllm.speculate`, and what the report says of drafts."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import pat_vllm
from tests.engine.specs import DRAFTS
from tests.engine.speculation.batch import batch, without_drafts
from tests.engine.speculation.steps import watched
from tests.support.engines import run
from tests.support.same import assert_same
from tests.vllm.scheduler.protocol import LENGTHS

pytestmark = pytest.mark.engine(DRAFTS)


def test_from_another_thread(llm: Any) -> None:
    """A length that is not kept ready is an error there, and changes nothing."""
    errors: list[BaseException] = []

    def ask(k: int | None) -> None:
        try:
            pat_vllm.speculate(llm, k)
        except BaseException as error:
            errors.append(error)

    def before_step(step: int) -> None:
        if step % 3 == 0:
            length = LENGTHS[step // 3 % 4] if step < 30 else 99
            asking = threading.Thread(target=ask, args=(length,))
            asking.start()
            asking.join(30)
            assert not asking.is_alive()
            watch.k = length if length in LENGTHS else watch.k

    with watched() as watch:
        outcomes = run(llm, batch(), before_step=before_step)
    assert_same(outcomes, without_drafts())
    assert set(watch.lengths) == set(LENGTHS)
    assert {type(error) for error in errors} == {ValueError}
