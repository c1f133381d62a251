"""Which calls of worker methods may change weights."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from vllm.logger import init_logger

from pat_vllm.executor.rpc import WORKER_METHODS

logger = init_logger(__name__)

_DISCARD_WEIGHTS = frozenset({"sleep", "wake_up", "discard"})
"""Worker methods of vLLM after which weights may be gone, in all layouts alike."""
_KEEP_WEIGHTS = WORKER_METHODS | {
    "check_health",
    "execute_dummy_batch",
    "get_supported_tasks",
    "profile",
    "reset_encoder_cache",
    "reset_mm_cache",
    "shutdown",
    "supports_draft_weight_updates",
    "synchronize_device",
}
"""Worker methods that are called on a running engine and change no weight of a user's."""
_OF_TRAINERS = {
    "liveness_probe": "prime-rl, inference/vllm: its server's /liveness",
    "bind_numa": "NeMo-RL, models/generation/vllm/vllm_worker.py: post_init",
    "report_device_id": "NeMo-RL, likewise, and vLLM's own examples of RLHF",
}
"""Such methods of trainers' worker extensions, and who calls them.

Any other may be a weight update. Trainers have too many ways to make one to know them all.
"""
_REFUSED = {
    "skyrl_sleep_for_weight_sync": (
        "it discards weights past vLLM's sleep, and keeps the buffers of one layout's model only; "
        "set SkyRL's generator.inference_engine.offload_kv_for_weight_sync to false"
    ),
    "init_nccl_reshard_comm_group": (
        "NeMo-RL sends each rank its shard of one group of all, which PAT's base layout need not "
        "have; use its transfer by collective or by ipc"
    ),
}
"""Worker methods that would lose something, and what to do instead."""
_DEAR = 0.005
"""Calls after which weights were derived again for at least so many seconds are logged, once."""


class WeightCalls:
    """Which calls of worker methods, or of functions, may write weights, and what they cost."""

    def __init__(self, readonly: Iterable[str] = ()) -> None:
        """`readonly`: worker methods that a user says only read."""
        self._keep = _KEEP_WEIGHTS | _OF_TRAINERS.keys() | set(readonly)
        self._made: set[str] = set()
        self._told: set[str] = set()

    def keeps_weights(self, method: Any) -> bool:
        """Whether a call leaves all weights as they are. One that may not is noted.

        Raises:
            RuntimeError: the call would lose something.
        """
        if isinstance(method, str):
            if method in _REFUSED:
                raise RuntimeError(f"PAT refuses {method}: {_REFUSED[method]}")
            if method in self._keep:
                return True
            self._made.add(method)
        return False

    def refreshed(self, seconds: float) -> None:
        """Say what calls cost, once for each: the layouts' weights were derived again."""
        new = sorted(self._made - self._told - _DISCARD_WEIGHTS)
        self._made.clear()
        if new and seconds >= _DEAR:
            self._told.update(new)
            logger.info(
                "PAT took collective_rpc(%s) for a weight update, after which all layouts' weights "
                "were derived again in %.0f ms, and prefix caches are not carried over the next "
                "switch. If it only reads, name it in pat.readonly_calls.",
                ", ".join(map(repr, new)),
                1e3 * seconds,
            )


def discards_weights(method: Any) -> bool:
    """Whether weights may be gone after a call, in all layouts alike."""
    return isinstance(method, str) and method in _DISCARD_WEIGHTS
