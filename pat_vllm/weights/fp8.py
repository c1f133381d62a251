"""Layers with fp8 weights: linear ones, and experts.

What a scale stands for says how it is cut: one for all of a matrix is whole in every layout, one
for each row is cut as the rows are, one for each block of a matrix in both directions. Scales are
equal in all layouts: vLLM takes the largest value over the ranks of a group, or reads them from a
checkpoint. So a layout's bytes are a part of the base layout's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn
from vllm.model_executor.layers.fused_moe.oracle.fp8 import make_fp8_moe_kernel
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase
from vllm.model_executor.layers.quantization.utils import quant_utils

from pat_vllm.layout import Place
from pat_vllm.weights.cuts import has_own_loader, known_cuts, place_of, sharded_class
from pat_vllm.weights.experts import (
    block_of_scales,
    expert_cuts,
    expert_place,
    why_not_shared,
)
from pat_vllm.weights.quantized import QuantizedLayer
from pat_vllm.weights.shards import Cut
from pat_vllm.weights.weight import WHOLE, Share, Weight

STATIC = "or use a static tensor_parallel_size without PAT"
_ALIGNED = 16
"""Rows and columns of fp8 matrices come in multiples of it; else vLLM pads them for its kernels."""


@dataclass(frozen=True)
class Kernel:
    """What layouts have to know of one of vLLM's kernels for fp8 matrices.

    Attributes:
        strided: it honours the strides of a range of a matrix's columns. CUTLASS's for compute
            capability 9.0 and later take a matrix for packed whatever its strides are, without an
            error (vLLM issue 55534).
        transposed: the model has matrices as `[columns, rows]`, without another order of bytes.
        finish: does what the kernel's own processing would, beside tensors.
    """

    strided: bool = False
    transposed: bool = False
    finish: Callable[[Any, Any], None] = lambda kernel, layer: None


def _know_output_size(kernel: Any, layer: Any) -> None:
    kernel.logical_output_size = layer.weight.shape[1]


def _warm_up(kernel: Any, layer: Any) -> None:
    layer.deep_gemm_warmup_provider = getattr(kernel, "fallback", kernel)


KERNELS: dict[str, Kernel] = {
    "CutlassFP8ScaledMMLinearKernel": Kernel(transposed=True, finish=_know_output_size),
    "FlashInferFP8ScaledMMLinearKernel": Kernel(transposed=True),
    "PerTensorTorchFP8ScaledMMLinearKernel": Kernel(strided=True, transposed=True),
    "ChannelWiseTorchFP8ScaledMMLinearKernel": Kernel(strided=True, transposed=True),
    "CutlassFp8BlockScaledMMKernel": Kernel(),
    "DeepGemmFp8BlockScaledMMKernel": Kernel(finish=_warm_up),
    "FlashInferFp8DeepGEMMDynamicBlockScaledKernel": Kernel(finish=_warm_up),
    "TritonFp8BlockScaledMMKernel": Kernel(strided=True),
    "MarlinFP8ScaledMMLinearKernel": Kernel(),  # packs a matrix: see `MarlinFp8Linear`
}
"""By vLLM's class names. Others pack a matrix in a way of their own."""

_LINEAR_METHODS = frozenset(
    {
        "CompressedTensorsLinearMethod",
        "Fp8LinearMethod",
        "Fp8PerBlockOnlineLinearMethod",
        "Fp8PerTensorOnlineLinearMethod",
        "Fp8PtpcOnlineLinearMethod",
        "ModelOptLinearMethod",
    }
)
_EXPERT_METHODS = frozenset(
    {
        "CompressedTensorsW8A8Fp8MoEMethod",
        "Fp8MoEMethod",
        "Fp8PerBlockOnlineMoEMethod",
        "Fp8PerTensorOnlineMoEMethod",
        "Fp8PtpcOnlineMoEMethod",
        "ModelOptFp8MoEMethod",
    }
)


