"""SkyRL's server on vLLM's CPU build: `-m tests.nightly.trainers.skyrl_server --NAME VALUE`."""

from __future__ import annotations

import importlib
import sys

from tests.support.serve import know_the_cpu_build


def main(*arguments: str) -> None:
    """Serve, as `python -m skyrl.backends.skyrl_train.inference_servers.vllm_server_actor` does.

    Its Ray actor serves by the same function.
    """
    know_the_cpu_build()
    importlib.import_module("tests.nightly.trainers.skyrl_on_cpu")  # its stand-ins come first
    from skyrl.backends.skyrl_train.inference_servers.vllm_server_actor import main

    main([*arguments])


if __name__ == "__main__":
    main(*sys.argv[1:])
