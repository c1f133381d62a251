"""The law of sampled tokens with 20,000 responses."""

from __future__ import annotations

from typing import Any

import pytest

from tests.engine.specs import LAW
from tests.engine.speculation import test_law
from tests.engine.speculation.test_law import in_step  # noqa: F401

pytestmark = [pytest.mark.engine(LAW), pytest.mark.usefixtures("in_step")]


def test_the_law_holds_in_many_responses(llm: Any) -> None:
    test_law.test_the_law_holds_across_switches_and_changes_of_the_draft_length(llm, batches=40)
