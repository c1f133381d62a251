"""vLLM's entry point into PAT.

A start begins here: vLLM asks for an engine's executor class, and `start/prepare.py` then checks
and completes the config. PAT rests on seams that vLLM offers: the executor class, `worker_cls`,
`scheduler_cls`, model loaders, the KV connector interface and `additional_config`. What it changes
beside them is in `patches/`.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pat_vllm.patches.dead_engine import end_waits_for_dead_engines
from pat_vllm.patches.front_end import (
    interrupt_starts,
    let_engine_cores_end,
    log_through_vllm,
    patch_get_class,
    serialize_sends,
    tell_loggers,
)

if TYPE_CHECKING:
    from vllm.config import VllmConfig

BACKEND = "pat"
"""Value of `distributed_executor_backend` that asks for PAT."""

STANDS_IN_FOR = ("mp", "ray", "uni")
"""vLLM's own values of `distributed_executor_backend` that the option `enabled` turns to "pat"."""

_ADVICE = {
    "external_launcher": (
        ". It runs an engine in each process of the training, as colocated TRL, ms-swift and "
        "Unsloth do; use the trainer's server mode (TRL: vllm_mode='server' and `vllm serve`)"
    )
}
"""What to do instead, by a value of `distributed_executor_backend` that PAT cannot replace."""

TESTED_VLLM = ("0.31", "0.34")
"""vLLM versions PAT is tested with: from the first, up to but without the second."""

ALLOW_UNTESTED = "PAT_ALLOW_UNTESTED_VLLM"
"""Environment variable that lets PAT run on another vLLM version when set to 1."""


def register() -> None:
    """Teach vLLM the executor backend "pat". Called by vLLM in each of its processes.

    May be called several times in a process. It must neither fail nor cost anything where PAT is
    not asked for, so it imports nothing but the class that is patched.
    """
    from vllm.v1.executor.abstract import Executor

    patch_get_class(Executor, _executor_class)
    log_through_vllm()


def _executor_class(vllm_config: VllmConfig, stock: Callable[[Any], type]) -> type:
    """Choose the executor class of a config; if it is PAT's, prepare config and process for PAT.

    The workers make a copy of the engine's config for each layout (`worker/layout_config.py`).
    vLLM asks for the class of such a copy, too; it has been prepared with the engine's config.

    Args:
        stock: vLLM's own function, which chooses the class where PAT is not asked for.
    """
    chosen: type
    _follow_enabled(vllm_config)
    if vllm_config.parallel_config.distributed_executor_backend == BACKEND:
        check_vllm_version()
        from pat_vllm.executor.launcher import executor_class

        chosen = executor_class(vllm_config)
    else:
        chosen = stock(vllm_config)
    if not getattr(chosen, "is_pat", False):
        _warn_of_unread_options(vllm_config)
    else:
        check_vllm_version()
        from pat_vllm.executor.launcher import prepare_launch
        from pat_vllm.start.prepare import prepare
        from pat_vllm.start.setup import layout_name

        if layout_name(vllm_config) is not None:
            return chosen
        setup = prepare(vllm_config)
        end_waits_for_dead_engines()
        let_engine_cores_end()
        interrupt_starts()
        serialize_sends()
        tell_loggers(_config_for_loggers)
        prepare_launch(vllm_config.parallel_config, setup.options.launcher, chosen)
    return chosen


def _follow_enabled(vllm_config: VllmConfig) -> None:
    """Have the backend be "pat" where `additional_config["pat"]["enabled"]` is true, and one of
    vLLM's where it is false.

    So PAT can be asked for where somebody else names the backend, such as a trainer.

    Raises:
        ValueError: the option is no truth value, or PAT cannot stand in for the backend.
    """
    additional = _additional(vllm_config)
    options = additional.get("pat")
    if not isinstance(options, dict) or "enabled" not in options:
        return
    from vllm.logger import init_logger

    from pat_vllm.config import PATConfig
    from pat_vllm.executor.launcher import stock_backend

    # The other options are not validated here: they do not matter to an engine without PAT.
    enabled = PATConfig.parse({"enabled": options["enabled"]}).enabled
    parallel = vllm_config.parallel_config
    backend: Any = parallel.distributed_executor_backend
    is_pat = backend == BACKEND or getattr(backend, "is_pat", False)
    if enabled is None or enabled == is_pat:
        return
    if not enabled:
        parallel.distributed_executor_backend = stock_backend(parallel)
    elif backend in STANDS_IN_FOR:
        if backend == "ray" and "launcher" not in options:
            own = {**options, "launcher": "ray"}
            vllm_config.additional_config = {**additional, "pat": own}
        parallel.distributed_executor_backend = BACKEND
    else:
        raise ValueError(
            f'additional_config["pat"]["enabled"] is true, but distributed_executor_backend='
            f"{backend!r}, which PAT cannot stand in for; allowed: {', '.join(STANDS_IN_FOR)}, or "
            f"none named{_ADVICE.get(backend, '') if isinstance(backend, str) else ''}"
        )
    init_logger(__name__).info(
        "PAT is switched %s by additional_config: distributed_executor_backend is %r in place of "
        "%r",
        "on" if enabled else "off",
        parallel.distributed_executor_backend,
        backend,
    )


def _additional(vllm_config: VllmConfig) -> dict[str, Any]:
    additional = getattr(vllm_config, "additional_config", None)
    return additional if isinstance(additional, dict) else {}


def _warn_of_unread_options(vllm_config: VllmConfig) -> None:
    """Say that an engine that does not ask for PAT has options of PAT's."""
    additional = _additional(vllm_config)
    options = additional.get("pat")
    if "pat" in additional and not (isinstance(options, dict) and options.get("enabled") is False):
        from vllm.logger import init_logger

        init_logger(__name__).warning_once(
            'additional_config["pat"] has no effect: distributed_executor_backend=%r is not '
            '"%s", so this engine runs without PAT. Set distributed_executor_backend="%s", or the '
            'option "enabled": true, or leave these options out.',
            vllm_config.parallel_config.distributed_executor_backend,
            BACKEND,
            BACKEND,
        )


def _config_for_loggers(vllm_config: VllmConfig) -> VllmConfig:
    """The config that vLLM's loggers of statistics get: an engine's with PAT's metrics named in it.

    The config of an engine without PAT, which the same process may have, is returned as it is.
    """
    from pat_vllm.config import runs_pat

    if not runs_pat(vllm_config):
        return vllm_config
    from pat_vllm.metrics.prometheus import naming_connector
    from pat_vllm.start.setup import Setup

    setup = Setup.of(vllm_config)
    return naming_connector(vllm_config, setup.layouts, setup.default_layout)


def check_vllm_version() -> None:
    """Refuse a vLLM that PAT was not tested with.

    Raises:
        ValueError: the version is outside `TESTED_VLLM` and `PAT_ALLOW_UNTESTED_VLLM` is not 1.
    """
    from vllm.version import __version__

    if os.environ.get(ALLOW_UNTESTED) == "1":
        return
    first, past = (tuple(int(n) for n in v.split(".")) for v in TESTED_VLLM)
    try:
        version = tuple(int(n) for n in __version__.split("+")[0].split(".")[:2])
    except ValueError:
        version = (0, 0)
    if not first <= version < past:
        raise ValueError(
            f'distributed_executor_backend="{BACKEND}" is tested with vLLM >= {TESTED_VLLM[0]}, '
            f"< {TESTED_VLLM[1]}, but vLLM {__version__} is installed. Install a tested version, "
            f"or set {ALLOW_UNTESTED}=1 to try this one."
        )
