"""The contract with the published wheel of the version of vLLM whose CPU build is installed."""

from __future__ import annotations

import pytest

from tests.vllm.contract.test_vllm_contract import (
    PUBLISHED,
    SUPPORTED,
    available,
    test_our_code_has_the_types_of_vllm,
    test_vllm_does_what_we_rely_on,
    test_what_we_override_is_called_so,
)

__all__ = [
    "test_our_code_has_the_types_of_vllm",
    "test_vllm_does_what_we_rely_on",
    "test_what_we_override_is_called_so",
]

pytestmark = pytest.mark.timeout(1200)


@pytest.fixture(params=[version for version in PUBLISHED if version not in SUPPORTED])
def version(request: pytest.FixtureRequest) -> str:
    return available(request.param)
