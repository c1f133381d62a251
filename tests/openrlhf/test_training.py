"""OpenRLHF's own REINFORCE loop over PAT, on CPU: `make test-openrlhf`."""

from __future__ import annotations

import pytest

from tests.openrlhf.training import assert_trained, training

pytest.importorskip("openrlhf", reason="make test-openrlhf")
pytestmark = pytest.mark.timeout(2400)


def test_separated_over_ray() -> None:
    """The example as it is: four steps, a regroup in each rollout."""
    with training() as run:
        assert_trained(run, over_ray=True)
