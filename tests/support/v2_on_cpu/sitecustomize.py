"""Lets vLLM's Model Runner V2 run on CPU, in processes that have this folder on PYTHONPATH.

Test support only. V2 is what vLLM runs by default on CUDA, and its bookkeeping is Triton kernels,
of which Triton has no CPU backend. Triton's interpreter (`TRITON_INTERPRET=1`) needs none, but
vLLM switches Triton off where no backend is called "cpu", and Triton wants one active driver. So
this names one, which is never asked to compile anything.

It has to be a `sitecustomize`: an engine's core and its workers are new processes, and vLLM looks
for backends when it is imported, before any code of ours runs there.
"""

import os
import sys
import types
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parent)]
from on_import import patch_on_import


class _InterpreterDriver:
    """A driver with nothing to drive: interpreted kernels are NumPy calls on host memory."""

    @staticmethod
    def is_active() -> bool:
        return True


class _Kept:
    """In place of what would undo the interpreter's patches."""

    def restore(self) -> None:
        return


def _patch_language_once(interpreter: Any) -> None:
    """Have the interpreter patch Triton's language once for each function, and leave it so.

    It does so at each launch, and at each call of one kernel's function by another, which takes
    ten times as long as the kernels of a small model. Nothing compiles here that would need the
    language as it was.
    """
    patch = interpreter._patch_lang
    patched: dict[int, dict[str, Any]] = {}

    def patch_once(function: Any) -> _Kept:
        names = function.__globals__
        if id(names) not in patched:
            patched[id(names)] = names
            patch(function)
        return _Kept()

    interpreter._patch_lang = patch_once


def _take_any_mask(interpreter: Any) -> None:
    """Have the interpreter load and store where a mask of integers says so, as compiled code does.

    It makes such of "and" between a truth value and many, as vLLM's kernel for grammars has it.
    """
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def create_masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return load(self, pointers, mask, *rest)

    def create_masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        mask.data = mask.data.astype(bool)
        return store(self, pointers, value, mask, *rest)

    builder.create_masked_load, builder.create_masked_store = (
        create_masked_load,
        create_masked_store,
    )


def _patch_interpreter(interpreter: Any) -> None:
    _patch_language_once(interpreter)
    _take_any_mask(interpreter)


def _verify_drafts_of_mamba2(mixer: Any) -> None:
    import mamba2  # which needs torch

    mamba2.patch(mixer)


if os.environ.get("TRITON_INTERPRET") == "1":
    patch_on_import(
        {
            "triton.runtime.interpreter": _patch_interpreter,
            "vllm.model_executor.layers.mamba.mamba_mixer2": _verify_drafts_of_mamba2,
        }
    )
    try:
        from triton.backends import backends
    except ImportError:
        pass  # another Python than the tests', started by one of them
    else:
        backends.setdefault("cpu", types.SimpleNamespace(driver=_InterpreterDriver, compiler=None))
