"""Modelled steps with the structure of kernels."""

from __future__ import annotations

import pytest

from benchmarks.simulated.kernel_truth import KernelTruth
from pat_vllm.profiling.profile import StepShape
from pat_vllm.simulator.modelled.hardware import modelled_profile
from pat_vllm.simulator.truth import ReplayedTruth
from tests.unit.simulator.simple import TWO


def test_steps_of_kernels_have_steps_and_waves() -> None:
    profile = modelled_profile("llama-3.1-8b", "A40", 2)
    plain, kernels = ReplayedTruth(profile), KernelTruth(profile)

    def excess(batch: int, each: int = 512) -> float:
        shape = StepShape(batch, batch * each, each)
        return kernels.step_seconds(TWO, shape, 0) / plain.step_seconds(TWO, shape, 0)

    # Of short contexts attention takes nothing here; sizes that graphs were captured for are exact.
    assert all(excess(size) == pytest.approx(1) for size in (1, 8, 16, 24, 128, 192))
    assert excess(130) > excess(160) > excess(190) > 1, "padded to the same tiles"
    assert excess(9) > 1
    # 33 requests with 4 KV heads are a wave of 132 multiprocessors; 34 are two.
    assert 1.2 < excess(34, 8192) / excess(33, 8192) < 2
    # Of one request its context is split, as far as it is long.
    assert excess(1, 32768) < 1.05
    fast = modelled_profile("llama-3.1-8b", "H100", 8)
    shape = StepShape(1, 512, 512)
    assert KernelTruth(fast).step_seconds(fast.layouts[-1], shape, 0) == pytest.approx(4.005e-3)
    # Drafts are padded as tokens are: 2 requests with 3 drafts each fill a graph of 8.
    drafted = modelled_profile("llama-3.1-8b", "A40", 2, draft_lengths=(3, 4))
    for k, more in ((3, False), (4, True)):
        shape = StepShape(2, 2 * 512, 512, drafts=2 * k, k=k)
        both = [kind(drafted).step_seconds(TWO, shape, 0) for kind in (ReplayedTruth, KernelTruth)]
        assert (both[1] > 1.001 * both[0]) == more
