"""fp8 weights in verl's server and workers on CPU. Test support only.

To be named in `VERL_USE_EXTERNAL_MODULES` beside `verl_on_cpu`.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3]))
os.environ["VERL_DISABLE_TRITON_FP8"] = "1"  # it has the same in torch
from tests.support.on_import import patch_on_import


def _apply(module: Any) -> None:
    import pytest

    from tests.support import fp8_on_cpu

    fp8_on_cpu.apply(pytest.MonkeyPatch())


patch_on_import({"verl.utils.vllm.vllm_quant_utils": _apply})
