"""What unseeded requests draw, by replica and switch."""

from __future__ import annotations

import itertools
import random

import numpy as np
import torch
from vllm.utils.torch_utils import set_random_seed

from pat_vllm.worker.runtime import seed_replica


def test_replicas_and_switches_draw_their_own_numbers() -> None:
    """From every generator that vLLM seeds; what has not switched draws what vLLM would."""
    drawn = []
    for numbers in itertools.product((0, 1 << 70), (0, 1), (0, 1)):
        for _rank in range(2):
            seed_replica(5, *numbers)
            drawn.append(_draw())
    assert drawn[::2] == drawn[1::2]
    assert all(len({*of_one}) == 8 for of_one in zip(*drawn[::2], strict=True))
    set_random_seed(5)
    assert _draw() == drawn[0]


def _draw() -> tuple[float, float, float]:
    return random.random(), np.random.random(), torch.rand(()).item()
