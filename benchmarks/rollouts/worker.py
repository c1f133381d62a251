"""The engine's side of a weight update."""

from __future__ import annotations

from pathlib import Path
from typing import Any


class Reloading:
    """A worker extension."""

    model_runner: Any

    def load_checkpoint(self, path: str) -> None:
        """Take all weights from the checkpoint at `path`."""
        from safetensors.torch import load_file

        self.model_runner.model.load_weights(load_file(Path(path) / "model.safetensors").items())
