"""How the experts of a vLLM model lie on a rank, and which of them layouts can share."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import nn
from vllm.model_executor.layers.fused_moe.modular_kernel import FusedMoEActivationFormat
from vllm.model_executor.layers.fused_moe.oracle import fp8
from vllm.model_executor.layers.fused_moe.oracle.unquantized import (
    UnquantizedMoeBackend,
    _get_priority_backends,
    backend_to_kernel_cls,
)
from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
from vllm.model_executor.layers.fused_moe.runner.moe_runner import MoERunner
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
    UnquantizedFusedMoEMethod,
)
from vllm.model_executor.layers.quantization.utils.quant_utils import (
    GroupShape,
    QuantKey,
    create_fp8_quant_key,
    kFp8Dynamic128Sym,
    kFp8DynamicTensorSym,
    kFp8DynamicTokenSym,
    kFp8StaticChannelSym,
    kFp8StaticTensorSym,
)
from vllm.model_executor.models.gpt_oss import GptOssRoutedExperts

from pat_vllm.layout import Place
from pat_vllm.weights.shards import Cut, EvenPartition, ExpertPartition, FirstPartition, Partition

EXPERTS = (GptOssRoutedExperts, RoutedExperts)
"""The classes whose weights layouts can share, from the most derived one to the least."""

_BACKENDS = (UnquantizedMoeBackend.TRITON, UnquantizedMoeBackend.CPU)
"""vLLM's backends that run experts as they were loaded. CPU's would pack copies of them, which
`keep_plain_weights` prevents; all others permute the weights where they lie."""


def expert_cuts(experts: RoutedExperts, name: str) -> tuple[Cut, ...] | None:
    """How layouts cut a weight of a layer's experts; None: that is unknown.

    Args:
        name: "w13_weight", of shape `[experts, 2 * intermediate, hidden]`, whose rows are gate's
            and then up's; "w2_weight", `[experts, hidden, intermediate]`. gpt-oss, whose gate's and
            up's rows take turns, also has "w13_bias" and "w2_bias", without the last dimension.
    """
    config = experts.moe_config
    width = config.intermediate_size  # of the whole model, whatever the tp
    partition: Partition | None = None
    if name == "w2_weight":
        partition = EvenPartition((width,), dim=2)
    elif not isinstance(experts, GptOssRoutedExperts):
        partition = EvenPartition((width, width), dim=1) if name == "w13_weight" else None
    elif name in ("w13_weight", "w13_bias"):
        partition = EvenPartition((2 * width,), dim=1)
    elif name == "w2_bias":
        partition = FirstPartition(config.hidden_dim, dim=1)
    if partition is None:
        return None
    # Of the two cuts an engine has one: the other leaves the dimension whole (`Cut.ways`).
    return Cut(ExpertPartition(config.num_experts), "ep"), Cut(partition, "tp")


def expert_place(experts: RoutedExperts) -> Place:
    """The rank's place among those that share a layer's experts, as vLLM made it."""
    parallel = experts.moe_config.moe_parallel_config
    if parallel.use_ep:
        return Place(parallel.ep_size, parallel.ep_rank, "ep")
    return Place(parallel.tp_size, parallel.tp_rank)


def check_experts(path: str, experts: RoutedExperts) -> None:
    """Check that layouts can share a layer's experts.

    Raises:
        ValueError: they cannot; says why and what helps.
    """
    for reason in _reasons(experts):
        raise ValueError(
            f"{path} ({type(experts).__name__}): PAT cannot derive experts for other layouts that "
            f"{reason}, or use a static tensor_parallel_size without PAT"
        )


def check_gates(path: str, runner: MoERunner) -> None:
    """Check that vLLM keeps no copy of a layer's gates.

    Raises:
        ValueError: it does.
    """
    if runner.gate is not None and runner.shared_expert_gate is not None:
        raise ValueError(
            f"{path}: vLLM joins the gates of this model's routed and shared experts in a copy, "
            "which new weights do not reach. Use a static tensor_parallel_size without PAT."
        )


def what_slows(models: Iterable[tuple[str, nn.Module]]) -> Iterator[str]:
    """Say why experts may run slower than in stock vLLM or with tuned kernels; on CPU, nothing.

    Args:
        models: the name and the model of each layout.
    """
    from vllm.model_executor.layers.fused_moe.fused_moe import get_moe_configs

    # The layers of a model are alike: one of each layout tells.
    one_of_each = [
        (name, module)
        for name, model in models
        for module in [next((m for m in model.modules() if isinstance(m, RoutedExperts)), None)]
        if module is not None
    ]
    if not all(_run_by_triton(experts) for _, experts in one_of_each):
        return
    others: dict[str, list[str]] = {}
    untuned = []
    for name, experts in one_of_each:
        stock = backend_of_stock(experts)
        if stock.name != "TRITON":
            others.setdefault(stock.value, []).append(name)
        layer: Any = experts  # vLLM's class does not declare its weights
        count, _, width = layer.w2_weight.shape
        if get_moe_configs(count, width, *_tuned_for(experts.quant_method)) is None:
            untuned.append(f"{name} (E={count}, N={width})")
    for backend, names in others.items():
        yield (
            f"PAT runs experts with Triton, where vLLM alone would choose {backend} in "
            f"{', '.join(names)}, which lays them out in a way that layouts cannot share; what "
            "that costs is unknown"
        )
    if untuned:
        yield (
            "vLLM has no tuned Triton kernel on this device for the experts of the layouts "
            f"{', '.join(untuned)}; they run with its defaults. Its "
            "benchmarks/kernels/benchmark_moe.py tunes them, for VLLM_TUNED_CONFIG_FOLDER"
        )


def _run_by_triton(experts: RoutedExperts) -> bool:
    method: Any = experts.quant_method
    backend = getattr(method, "unquantized_backend", getattr(method, "fp8_backend", None))
    return backend is not None and backend.name == "TRITON"


def _tuned_for(method: Any) -> tuple[Any, ...]:
    """The dtype, and rows and columns of blocks, by which vLLM names tuned kernels."""
    if isinstance(method, UnquantizedFusedMoEMethod):
        return (None,)
    return "fp8_w8a8", *(block_of_scales(method) or ())


def block_of_scales(method: Any) -> Sequence[int] | None:
    """Rows and columns that share a scale, of experts in fp8 with scales for blocks."""
    return getattr(method, "moe_block_shape", None) or getattr(method, "weight_block_size", None)


def backend_of_stock(experts: RoutedExperts) -> Any:
    """The first of vLLM's backends for this platform that supports a layer; without one, Triton.

    Returns:
        An `UnquantizedMoeBackend` or an `Fp8MoeBackend`.
    """
    config, method, form = experts.moe_config, experts.quant_method, _FORM
    if isinstance(method, UnquantizedFusedMoEMethod):
        for backend in _get_priority_backends(config):
            for kernel in backend_to_kernel_cls(backend):
                if kernel.is_supported_config(kernel, config, None, None, form)[0]:
                    return backend
        return UnquantizedMoeBackend.TRITON
    keys, more = _keys_of(method)
    for backend in fp8._get_priority_backends(config, *keys):
        if backend is fp8.Fp8MoeBackend.VLLM_CUTLASS and not more:
            continue
        for kernel in fp8.backend_to_kernel_cls(backend):
            if kernel.is_supported_config(kernel, config, *keys, form)[0]:
                return backend
    return fp8.Fp8MoeBackend.TRITON


_FORM = FusedMoEActivationFormat.Standard


def _keys_of(method: Any) -> tuple[tuple[QuantKey, QuantKey], bool]:
    """By which vLLM chooses kernels for experts in fp8, and whether its CUTLASS is among them."""
    if block := block_of_scales(method):
        key = create_fp8_quant_key(static=True, group_shape=GroupShape(*block))
        return (key, kFp8Dynamic128Sym), False
    if getattr(method, "per_out_ch_quant", False) or "channel" in _strategy(method):
        return (kFp8StaticChannelSym, kFp8DynamicTokenSym), True
    return (kFp8StaticTensorSym, kFp8DynamicTensorSym), bool(_strategy(method))


def _strategy(method: Any) -> str:
    """That of compressed-tensors; "": it is another's method."""
    return str(getattr(getattr(method, "weight_quant", None), "strategy", "")).lower()


