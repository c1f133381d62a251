"""What calls of the engine's user, which run in the base layout, may do."""

from __future__ import annotations

from typing import Any

from vllm.model_executor.model_loader.mtp_validation import is_mtp_completeness_check_enabled

from pat_vllm.worker.weight_updates import WeightUpdatesMixin


class Worker(WeightUpdatesMixin):
    """Of one layout, with a trainer's method."""

    _active = _base = None  # type: ignore[assignment]

    def load(self) -> bool:
        return is_mtp_completeness_check_enabled()

    def _enter(self, runtime: Any) -> None: ...

    def _activate(self, runtime: Any) -> None: ...

    def _synchronize_device(self) -> None: ...


def test_a_drafter_takes_a_part_of_its_weights() -> None:
    """Trainers send weights in parts, of which some are the target's alone. vLLM's MTP modules take
    such a part for a checkpoint without them, unless they are told."""
    assert Worker().pat_call_in_base("load", (), {}) is False
    assert is_mtp_completeness_check_enabled()
