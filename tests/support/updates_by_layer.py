"""A worker extension that updates weights layer by layer, as vLLM's weight transfers do."""

from __future__ import annotations

from typing import Any

import tests.support.weight_transfer  # noqa: F401  # registers its backend
from tests.support.weight_updates import WeightUpdates


class UpdatesByLayer(WeightUpdates):
    """Methods for `collective_rpc`. Between the first and the last, weights are missing."""

    def begin_update(self) -> None:
        """What `start_weight_update` does."""
        from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

        initialize_layerwise_reload(self.model_runner.model)

    def load_half(self, path: str, half: int) -> None:
        """A part of the checkpoint: every other weight."""
        from pathlib import Path

        from safetensors.torch import load_file

        weights: list[Any] = sorted(load_file(Path(path) / "model.safetensors").items())
        self.model_runner.model.load_weights(weights[half::2])

    def end_update(self) -> None:
        """What `finish_weight_update` does."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

        with set_current_vllm_config(self.model_runner.vllm_config):
            finalize_layerwise_reload(self.model_runner.model, self.model_config)

    def load_by_layers(self, path: str) -> None:
        """All of it in one call, as VeRL's receiver does in place of `load_all` (its PR 7987)."""
        self.begin_update()
        for half in range(2):
            self.load_half(path, half)
        self.end_update()