def _reasons(experts: RoutedExperts) -> Iterator[str]:
    """Why layouts cannot share them, and what to set."""
    config, method = experts.moe_config, experts.quant_method
    if not isinstance(method, UnquantizedFusedMoEMethod):
        yield f"are quantized with {type(method).__name__}: use an unquantized checkpoint"
        return
    backend = method.unquantized_backend
    if backend not in _BACKENDS:
        yield f"are laid out for {backend.value}: set moe_backend='triton'"
    if backend is UnquantizedMoeBackend.CPU and method.moe_kernel is not None:
        # What vLLM packs has the shape and the loader of what it was.
        yield "vLLM has packed for its CPU kernels: use a GPU"
    if (config.has_bias and not isinstance(experts, GptOssRoutedExperts)) or (
        not config.is_act_and_mul
    ):
        yield "have biases or no gate: use another model"
    yield from why_not_shared(experts)


def why_not_shared(experts: RoutedExperts) -> Iterator[str]:
    """Why layouts cannot share a layer's experts, whatever their form, and what to set."""
    config = experts.moe_config
    parallel, manager = config.moe_parallel_config, experts.expert_map_manager
    if parallel.enable_eplb or config.num_experts != config.num_logical_experts:
        yield "are moved between ranks for their load: set enable_eplb=False"
    if manager.placement_strategy != "linear":
        yield "do not lie in order: set expert_placement_strategy='linear'"
    if parallel.use_all2all_kernels or parallel.dp_size > 1 or parallel.is_sequence_parallel:
        yield "are sent tokens by other groups: set data_parallel_size=1"
    if manager.num_fused_shared_experts:
        yield "have shared ones among them: set VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS=0"
    if (
        config.hidden_dim != config.hidden_dim_unpadded
        or config.intermediate_size_per_partition != config.intermediate_size_per_partition_unpadded
        or config.tp_shard_with_padding
    ):
        yield "are padded for their kernels: set moe_backend='triton'"
