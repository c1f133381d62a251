"""verl's entry point into PAT: importing this module registers the backend.

verl imports it in each of its processes (entry point group `verl.plugins`), and reports a failure
only at DEBUG. So nothing here raises: what went wrong is logged, and raised when PAT is asked for.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

from pat_verl.checks import NAME, advice_on_width, asks_for_pat, check_rollout, check_verl_version

logger = logging.getLogger(__name__)

ADAPTER = "pat_verl.adapter.PatServerAdapter"

Loader = Callable[[], type]


def register() -> None:
    """Teach verl the rollout backend "pat", and its backend "vllm" to notice PAT's executor."""
    try:
        import verl
        from verl.workers.rollout.base import _ROLLOUT_REGISTRY
        from verl.workers.rollout.replica import RolloutReplicaRegistry

        stock: Loader = RolloutReplicaRegistry._registry["vllm"]
        if getattr(stock, "_pat_loader", False):
            return
        RolloutReplicaRegistry.register(NAME, _replica)
        RolloutReplicaRegistry.register("vllm", _noticing(stock))
        _ROLLOUT_REGISTRY[NAME, "async"] = ADAPTER
        _check_before_ray()
        check_verl_version(verl.__version__)
        # Without PAT it does what verl's own does. It may not even be importable with a verl that
        # it was not written for, so there the users of "vllm" keep theirs.
        _ROLLOUT_REGISTRY["vllm", "async"] = ADAPTER
    except Exception as error:
        logger.error("rollout.name=%s cannot be used with this verl: %s", NAME, error)


def _check_before_ray() -> None:
    """Have verl's own check of a trainer's config also refuse what PAT cannot serve.

    Without it: a wrong config shows minutes later, when the trainer's workers have loaded their
    model; and of a tensor parallelism that does not match the GPUs an assertion of verl tells
    first, which names no option.
    """
    from verl.utils import config as verl_config

    original = verl_config.validate_config

    @functools.wraps(original)
    def validate_config(config: Any, *args: Any, **kwargs: Any) -> Any:
        rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
        if asks_for_pat(rollout):
            _check_versions()
            check_rollout(rollout, model, gpus_per_node=rollout.n_gpus_per_node)
            # Here, where a training comes once.
            if said := advice_on_width(rollout, model, rollout.n_gpus_per_node):
                logger.warning(said)
        return original(config, *args, **kwargs)

    verl_config.validate_config = validate_config


def _check_versions() -> None:
    import verl

    from pat_vllm.plugin import check_vllm_version

    check_verl_version(verl.__version__)
    check_vllm_version()


def _replica() -> type:
    """PAT's replica class, or an error that says why there is none."""
    try:
        _check_versions()
        from pat_verl.replica import PatReplica
    except ImportError as error:
        raise ImportError(
            f"rollout.name={NAME} needs vLLM and what verl needs of other packages: "
            f'pip install "pat-vllm[cuda,verl]" ({error})'
        ) from error
    return PatReplica


def _noticing(stock: Loader) -> Loader:
    """A loader for "vllm": PAT's replica class, which is verl's unless PAT is asked for."""

    def load() -> type:
        try:
            return _replica()
        except Exception as error:
            return _refusing(stock(), error)

    load._pat_loader = True  # type: ignore[attr-defined]
    return load


def _refusing(stock: type, error: Exception) -> type:
    """verl's replica class, which raises `error` when PAT is asked for."""

    class Replica(stock):  # type: ignore[misc]
        def __init__(self, replica_rank: int, config: Any, *args: Any, **kwargs: Any) -> None:
            if asks_for_pat(config):
                raise error
            super().__init__(replica_rank, config, *args, **kwargs)

    return Replica


register()
