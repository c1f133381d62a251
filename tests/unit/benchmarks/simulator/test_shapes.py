"""Batches of lengths: their distributions."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.simulator import shapes
from benchmarks.simulator.traces import LengthTrace


def test_lengths_have_the_distribution_of_their_generator() -> None:
    logs = np.log(shapes.lognormal(20000, 1000, 0.7, 1_000_000).lengths)
    assert np.exp(np.median(logs)) == pytest.approx(1000, rel=0.03)
    assert logs.std() == pytest.approx(0.7, rel=0.03)

    two_mode = np.array(shapes.two_mode(20000).lengths)
    assert (two_mode > 10000).mean() == pytest.approx(0.1, abs=0.01)
    assert ((two_mode > 6000) & (two_mode < 10000)).mean() < 0.01
    assert (two_mode == 16384).mean() == pytest.approx(0.01, abs=0.004)

    uniform = shapes.uniform(2000, 5, 9)
    assert set(uniform.lengths) == {5, 6, 7, 8, 9} and uniform.max_tokens == 9

    straggler = sorted(shapes.straggler(64, 200, 8000).lengths)
    assert straggler[-1] == 8000 and straggler[0] >= 190 and straggler[-2] <= 210

    batches = shapes.shifted([500, 2000], 4000, 0.5, 100_000)
    assert [np.median(batch.lengths) for batch in batches] == pytest.approx([500, 2000], rel=0.05)

    deepscaler = np.array(shapes.deepscaler(100_000).lengths)  # the shares that PAT reports
    assert (deepscaler > 8192).mean() == pytest.approx(0.1085, abs=0.003)
    assert 2.6 < 128 * (deepscaler == 24576).mean() < 3.0
    assert len(shapes.deepscaler()) == 128


def test_groups_and_prompts() -> None:
    trace = shapes.grpo(2000, 4, 0.5, 1.0, max_tokens=10_000_000)
    assert trace == shapes.grpo(2000, 4, 0.5, 1.0, max_tokens=10_000_000)
    assert trace.lengths != shapes.grpo(2000, 4, 0.5, 1.0, max_tokens=10_000_000, seed=1).lengths
    assert trace.groups[:5] == (0, 0, 0, 0, 1)
    assert len(set(trace.num_prompt_tokens[:4])) == 1
    logs = np.log(trace.lengths).reshape(2000, 4)
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] == pytest.approx(0.8, abs=0.03)
    assert LengthTrace("some", (3, 70)) == LengthTrace(
        "some", (3, 70), (0.0, 0.0), (0, 1), (256, 256), 70
    )
