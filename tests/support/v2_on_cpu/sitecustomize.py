"""Lets vLLM's Model Runner V2 run on CPU, in processes that have this folder on PYTHONPATH.

Test support only. V2 is what vLLM runs by default on CUDA, and its bookkeeping is Triton kernels,
of which Triton has no CPU backend. Triton's interpreter (`TRITON_INTERPRET=1`) needs none, but
vLLM switches Triton off where no backend is called "cpu", and Triton wants one active driver. So
this names one, which is never asked to compile anything.

It has to be a `sitecustomize`: an engine's core and its workers are new processes, and vLLM looks
for backends when it is imported, before any code of ours runs there.
"""

import os
import types


class _InterpreterDriver:
    """A driver with nothing to drive: interpreted kernels are NumPy calls on host memory."""

    @staticmethod
    def is_active() -> bool:
        return True


if os.environ.get("TRITON_INTERPRET") == "1":
    try:
        from triton.backends import backends
    except ImportError:
        pass  # another Python than the tests', started by one of them
    else:
        backends.setdefault("cpu", types.SimpleNamespace(driver=_InterpreterDriver, compiler=None))
