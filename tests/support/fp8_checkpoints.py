"""Makes fp8 checkpoints of random ones, as the tools do that publish them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

BLOCK = 128
_KEPT = ("embed_tokens", "lm_head", "mlp.gate.", "norm", "kv_a_proj_with_mqa", "q_a_proj")
"""Parts of names of what stays as it is: embeddings, head, routers, norms, small projections."""
_MOST = torch.finfo(torch.float8_e4m3fn).max


def by_blocks(path: Path) -> None:
    """As DeepSeek's and Qwen's, and as trainers make: a scale for each block of 128 x 128."""
    method = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}
    ignored = {"modules_to_not_convert": _ignored(path)}
    _quantize(
        path,
        "weight_scale_inv",
        _block_scales,
        {**method, **ignored, "weight_block_size": [BLOCK, BLOCK]},
    )


def by_tensors(path: Path) -> None:
    """A scale for each matrix, and one for what comes into it."""
    method = {"quant_method": "fp8", "activation_scheme": "static"}
    _quantize(
        path, "weight_scale", _tensor_scale, {**method, "ignored_layers": _ignored(path)}, True
    )


def by_channels(path: Path) -> None:
    """As llm-compressor's FP8-dynamic: a scale for each row."""
    weights = {
        "num_bits": 8,
        "type": "float",
        "symmetric": True,
        "strategy": "channel",
        "dynamic": False,
    }
    inputs = {**weights, "strategy": "token", "dynamic": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
    _quantize(
        path,
        "weight_scale",
        _row_scales,
        {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": _ignored(path),
        },
    )


def by_modelopt(path: Path) -> None:
    """As ModelOpt's FP8: as `by_tensors`, described otherwise."""
    method = {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": _ignored(path)}
    _quantize(path, "weight_scale", _tensor_scale, method, True)


def _quantize(
    path: Path,
    name: str,
    scales: Callable[[torch.Tensor], torch.Tensor],
    method: dict[str, Any],
    inputs: bool = False,
) -> None:
    file = path / "model.safetensors"
    tensors: dict[str, torch.Tensor] = {}
    for key, tensor in load_file(file).items():
        if not _is_quantized(key, tensor):
            tensors[key] = tensor
            continue
        layer, scale = key.removesuffix("weight"), scales(tensor.float())
        tensors[key] = quantized(tensor, scale)
        tensors[layer + name] = scale
        if inputs:
            tensors[layer + "input_scale"] = torch.tensor(0.05)
    save_file(tensors, file, metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": method}))


def quantized(weight: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """A matrix in fp8, with the scales that one of the functions below gives."""
    rows, columns = weight.shape
    if scale.dim() == 2 and scale.shape[0] < rows:
        scale = scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :columns]
    return (weight.float() / scale).clamp(-_MOST, _MOST).to(torch.float8_e4m3fn)


def _is_quantized(name: str, tensor: torch.Tensor) -> bool:
    return name.endswith("_proj.weight") and tensor.dim() == 2 and not any(k in name for k in _KEPT)


def _ignored(path: Path) -> list[str]:
    tensors = load_file(path / "model.safetensors").items()
    kept = {
        k.removesuffix(".weight") for k, t in tensors if t.dim() == 2 and not _is_quantized(k, t)
    }
    return sorted(kept)


def _tensor_scale(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().amax() / _MOST


def _row_scales(weight: torch.Tensor) -> torch.Tensor:
    return weight.abs().amax(dim=1, keepdim=True) / _MOST


def _block_scales(weight: torch.Tensor) -> torch.Tensor:
    rows, columns = weight.shape
    padded = torch.zeros(-(-rows // BLOCK) * BLOCK, -(-columns // BLOCK) * BLOCK)
    padded[:rows, :columns] = weight
    blocks = padded.view(padded.shape[0] // BLOCK, BLOCK, padded.shape[1] // BLOCK, BLOCK)
    return blocks.abs().amax(dim=(1, 3)) / _MOST
