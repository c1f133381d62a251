"""Giving a model runner its drafter.

There is one for each of vLLM's model runners. All ranks of a replica draft the same: they have the
same tokens, and the same rows in the same order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from pat_vllm.models.drafters import has_weights
from pat_vllm.patches.drafts import draft_beside, use_drafter
from pat_vllm.patches.runners import is_v2

if TYPE_CHECKING:
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2

    from pat_vllm.drafts.shelf import Shelf


def forget_texts(runner: RunnerV2) -> None:
    """Have a runner whose requests have left give back the memory of their earlier responses."""
    if (forget := getattr(runner.speculator, "forget", None)) is not None:
        forget()


def install_drafter(runner: Any, shelf: Shelf) -> None:
    """Give a model runner the drafter that looks into `shelf`, or have it look there, too.

    The drafters are imported here: vLLM's CPU worker, when it starts, looks at what all modules
    have, and what numba has it cannot look at.
    """
    if not is_v2(runner):
        from pat_vllm.worker.drafters.proposer import SuffixProposer

        use_drafter(runner, SuffixProposer(runner, shelf))
    elif has_weights(runner.speculative_config):
        from pat_vllm.worker.drafters.beside_weights import TextBesideWeights

        draft_beside(runner, TextBesideWeights(runner, shelf))
    else:
        from pat_vllm.worker.drafters.speculator import SuffixSpeculator

        use_drafter(runner, SuffixSpeculator(runner, shelf))
