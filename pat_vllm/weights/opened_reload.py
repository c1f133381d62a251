"""Weights that a trainer loads into a model whose parameters no checkpoint fits any more."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import (
    _place_kernel_tensors,
    get_layerwise_info,
)

from pat_vllm.patches.weights import before_load_weights, process_loaded_weights_by
from pat_vllm.weights.model_weights import quantized_layers


class OpenedReload:
    """Makes a trainer's calls of `model.load_weights` a reload by layers, as vLLM's transfers are.

    vLLM's processing leaves quantized layers with plain parameters, transposed some of them. What
    a trainer loads would fail there, or land wrong. In a reload, layers keep what comes until all
    of theirs is there, and quantize it into the memory that they have.

    The first such call opens it. A layer that has all of its weights is quantized then; before the
    next call it is made ready for others, which may come before the next step. Calls in a reload
    that somebody else has begun are left alone, and so are those for which a trainer's own code has
    made parameters fit again: VeRL's and NeMo-RL's keep them in the form and of the class that
    loading knows, and quantize what they load.
    """

    def __init__(self, model: nn.Module, config: VllmConfig) -> None:
        self._model = model
        self._config = config
        self._quantized = quantized_layers(model)
        self.is_open = False
        if any(layer.parameters() for layer in self._quantized.values()):
            before_load_weights(model, self._open)
            process_loaded_weights_by(model, self._close_in_time)

    def _open(self) -> None:
        if self.is_open:
            for layer in self._quantized.values():
                if not get_layerwise_info(layer.module).can_load():
                    initialize_layerwise_reload(layer.module)
            return
        if get_layerwise_info(self._model).can_load():  # a reload has begun
            return
        if not any(_is_unfit(layer.module) for layer in self._quantized.values()):
            return
        initialize_layerwise_reload(self._model)
        self.is_open = True

    def _close_in_time(self) -> bool:
        """Where a trainer has vLLM process what it has loaded. Returns whether it is processed."""
        was_open = self.is_open
        if was_open:
            self.close()
        return was_open

    @property
    def incomplete(self) -> str | None:
        """A quantized layer of which only some weights have come; None: there is none."""
        for path, layer in self._quantized.items():
            info = get_layerwise_info(layer.module)
            if info.can_load() and 0 < info.load_numel < (info.load_numel_total or 0):
                return path
        return None

    def close(self) -> None:
        """End the reload: before weights are used.

        Raises:
            RuntimeError: only some of a quantized layer's weights have come.
        """
        if (path := self.incomplete) is not None:
            raise RuntimeError(
                f"of {path}, which is quantized as a whole, only some weights have been loaded; "
                "send all of a layer's weights before they are processed"
            )
        self.is_open = False
        for layer in self._quantized.values():
            info = get_layerwise_info(layer.module)
            if info.can_load():  # none have come, of which vLLM would warn
                _place_kernel_tensors(layer.module, info)
                info.reset()
        with set_current_vllm_config(self._config):
            finalize_layerwise_reload(self._model, self._config.model_config)


def _is_unfit(module: nn.Module) -> bool:
    """Whether a parameter is of another form or class than vLLM has noted for loading."""
    loadable, _ = get_layerwise_info(module).restore_metadata
    return any(
        parameter is not None and name in loadable and _form(parameter) != _form(loadable[name])
        for name, parameter in module._parameters.items()
    )


def _form(tensor: torch.Tensor) -> tuple[Any, ...]:
    return type(tensor), tensor.dtype, tensor.shape
