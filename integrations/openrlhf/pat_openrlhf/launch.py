"""Runs OpenRLHF's own command line with PAT's engines in it."""

from __future__ import annotations

import argparse
import functools
import os
import runpy
from typing import Any

from pat_openrlhf.options import (
    add_options,
    check_gpus,
    check_installed,
    check_versions,
    take_options,
)

TRAINER = "openrlhf.cli.train_ppo_ray"

_OF_OPENRLHF = "--vllm.num_engines"
"""An option that only OpenRLHF's parser has."""


def main() -> None:
    """OpenRLHF's `train_ppo_ray`, with options of ours (`add_options`)."""
    try:
        check_installed()
    except ValueError as error:
        raise SystemExit(f"pat_openrlhf: {error}") from None
    extend_parser()
    # OpenRLHF makes and reads its parser under `__main__`, and offers no hook.
    runpy.run_module(TRAINER, run_name="__main__", alter_sys=True)


def extend_parser() -> None:
    """Let OpenRLHF's parser know PAT's options, and act on them when it has parsed.

    `argparse.ArgumentParser.parse_args` is wrapped until OpenRLHF's parser has called it once.
    """
    original = argparse.ArgumentParser.parse_args

    @functools.wraps(original)
    def parse_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        if _OF_OPENRLHF not in self._option_string_actions:
            return original(self, *args, **kwargs)
        argparse.ArgumentParser.parse_args = original  # type: ignore[method-assign]
        add_options(self)
        parsed = original(self, *args, **kwargs)
        try:
            use_pat(parsed)
        except ValueError as error:
            # Not `self.error`, which first prints a usage of several pages.
            self.exit(2, f"pat_openrlhf: {error}\n")
        return parsed

    argparse.ArgumentParser.parse_args = parse_args  # type: ignore[method-assign, assignment]


def use_pat(args: argparse.Namespace) -> None:
    """Put PAT's engines in OpenRLHF's place for them, if the arguments ask for it.

    Raises:
        ValueError: the arguments do not go together, or not with the cluster, or PAT was not
            tested with what is installed.
    """
    options = take_options(args)
    if options is None:
        return
    check_versions()
    connect()
    check_gpus(vars(args), gpus_of_nodes())

    from openrlhf.trainer.ray import vllm_engine

    from pat_openrlhf.engines import PatEngines

    vllm_engine.RolloutRayActor = PatEngines(options)


def connect() -> None:
    """Start or join Ray as OpenRLHF's `train` would, which then finds it running."""
    import ray

    if ray.is_initialized():
        return
    defaults = {
        "TOKENIZERS_PARALLELISM": "true",
        "NCCL_DEBUG": "WARN",
        "RAY_ENABLE_ZERO_COPY_TORCH_TENSORS": "1",
    }
    ray.init(
        runtime_env={"env_vars": {k: os.environ.get(k, value) for k, value in defaults.items()}}
    )


def gpus_of_nodes() -> list[float]:
    """GPUs of each living node of the Ray cluster."""
    import ray

    return [node["Resources"].get("GPU", 0.0) for node in ray.nodes() if node["Alive"]]
