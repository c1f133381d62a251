"""What calls of the engine's user, which run in the base layout, may do."""

from __future__ import annotations

from typing import Any

import pytest
from safetensors.torch import load_file

from pat_vllm.layout import Layout
from pat_vllm.worker.weight_updates import WeightUpdatesMixin
from tests.vllm.weights.test_drafters import Case, loaded
from tests.vllm.weights.test_weights import no_accelerator

__all__ = ["no_accelerator"]


class Worker(WeightUpdatesMixin):
    """Of one layout, with a trainer's method."""

    def __init__(self, drafter: Any) -> None:
        self.drafter = drafter
        self._active = self._base = None  # type: ignore[assignment]

    def load(self, weights: list[Any]) -> set[str]:
        taken: set[str] = self.drafter.load_weights(weights)
        return taken

    def _enter(self, runtime: Any) -> None: ...

    def _activate(self, runtime: Any) -> None: ...

    def _synchronize_device(self) -> None: ...


def test_a_drafter_takes_a_part_of_its_weights() -> None:
    """Trainers send weights in parts, of which some are the target's alone. vLLM's MTP modules of
    DeepSeek take that for a checkpoint without them."""
    case, layout = Case("DeepSeek"), Layout.of(1, 4)
    _, models = loaded(case.config(), [layout], 0, "inplace")
    worker = Worker(models[layout].drafter)
    weights = load_file(case.paths[""][0] / "model.safetensors")
    of_target = [item for item in weights.items() if item[0].startswith("model.layers.0.")]
    with pytest.raises(ValueError, match="missing from checkpoint"):
        worker.load(of_target)
    assert worker.pat_call_in_base("load", (of_target,), {}) == set()
    of_drafter = [item for item in weights.items() if item[0].startswith("model.layers.3.")]
    assert len(worker.pat_call_in_base("load", (of_drafter,), {})) > 10
