"""A worker extension for fp8 weights on CPU."""

from __future__ import annotations

import pytest

from tests.support import fp8_on_cpu, updates_by_layer

fp8_on_cpu.apply(pytest.MonkeyPatch())


class UpdatesByLayer(updates_by_layer.UpdatesByLayer):
    """Methods for `collective_rpc`."""
