"""A worker extension for fp8 weights on CPU."""

from __future__ import annotations

import hashlib
from itertools import chain

import pytest
import torch

from tests.support import fp8_on_cpu, updates_by_layer

fp8_on_cpu.apply(pytest.MonkeyPatch())


class UpdatesByLayer(updates_by_layer.UpdatesByLayer):
    """Methods for `collective_rpc`."""

    def prints_of_weights(self) -> dict[str, str]:
        """What tells the bytes of the active layout's weights from others, scales included."""
        model = self.model_runner.model
        return {
            name: hashlib.sha256(tensor.contiguous().view(-1).view(torch.uint8).numpy()).hexdigest()
            for name, tensor in chain(model.named_parameters(), model.named_buffers())
            if tensor.numel()
        }
