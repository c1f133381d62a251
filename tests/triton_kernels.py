"""Triton kernels without a GPU: run in the interpreter, or compiled for one."""

from __future__ import annotations

import os
import subprocess
import sys
import warnings
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton, and not its interpreter in this process",
)


def in_interpreter(module: str) -> str:
    """Run `python -m module` with Triton's interpreter, and return what it prints.

    The interpreter has to be asked for before Triton is imported, hence another process.
    """
    root = Path(__file__).parent.parent
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=root,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def hopper_code(
    kernel: Any,
    types: Mapping[str, str],
    constants: Mapping[str, Any],
    num_warps: int = 4,
    num_stages: int = 3,
) -> str:
    """PTX for compute capability 9.0, with pointers that are aligned as torch's are.

    Args:
        types: of the arguments, such as "*bf16" or "i32"; for some it does not have, too.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types[n] for n in names}
    aligned = [["tt.divisibility", 16]]
    attributes = {(i,): aligned for i, n in enumerate(names) if signature[n].startswith("*")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled = triton.compile(
            ASTSource(kernel, signature, dict(constants), attributes),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
    return str(compiled.asm["ptx"])
