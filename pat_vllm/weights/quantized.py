"""Layers whose weights vLLM has in other forms than checkpoints of 16 bits.

vLLM quantizes, transposes, packs and scales the weights of such layers after it has loaded them. A
`QuantizedLayer` describes what that comes to. Layouts take the base layout's bytes in this form and
vLLM never processes them again: its processing writes in place, and would change shared bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from types import NoneType
from typing import Any, Self

import torch
from torch import nn
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from pat_vllm.layout import Place
from pat_vllm.patches.weights import process_instead
from pat_vllm.weights.weight import Weight, shape_in

_NOTES = (NoneType, bool, int, float, str, tuple)
"""Types of what processing notes on a layer beside tensors: `input_scale = None`, for one."""


class QuantizedLayer(ABC):
    """A module, in the base layout or another, with weights of one kind.

    A new kind is a class here and an entry of `KINDS` in `model_weights.py`.

    Attributes:
        path: the module's name in its model.
        place: the rank's, by which vLLM has cut the weights.
        unit: rows and columns that share a scale, of scales for blocks; else 1.
    """

    def __init__(self, path: str, module: nn.Module, place: Place, unit: int = 1) -> None:
        self.path = path
        self.module: Any = module
        self.place = place
        self.unit = unit

    @classmethod
    @abstractmethod
    def of(cls, path: str, module: nn.Module) -> Self | None:
        """The layer, if the module is of this kind.

        Raises:
            ValueError: it is, but layouts cannot share its weights; says what helps.
        """

    @abstractmethod
    def weights(self) -> Iterator[Weight]:
        """What vLLM's processing has left, in the model of a layout."""

    @abstractmethod
    def check(self, places: Iterable[Place]) -> None:
        """Check, before weights are read, that ranks in all these places can share them.

        Raises:
            ValueError: they cannot; names the sizes.
        """

    def adopt(self, base: QuantizedLayer) -> None:
        """Give another layout's layer parameters like the base layout's, which take no memory yet.

        vLLM will not process them. `finish` does what its kernels need beside tensors.
        """
        kept = {weight.attribute: weight for weight in base.weights()}
        for name in set(self.parameters()) - set(kept):
            delattr(self.module, name)
        for name, value in vars(base.module).items():
            if isinstance(value, _NOTES) and name not in vars(self.module):
                setattr(self.module, name, value)
        for weight in kept.values():
            self._replace(weight)
        process_instead(self.module.quant_method, self.finish)
        get_layerwise_info(self.module).reset()  # else vLLM would load what was not loaded

    def parameters(self) -> dict[str, nn.Parameter]:
        """The module's parameters that are of this kind."""
        every: dict[str, nn.Parameter | None] = self.module._parameters
        return {name: parameter for name, parameter in every.items() if parameter is not None}

    @abstractmethod
    def finish(self, module: nn.Module) -> None:
        """In place of vLLM's processing, when the weights are there."""

    def _replace(self, base: Weight) -> None:
        """Put an empty tensor of this layout's shape in a raw one's place."""
        shape = shape_in(base, self.place, self.unit if base.unit > 1 else 1)
        tensor = torch.empty((), dtype=base.tensor.dtype, device=base.tensor.device).expand(shape)
        if base.attribute in base.module._buffers:
            setattr(self.module, base.attribute, tensor)
            return
        parameter = nn.Parameter(tensor.t() if base.transposed else tensor, requires_grad=False)
        for name in ("input_dim", "output_dim"):
            if (dim := getattr(getattr(base.module, base.attribute), name, None)) is not None:
                setattr(parameter, name, dim)
        setattr(self.module, base.attribute, parameter)
