"""Each mistake of the table makes a test of every change fail."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.nightly.mutations.mutation import Mutation
from tests.nightly.mutations.run import caught, every_mutation


@pytest.mark.parametrize("mutation", every_mutation(), ids=lambda mutation: mutation.name)
def test_it_is_caught(mutation: Mutation, tmp_path: Path) -> None:
    verdict = caught(mutation, tmp_path)
    assert verdict.caught, verdict.output
