"""What PAT does to the weights of vLLM's models, in the workers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from pat_vllm.patches.expert_layers import keep_plain_experts
from pat_vllm.patches.replacing import replace

if TYPE_CHECKING:
    from torch import nn
    from vllm.config import ModelConfig
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention


def keep_plain_weights(model: nn.Module) -> None:
    """Have vLLM neither pack the weights of a model for its CPU kernels nor copy its experts.

    Without it: vLLM frees the plain weights on CPU, of which the layouts' weights are views.
    Missing seam: an option of the CPU platform. Of experts see `keep_plain_experts`.

    Raises:
        ValueError: vLLM's kernels for CPU run a layer with packed weights only.
    """
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import (
        QwenGatedDeltaNetAttention,
    )
    from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
    from vllm.platforms import current_platform

    on_cpu = current_platform.is_cpu()
    for module in model.modules():
        if isinstance(module, RoutedExperts):
            if isinstance(module.quant_method, UnquantizedFusedMoEMethod):
                keep_plain_experts(module)
        elif not on_cpu:
            continue
        elif isinstance(module, QwenGatedDeltaNetAttention):
            _refuse_packing(module)
        elif isinstance(module, LinearBase):
            module._cpu_skip_gemm_dispatch = True  # type: ignore[attr-defined]  # vLLM's own name
        elif isinstance(module, VocabParallelEmbedding):
            module.quant_method = _plain_embedding()()


@contextmanager
def kept_input_norms(model: nn.Module) -> Iterator[None]:
    """Inside, weights are loaded; what scales pixels for a vision tower stays as it was made.

    Without it: `load_format="dummy"`, with which trainers start engines that they send the weights,
    puts noise in there, too. It is in no checkpoint, and no trainer sends it. Missing seam: vLLM's
    dummy loader takes every persistent buffer for a weight.
    """
    norms = [module for module in model.modules() if type(module).__name__ == "FusedMMInputNorm"]
    kept = [(buffer, buffer.clone()) for norm in norms for buffer in norm.buffers()]
    yield
    for buffer, value in kept:
        buffer.copy_(value)


def _refuse_packing(layer: QwenGatedDeltaNetAttention) -> None:
    """Refuse Gated DeltaNet on CPU by vLLM's kernels, which take packed weights."""
    forward: Any = layer._forward_method
    if forward.__module__.startswith("vllm."):
        raise ValueError(
            "pat.weights is 'inplace', but vLLM's CPU kernels for Gated DeltaNet take packed "
            "weights, which layouts cannot share; set pat.weights='materialized' or 'auto'"
        )


@functools.cache
def _plain_embedding() -> type:
    import torch
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    class PlainEmbedding(UnquantizedEmbeddingMethod):
        """vLLM's method for embeddings, without the packing."""

        def process_weights_after_loading(self, layer: nn.Module) -> None:
            layer.cpu_linear = torch.nn.functional.linear  # type: ignore[attr-defined]

    return PlainEmbedding


def tie_word_embeddings(model: nn.Module, model_config: ModelConfig) -> None:
    """Have vLLM tie a loaded model's head to its embeddings, if that is due, and not ask again.

    Without it: vLLM compares the two after each layout's weights are loaded. That is too late for
    a strategy that has taken them for two weights by then. And a layout with smaller shards may
    have equal ones by chance; what the base layout says holds for all. Missing seam: the
    comparison is no part of a loader's `load_weights`.
    """
    from vllm.model_executor.model_loader.weight_tying import maybe_retie_word_embeddings

    before = len(list(model.parameters()))
    maybe_retie_word_embeddings(model, model_config)
    if len(list(model.parameters())) == before:
        model_config.word_embeddings_untied_by_checkpoint = False


def process_instead(method: Any, finish: Callable[[nn.Module], None]) -> None:
    """Have vLLM call `finish` in place of a quantization method's processing of one layer.

    Without it: vLLM quantizes, transposes or scales again what the base layout's layer has been
    processed to already, and of views writes into that. Missing seam: `weights_already_processed`
    is for whole models, and not served by each of vLLM's methods.
    """
    replace(method, "process_weights_after_loading", lambda original: finish)


def before_load_weights(model: nn.Module, call: Callable[[], None]) -> None:
    """Have `call` called before `model.load_weights`.

    Without it: PAT does not learn that a trainer loads weights, which calls the model's method
    itself. Missing seam: a worker is not asked before that.
    """
    _of_loading(model)[0].append(call)


def after_load_weights(model: nn.Module, call: Callable[[Any], None]) -> None:
    """Have `call` called after `model.load_weights`, with what that has returned.

    Without it: PAT does not learn what a trainer has loaded. Missing seam: as above.
    """
    _of_loading(model)[1].append(call)


def _of_loading(
    model: nn.Module,
) -> tuple[list[Callable[[], None]], list[Callable[[Any], None]]]:
    """What is called before a model loads weights, and after it."""

    def load(original: Callable[..., Any]) -> Callable[..., Any]:
        def load_weights(*args: Any, **kwargs: Any) -> Any:
            for call in before:
                call()
            loaded = original(*args, **kwargs)
            for tell in after:
                tell(loaded)
            return loaded

        return load_weights

    before, after = vars(model).setdefault(_OF_LOADING, ([], []))
    replace(model, "load_weights", load)
    return before, after


_OF_LOADING = "_pat_of_loading"
"""Attribute of a model: what `_of_loading` returns."""


def process_loaded_weights_by(model: nn.Module, process: Callable[[], bool]) -> None:
    """Have a trainer's call of vLLM's `process_weights_after_loading` ask `process` first.

    Without it: vLLM processes layers that a reload has processed, or whose weights it still keeps.
    VeRL and NeMo-RL call the function after they have loaded weights. Missing seam: as above.

    Args:
        process: returns whether nothing is left to be processed.
    """
    from vllm.model_executor.model_loader import utils

    def ask(original: Callable[..., None]) -> Callable[..., None]:
        def process_weights_after_loading(model: nn.Module, *args: Any, **kwargs: Any) -> None:
            ask = getattr(model, _PROCESS, None)
            if ask is None or not ask():
                original(model, *args, **kwargs)

        return process_weights_after_loading

    replace(utils, "process_weights_after_loading", ask)
    setattr(model, _PROCESS, process)


_PROCESS = "_pat_process"
"""Attribute of a model: what processes its weights."""


def refuse_load_weights(model: nn.Module, refuse: Callable[..., Any]) -> None:
    """Have `model.load_weights` call `refuse`, which raises.

    Without it: a trainer's call loads new weights into the base layout's model only, although the
    other layouts cannot be given them. Trainers call the model's method themselves. Missing seam:
    a worker is not asked before that.
    """
    replace(model, "load_weights", lambda original: refuse)
