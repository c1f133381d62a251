"""Keeps linear weights plain on CPU, as they are on GPUs. Test support only.

vLLM packs them for its CPU kernels and frees the plain ones, so that no trainer could update them.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

# Under one name, whatever that of this module is: it registers an operation.
sys.path.append(str(Path(__file__).parent))


def apply() -> None:
    """Have vLLM keep plain weights in this process. To be called before a model is loaded."""
    for name, patch in ON_IMPORT.items():
        patch(importlib.import_module(name))


def keep_linear_plain(utils: Any) -> None:
    """Patch `vllm.model_executor.layers.utils`."""
    utils.dispatch_cpu_unquantized_gemm = _keep_plain


def run_linear_attention_plain(module: Any) -> None:
    """Patch the module of vLLM's Gated DeltaNet, whose kernels for CPU take packed weights only."""
    import delta_net

    module.QwenGatedDeltaNetAttention.forward_cpu = delta_net.forward


ON_IMPORT: Mapping[str, Callable[[Any], None]] = {
    "vllm.model_executor.layers.utils": keep_linear_plain,
    "vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn": run_linear_attention_plain,
}
"""The patches by the modules that they are for, as `patch_on_import` takes them."""


def _keep_plain(layer: torch.nn.Module, remove_weight: bool) -> None:
    import torch

    layer.cpu_linear = torch.nn.functional.linear
