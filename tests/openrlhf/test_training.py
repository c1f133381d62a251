"""OpenRLHF's own REINFORCE loop over PAT, on CPU: `make test-openrlhf`."""

from __future__ import annotations

import pytest

from tests.openrlhf.training import assert_trained, training

pytest.importorskip("openrlhf", reason="make test-openrlhf")
pytestmark = pytest.mark.timeout(2400)


def test_separated_over_ray() -> None:
    """The example, two steps of it: a regroup in each rollout, and new weights in the second."""
    with training("--data.max_samples", "16") as run:
        assert_trained(run, steps=2, over_ray=True)
