"""Commands are closed to HTTP, shared memory is its user's alone, and no text is unpickled."""

from __future__ import annotations

import importlib
import os
import stat
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pat_vllm.executor import rpc

PAT_COMMANDS = {getattr(rpc, name) for name in dir(rpc) if name.endswith("_COMMAND")}


def routes(dev_mode: bool) -> set[str]:
    """Paths that `vllm serve` answers, its default flags given."""
    from vllm.entrypoints.launchers.app import build_app
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    # In "common" since vLLM 0.33.
    names = (f"vllm.entrypoints.{folder}.cli_args" for folder in ("common", "launchers"))
    cli_args: Any = importlib.import_module(next(name for name in names if find_spec(name)))
    arguments = cli_args.make_arg_parser(FlexibleArgumentParser()).parse_args([])
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", str(int(dev_mode)))
        app = build_app(arguments, ("generate",), None)
    return {route.path for route in app.routes if hasattr(route, "path")}


def test_commands_are_closed_by_default() -> None:
    """They are reached as `collective_rpc` alone, which vLLM serves in its development mode."""
    closed = routes(dev_mode=False)
    assert "/v1/completions" in closed
    of_engine = {"/collective_rpc", "/sleep", "/wake_up", "/reset_prefix_cache", "/update_weights"}
    assert not closed & of_engine
    assert not [path for path in closed if "pat" in path.replace("path", "").split("/")]
    assert not [path for path in closed if any(name in path for name in PAT_COMMANDS)]
    assert routes(dev_mode=True) >= of_engine


@pytest.mark.parametrize("method", ["not a method", "gASVCAAAAAAAAACMBG5vcGWULg=="])
def test_json_cannot_carry_a_pickled_function(method: str) -> None:
    """In development mode a method's name comes as text, which is looked up, never unpickled."""
    from pat_vllm.worker.worker import PATWorkerMixin

    worker: Any = SimpleNamespace()
    with pytest.raises(AttributeError):
        PATWorkerMixin.pat_call_in_base(worker, method, (), {})


def test_shared_memory_is_the_users() -> None:
    """Of a rank's segment; vLLM's own in /dev/shm is made by Python, 0600."""
    from pat_vllm.kv_transfer.shared_memory import _Segment

    def mode(path: Path) -> int:
        return stat.S_IMODE(path.stat().st_mode)

    umask = os.umask(0)
    try:
        segment = _Segment.create()
    finally:
        os.umask(umask)
    assert segment is not None
    path, name = segment.address.split()
    assert name not in os.listdir("/dev/shm")
    # Others reach it through this directory only.
    assert (mode(Path(path)), mode(Path(path).parent)) == (0o600, 0o500)
    other = _Segment.attach(segment.address)
    assert other is not None
    segment.resize(1 << 20)
    other.follow()
    assert mode(Path(path)) == 0o600
