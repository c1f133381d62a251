"""Triton kernels without a GPU: run in the interpreter, or compiled for one."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

needs_triton = pytest.mark.skipif(
    find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") == "1",
    reason="needs Triton, and not its interpreter in this process",
)

CAPABILITIES = (80, 90, 100)
"""Compute capabilities, times ten: Ampere, Hopper, Blackwell."""

_INSTRUCTION = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?\w+\s+)?([A-Z][\w.]*)")
"""With its address before it, and possibly a predicate."""


def in_interpreter(module: str) -> str:
    """Run `python -m module` with Triton's interpreter, and return what it prints.

    The interpreter has to be asked for before Triton is imported, hence another process.
    """
    return in_process(module, {"TRITON_INTERPRET": "1"})


def in_process(module: str, variables: Mapping[str, str] | None = None) -> str:
    """Run `python -m module`, and return what it prints."""
    root = Path(__file__).parents[3]
    done = subprocess.run(
        [sys.executable, "-m", module],
        cwd=root,
        env={**os.environ, **(variables or {}), "PYTHONPATH": str(root)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@dataclass(frozen=True)
class Code:
    """What a launch is compiled to.

    Attributes:
        kernel: its name.
        target: what the machine code is for, such as "sm_80" or "sm_90a".
        registers: of a thread.
        local_bytes: of a thread's memory outside of registers: its stack and what is spilled.
        spills: instructions that read or write that memory.
        loads, stores: bits that each instruction of global memory reads or writes for a thread.
    """

    kernel: str
    target: str
    registers: int
    local_bytes: int
    spills: int
    loads: tuple[int, ...]
    stores: tuple[int, ...]

    @classmethod
    def of(cls, name: str, cubin: bytes) -> Code:
        """Read with `cuobjdump`, which Triton brings along."""
        from triton import knobs

        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(cubin)
            file.flush()
            command = [
                knobs.nvidia.cuobjdump.path,
                "--dump-resource-usage",
                "--dump-sass",
                file.name,
            ]
            dumped = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        used = {key: int(value) for key, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", dumped)}
        instructions = _INSTRUCTION.findall(dumped)
        (target,) = re.findall(r"\bcode for (\w+)", dumped)
        assert "EXIT" in instructions, dumped
        return cls(
            name,
            target,
            used["REG"],
            used["STACK"] + used["LOCAL"],
            sum(opcode.split(".")[0] in ("LDL", "STL") for opcode in instructions),
            tuple(_bits(opcode) for opcode in instructions if opcode.split(".")[0] == "LDG"),
            tuple(_bits(opcode) for opcode in instructions if opcode.split(".")[0] == "STG"),
        )


def _bits(instruction: str) -> int:
    """Of an access such as LDG.E.128.CONSTANT; 32 where it names no size."""
    for part in instruction.split("."):
        if match := re.fullmatch(r"[US]?(8|16|64|128|256)", part):
            return int(match[1])
    return 32


class _Gpu:
    """In place of Triton's driver: a GPU of a compute capability, for which code is compiled."""

    def __init__(self, capability: int) -> None:
        self._capability = capability

    def get_current_device(self) -> int:
        return self._capability

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


@contextmanager
def compiled_for(capability: int) -> Iterator[dict[str, Code]]:
    """Inside, launches with tensors on CPU are compiled as if these were on a GPU, and not run.

    Triton itself looks at the arguments, at the alignment of tensors too.

    Yields:
        The launches' code, each different one once, by its hash.
    """
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    codes: dict[str, Code] = {}
    run, active = JITFunction.run, driver._active

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            kernel = run(self, *args, grid=grid, warmup=True, **kwargs)
        if kernel.hash not in codes:
            code = codes[kernel.hash] = Code.of(self.fn.__name__, kernel.asm["cubin"])
            assert code.target.rstrip("a") == f"sm_{capability}"

    JITFunction.run = compile_only
    driver._active = _Gpu(capability)
    try:
        yield codes
    finally:
        JITFunction.run, driver._active = run, active
