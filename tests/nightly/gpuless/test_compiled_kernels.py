"""The code of PAT's kernels for every model, data type and block size."""

from __future__ import annotations

import pytest

from tests.gpuless.test_compiled_kernels import (
    CAPABILITIES,
    check_accesses,
    check_registers,
    kv_code,
    needs_triton,
)

pytestmark = needs_triton


@pytest.mark.parametrize("block_size", [16, 32, 64, 128])
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_kv_kernels_of_all_models(capability: int, block_size: int) -> None:
    codes = kv_code(capability, block_sizes=(block_size,))
    check_registers(codes)
    check_accesses(codes)