class Fp8Linear(QuantizedLayer):
    """A linear layer, by per-tensor, per-channel or block scales."""

    @classmethod
    def of(cls, path: str, module: nn.Module) -> Self | None:
        if not isinstance(module, LinearBase):
            return None
        if type(module.quant_method).__name__ not in _LINEAR_METHODS:
            return None
        kernel = kernel_of(module)
        if (name := type(kernel).__name__) not in KERNELS:
            raise ValueError(
                f"{path} runs with {name}, whose form of quantized weights layouts cannot share: "
                f"choose another kernel by linear_backend, {STATIC}"
            )
        _refuse_own_amax(path, module.quant_method)
        layer, weight = sharded_class(path, module), module.weight
        # Some methods leave a parameter without a loader when they have processed it.
        if layer and hasattr(weight, "weight_loader") and not has_own_loader(weight, layer):
            raise ValueError(
                f"{path}.weight does not have its layer's own weight loader: this model loads it "
                "in a way of its own, and cannot be used with PAT"
            )
        unit = _unit_of(path, getattr(module, "weight_block_size", None))
        return cls(path, module, place_of(module), unit)

    @property
    def kernel(self) -> Kernel:
        return KERNELS[type(kernel_of(self.module)).__name__]

    @property
    def cuts(self) -> tuple[Cut, ...]:
        """Those of the matrix."""
        if getattr(self.module, "disable_tp", False) or sharded_class("", self.module) is None:
            return ()
        return known_cuts(self.path, self.module, "weight") or ()

    def check(self, places: Iterable[Place]) -> None:
        check_shards(self.path, self.cuts, max(self.unit, _ALIGNED), places)

    def weights(self) -> Iterator[Weight]:
        cuts, rows = self.cuts, self._rows
        for name, parameter in self.parameters().items():
            share: Share = "copy"
            data, own, unit = parameter.data, cuts, 1
            transposed = name == "weight" and self.kernel.transposed
            if name == "weight":
                share = "view" if self.kernel.strided else "block"
                data = data.t() if transposed else data
                self._check_size(data)
            elif data.dim() == 2 and self.unit > 1:
                unit = self.unit
                self._check_scales(name, data)
            elif data.numel() == rows:
                own = tuple(cut for cut in cuts if cut.dim == 0)
            else:
                own = ()
            yield Weight(
                f"{self.path}.{name}",
                data,
                own,
                self.place if own else WHOLE,
                self.module,
                name,
                share,
                transposed,
                unit,
            )

    def finish(self, module: nn.Module) -> None:
        self.kernel.finish(kernel_of(module), module)

    def _check_size(self, weight: torch.Tensor) -> None:
        """Check that vLLM has not padded a matrix that layouts cut."""
        module = self.module
        if self.cuts and list(weight.shape) != [
            module.output_size_per_partition,
            module.input_size_per_partition,
        ]:
            raise ValueError(
                f"{self.path}.weight is padded for its kernel to {tuple(weight.shape)}: layouts "
                f"cannot share it. Choose another kernel by linear_backend, {STATIC}"
            )

    def _check_scales(self, name: str, scales: torch.Tensor) -> None:
        """Check that there is one for each block, in order. DeepGEMM packs them on Blackwell."""
        weight = self.module.weight
        blocks = [-(-size // self.unit) for size in weight.shape]
        in_order = scales.is_contiguous() or not any(scales.stride())  # or is not there yet
        if list(scales.shape) != blocks or not in_order:
            raise ValueError(
                f"{self.path}.{name} is packed for its kernel, {tuple(scales.shape)} of "
                f"{scales.dtype} in place of {blocks}: layouts cannot share it. Set "
                f"VLLM_USE_DEEP_GEMM=0, {STATIC}"
            )

    @property
    def _rows(self) -> int:
        weight = self.module.weight
        return int(weight.shape[1 if self.kernel.transposed else 0])


class Fp8Experts(QuantizedLayer):
    """Experts, by scales for each expert, row or block.

    vLLM's Triton kernels run them, which honour strides. Others reorder weights, or take strides
    from shapes.
    """

    @classmethod
    def of(cls, path: str, module: nn.Module) -> Self | None:
        if not isinstance(module, RoutedExperts):
            return None
        method: Any = module.quant_method
        if (name := type(method).__name__) not in _EXPERT_METHODS:
            return None
        _refuse_own_amax(path, method)
        reasons = list(why_not_shared(module))
        if module.moe_config.has_bias or not module.moe_config.is_act_and_mul:
            reasons.append("have biases or no gate: use another model")
        if (backend := method.fp8_backend.value) != "TRITON":
            where = " on a GPU that has fp8" if backend == "MARLIN" else ""
            reasons.insert(0, f"are laid out for {backend}: set moe_backend='triton'{where}")
        for reason in reasons:
            raise ValueError(
                f"{path} ({name}): PAT cannot derive experts for other layouts that {reason}, "
                f"{STATIC}"
            )
        # Where shards end inside a checkpoint's blocks, vLLM has scales for smaller ones.
        return cls(path, module, expert_place(module), _unit_of(path, block_of_scales(method)))

    def parameters(self) -> dict[str, nn.Parameter]:
        # The bias of the router's choice is the router's, which has it plain.
        router = self.module.e_score_correction_bias
        return {name: own for name, own in super().parameters().items() if own is not router}

    def check(self, places: Iterable[Place]) -> None:
        for name in ("w13_weight", "w2_weight"):
            cuts = expert_cuts(self.module, name) or ()
            unit = math.gcd(self.unit, _LEAST_BLOCK) if self.unit > 1 else _ALIGNED
            check_shards(f"{self.path}.{name}", cuts[1:], unit, places)

    def weights(self) -> Iterator[Weight]:
        for name, parameter in self.parameters().items():
            full_name, data = f"{self.path}.{name}", parameter.data
            cuts = expert_cuts(self.module, f"{name.partition('_')[0]}_weight") or ()
            share: Share = "view" if name in ("w13_weight", "w2_weight") else "copy"
            unit = self.unit if share == "copy" and data.dim() == 3 else 1
            # Scales of rows have no columns, those of experts neither.
            dims = data.dim() if share == "view" or unit > 1 else min(data.dim(), 2)
            own = tuple(cut for cut in cuts if cut.dim < dims)
            place = self.place if own else WHOLE
            yield Weight(full_name, data, own, place, self.module, name, share, unit=unit)

    def finish(self, module: Any) -> None:
        """Make the kernel, as the end of vLLM's processing does."""
        method = module.quant_method
        method.moe_quant_config = method.get_fused_moe_quant_config(module)
        method.moe_kernel = make_fp8_moe_kernel(
            moe_quant_config=method.moe_quant_config,
            moe_config=method.moe,
            fp8_backend=method.fp8_backend,
            experts_cls=method.experts_cls,
            routing_tables=module._expert_routing_tables(),
        )


_LEAST_BLOCK = 32
"""The smallest blocks to which vLLM divides those of experts (`refine_fp8_moe_block_shape`)."""


def kernel_of(module: Any) -> Any:
    """vLLM's kernel of a quantized linear layer; None: the module has none that PAT knows of."""
    method, scheme = getattr(module, "quant_method", None), getattr(module, "scheme", None)
    for owner, name in (
        (method, "fp8_linear"),
        (scheme, "fp8_linear"),
        (scheme, "linear_kernel"),
        (method, "kernel"),
    ):
        if (kernel := getattr(owner, name, None)) is not None:
            return kernel
    return None


def _unit_of(path: str, block: Sequence[int] | None) -> int:
    """Rows and columns of a block with one scale; 1: scales are not of blocks."""
    if block is None:
        return 1
    if len(set(block)) > 1:
        raise ValueError(
            f"{path} has scales for blocks of {' x '.join(map(str, block))}: PAT derives those of "
            f"square blocks only. Use a checkpoint with such blocks, {STATIC}"
        )
    return int(block[0])


def check_shards(path: str, cuts: Iterable[Cut], unit: int, places: Iterable[Place]) -> None:
    """Check that ranks in these places have whole blocks of `unit` rows or columns."""
    for cut in cuts:
        for place in places:
            try:
                if cut.ways(place) > 1:
                    cut.shard(place).in_units(unit)
            except ValueError as error:
                raise ValueError(
                    f"{path}, {error}, for tp={place.tp}: layouts cannot share fp8 weights whose "
                    f"shards end inside a block. Leave tp={place.tp} out by pat.layouts, {STATIC}"
                ) from error


def _refuse_own_amax(path: str, method: Any) -> None:
    """Refuse online quantization in a version of vLLM in which each rank takes scales of its own
    shard, so that they differ between layouts."""
    if "Online" in type(method).__name__ and not hasattr(quant_utils, "amax_for_tp_weight_quant"):
        raise ValueError(
            f"{path}: this version of vLLM quantizes each rank's shard by its own largest value, "
            f"so that layouts would differ: use vLLM 0.32 or later, an fp8 checkpoint, {STATIC}"
        )
