"""Made-up lengths have the quantiles that are published."""

from __future__ import annotations

import numpy as np
import pytest

from pat_vllm.modelled.shapes import drawn_lengths


def test_rl_traces() -> None:
    lengths = drawn_lengths("rl-traces", 200_000, 65536, 0)
    published = {0.5: 654, 0.8: 10_000, 0.9: 22_000, 0.95: 33_212, 0.99: 57_067}
    found = np.quantile(lengths, [*published])
    assert found.tolist() == pytest.approx([*published.values()], rel=0.03)
    assert 60_000 < lengths.max() <= 65_489
    assert drawn_lengths("rl-traces", 1000, 4096, 0).max() == 4096
