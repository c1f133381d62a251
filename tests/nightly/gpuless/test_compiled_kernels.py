"""The code of kernels for every model, data type, block size and compute capability."""

from __future__ import annotations

import pytest

from tests.gpuless.test_compiled_kernels import CAPABILITIES, check, kv_code, needs_triton
from tests.gpuless.test_expert_kernels import check_code

pytestmark = needs_triton


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kv_kernels_of_all_models(capability: int, block_size: int) -> None:
    check(kv_code(capability, block_sizes=(block_size,)))


def test_experts() -> None:
    check_code(80, 100)
