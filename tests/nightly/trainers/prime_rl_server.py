"""prime-rl's server on vLLM's CPU build: `-m tests.nightly.trainers.prime_rl_server --NAME VALUE`.

The arguments are vLLM's, by way of prime-rl's `[inference.vllm]`. prime-rl 0.8.0 is of August 2026.
What vLLM has moved since then is put where prime-rl looks for it; all else is as it is.
"""

from __future__ import annotations

import importlib
import os
import sys
from types import ModuleType
from typing import Any

from tests.support.serve import know_the_cpu_build

_MOVED = {
    # It replaces `build_app` and `init_app_state` here, and has to meet who calls them.
    "openai.api_server": ("launchers.api_server.entry",),
    "openai.cli_args": ("launchers.cli_args",),
    "openai.engine": (),
    "openai.engine.protocol": ("serve.engine.protocol", "generate.base.protocol"),
}
"""Modules of `vllm.entrypoints` as prime-rl names them, and where their contents are."""


def put_back_what_moved() -> None:
    for old, places in _MOVED.items():
        module = ModuleType(f"vllm.entrypoints.{old}")
        for place in places:
            moved = importlib.import_module(f"vllm.entrypoints.{place}")
            module = moved if len(places) == 1 else module
            for name, value in vars(moved).items():
                vars(module).setdefault(name, value)
        package, _, last = f"vllm.entrypoints.{old}".rpartition(".")
        setattr(importlib.import_module(package), last, module)
        sys.modules[f"{package}.{last}"] = module
    # From 0.32 on these are one of two kinds, and prime-rl makes subclasses of them.
    tokens = "vllm.entrypoints.scale_out.token_in_token_out"
    protocol: Any = importlib.import_module(f"{tokens}.protocol")
    if not hasattr(protocol, "GenerateResponseChoice"):
        protocol.GenerateResponse = protocol.GenerateTokensResponse
        protocol.GenerateResponseChoice = protocol.GenerateTokensChoice


def main(*arguments: str) -> None:
    """Serve, as prime-rl's command `inference` does where it has no router."""
    know_the_cpu_build()
    put_back_what_moved()
    from prime_rl.configs.inference import InferenceConfig
    from prime_rl.inference.server import setup_vllm_env
    from pydantic_config import cli

    ours = ("host", "port")
    config = cli(
        InferenceConfig,
        args=[
            f"--{'server' if arg[2:] in ours else 'vllm'}.{arg[2:]}" if arg[:2] == "--" else arg
            for arg in arguments
        ],
    )
    setup_vllm_env(config)
    os.environ["VLLM_SERVER_DEV_MODE"] = "0"  # or vLLM's routes take the place of prime-rl's
    from prime_rl.inference.vllm import server

    # The same class, without what its package does to vLLM.
    kind = config.weight_broadcast.type
    name = server.WORKER_EXTENSION_CLS[kind].rpartition(".")[2]
    server.WORKER_EXTENSION_CLS[kind] = f"tests.nightly.trainers.prime_rl_on_cpu.{name}"
    server.server(config)


if __name__ == "__main__":
    main(*sys.argv[1:])
