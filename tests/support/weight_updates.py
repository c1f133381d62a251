"""A worker extension that updates weights in the ways trainers do, on plain CPU weights."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch

from pat_vllm.worker.weight_updates import run_in_every_layout

sys.path.append(str(Path(__file__).parent / "plain_weights"))
import plain_weights

plain_weights.apply()
for _method in ("forbid_token", "allow_token", "lose_weights"):
    run_in_every_layout(_method)


class WeightUpdates:
    """Methods for `collective_rpc`."""

    model_runner: Any
    model_config: Any

    def load_all(self, path: str) -> None:
        """All at once, as VeRL does for a bucket of weights."""
        from safetensors.torch import load_file

        self.model_runner.model.load_weights(load_file(Path(path) / "model.safetensors").items())

    def load_one(self, name: str, weight: torch.Tensor) -> None:
        """One call for each parameter, as OpenRLHF does."""
        self.model_runner.model.load_weights(weights=[(name, weight)])

    def forbid_token(self, token: int) -> None:
        """Change the model object itself, as VeRL does to mask tokens out of the vocabulary."""
        model = self.model_runner.model
        compute_logits = type(model).compute_logits

        def masked(*args: Any, **kwargs: Any) -> torch.Tensor:
            logits = compute_logits(model, *args, **kwargs)
            if logits is not None:
                logits[..., token] = -torch.inf
            return logits

        model.compute_logits = masked

    def allow_token(self) -> None:
        del self.model_runner.model.compute_logits

    def lose_weights(self) -> None:
        """What level 2 of sleep does to weights on a GPU. On CPU, sleeping does nothing."""
        for weight in self.model_runner.model.parameters():
            weight.data.fill_(torch.nan)
