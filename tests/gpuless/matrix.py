"""What vLLM and PAT decide on the platforms of GPUs. A program; see `programs.py`.

KV caches: from their specs to every layout's views, by attention backend, model runner and model.
vLLM's own code chooses the backend and says what the KV cache is, how large its blocks are and how
they lie; PAT's worker does the rest. Tensors are on the meta device.

Compile ranges: those of each layout, and of stock vLLM at its tp.

Autotuning: the key by which FlashInfer's results of each layout are kept, for which vLLM copies the
layout's config, and whether that is as it was.

Mixtures: what PAT says of the kernels of two layouts' experts, for one of which there is a table.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import replace as changed
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

from tests.gpuless.programs import answer, in_child
from tests.gpuless.replaced import replace

AUTOTUNING = "autotuning"
COMPILE_RANGES = "compile ranges"
KV_IN_8_BITS = "KV in 8 bits"
MIXTURE = "mixture"
MODELS = {
    "gqa": (32, 8, 16),
    "replicated": (32, 4, 16),
    "mha": (32, 32, 16),
    "large blocks": (32, 8, 128),
    "defaults": (32, 8, None),
}
"""Attention heads, KV heads, and tokens in a block if a user has chosen; engines have 8 ranks."""

CUDA = ("default", "FLASH_ATTN", "FLASHINFER", "TRITON_ATTN", "FLEX_ATTENTION", "B12X")
SHUFFLED = "ROCM_AITER_FA, shuffled"
ROCM = (
    "default",
    "TRITON_ATTN",
    "ROCM_ATTN",
    "ROCM_SEGMENTED_ATTN",
    "ROCM_AITER_FA",
    SHUFFLED,
    "ROCM_AITER_UNIFIED_ATTN",
)
IN_8_BITS = ("fp8", "fp8_e5m2")
"""Values of `kv_cache_dtype`."""
RUNNERS = ("v1", "v2")
GIVEN_ENDS: tuple[list[int] | None, ...] = (None, [100, 1000], [256, 4096])
"""Ends of compile ranges that a user has given; some are vLLM's at another tp."""
TUNED = ("sm90", "sm100")
"""Platforms on which vLLM tunes FlashInfer's kernels at start."""
POLICIES: dict[str, dict[str, Any]] = {
    "predictor": {},
    "static": {"policy": {"kind": "static", "tp": 8}},
    "schedule": {"policy": {"kind": "schedule", "switch_at": {"4": 8}}},
}
NUM_LAYERS = 3
KV_BYTES = 1 << 30


Add = Callable[..., None]
"""Adds an answer: what it is about, and more fields."""


def main(out: str, *platforms: str) -> None:
    """Answer what is decided on each platform."""
    import pat_vllm.worker.gpu_worker  # noqa: F401  # once for all platforms

    for platform in platforms:
        in_child(platform, partial(_decide, platform, out))


def _decide(platform: str, out: str) -> None:
    from tests.gpuless.platforms import PLATFORMS, become

    def add(what: str, **fields: Any) -> None:
        answer(out, platform, {"what": what, "platform": platform} | fields)

    become(platform)
    if platform in PLATFORMS:
        add(MIXTURE, **_mixture())
        _ranges(add)
        if platform in TUNED:
            _keys_of_tuning(add)
        _cases(add, ROCM if platform == "rocm" else CUDA, RUNNERS, MODELS)
        _cases(add, _others(platform), ["v2"], ["gqa"])
    else:
        _cases(add, ["default"], ["v2"], ["gqa", "defaults"])
    for backend, dtype in itertools.product(("default", "TRITON_ATTN"), IN_8_BITS):
        case = {"backend": backend, "model": "gqa", "kv_cache_dtype": dtype}
        add(KV_IN_8_BITS, **case, **_outcome(backend, "v2", "gqa", kv_cache_dtype=dtype))


def _others(platform: str) -> list[str]:
    """The rest of this vLLM's backends, most of which are for another kind of KV cache."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    foreign = ("CPU_", "XPU_") if platform == "rocm" else ("CPU_", "XPU_", "ROCM_")
    return [
        backend.name
        for backend in AttentionBackendEnum
        if backend.name not in (*CUDA, *ROCM, "NO_ATTENTION")
        and not backend.name.startswith(foreign)
        and backend.value
        # Of models that PAT refuses.
        and "MLA" not in backend.name
        and not backend.value.startswith("vllm.models.")
    ]


def _ranges(add: Add) -> None:
    for given in GIVEN_ENDS:
        for tp, (of_layout, of_stock) in _compile_ranges(given).items():
            fields = {"given": given, "tp": tp, "of_layout": of_layout, "of_stock": of_stock}
            add(COMPILE_RANGES, **fields)


def _mixture() -> dict[str, Any]:
    import torch
    import vllm.envs as envs
    from torch import nn
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import (
        FusedMoEConfig,
        FusedMoEParallelConfig,
        RoutingMethodType,
    )
    from vllm.model_executor.layers.fused_moe.fused_moe import get_config_file_name
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
    from vllm.model_executor.layers.fused_moe.routed_experts import RoutedExperts
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import (
        UnquantizedFusedMoEMethod,
    )

    from pat_vllm.weights.experts import backend_of_stock, what_slows

    config = FusedMoEConfig(
        num_experts=128,
        experts_per_token=8,
        hidden_dim=2048,
        intermediate_size=768,
        num_local_experts=128,
        num_logical_experts=128,
        activation=MoEActivation.SILU,
        device="cuda",
        routing_method=RoutingMethodType.Renormalize,
        moe_parallel_config=FusedMoEParallelConfig.make_no_parallel(),
        in_dtype=torch.bfloat16,
    )

    def model(count: int, width: int) -> nn.Module:
        experts: Any = RoutedExperts.__new__(RoutedExperts)
        nn.Module.__init__(experts)
        method = UnquantizedFusedMoEMethod.__new__(UnquantizedFusedMoEMethod)
        vars(method)["unquantized_backend"] = UnquantizedMoeBackend.TRITON
        vars(experts).update(moe_config=config, quant_method=method)
        experts.w2_weight = nn.Parameter(torch.empty(count, 2048, width, device="meta"))
        return nn.ModuleList([experts])

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, VLLM_TUNED_CONFIG_FOLDER=folder),
    ):
        assert folder == envs.VLLM_TUNED_CONFIG_FOLDER
        (Path(folder) / get_config_file_name(128, 96, None)).write_text("{}")
        models = {"tp8": model(128, 96), "tp2dp4": model(64, 768)}
        lines = list(what_slows(models.items()))
    quantized = {}
    for block in (None, [128, 128]):
        experts: Any = model(128, 768)[0]
        experts.quant_method = SimpleNamespace(
            fp8_backend=Fp8MoeBackend.TRITON, weight_block_size=block, per_out_ch_quant=False
        )
        spread = changed(config.moe_parallel_config, use_ep=True, ep_size=4)
        for name, parallel in (("cut", config.moe_parallel_config), ("spread", spread)):
            experts.moe_config = changed(config, moe_parallel_config=parallel)
            quantized[f"{name} {block}"] = backend_of_stock(experts).value
    return {"stock": backend_of_stock(models["tp8"][0]).value, "lines": lines, "fp8": quantized}


def _keys_of_tuning(add: Add) -> None:
    """For each policy, choice of layouts, kind of experts, and with drafts or without."""
    from tests.gpuless.start import engine_config as engine_of

    ngram = {"method": "ngram_gpu", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
    kinds: list[tuple[str, dict[str, Any]]] = [("Qwen3-8B", {})]
    kinds += [("Qwen3-30B-A3B", {"experts": kind}) for kind in ("auto", "tp", "ep")]
    for (model, experts), policy in itertools.product(kinds, POLICIES):
        for layouts, drafts in itertools.product(({}, {"layouts": [1, 8]}), (None, ngram)):
            pat = POLICIES[policy] | layouts | experts
            fields = {"model": model, "policy": policy, "pat": pat, "drafts": bool(drafts)}
            options = {"additional_config": {"pat": pat}, "speculative_config": drafts}
            try:
                add(AUTOTUNING, **fields, keys=_keys_of(engine_of(model, **options)))
            except Exception as error:
                add(AUTOTUNING, **fields, failed=f"{type(error).__name__}: {error}")


def _keys_of(engine: Any) -> dict[str, tuple[str, bool]]:
    """By layout, vLLM's key, and whether its config is what it was before."""
    from vllm.model_executor.warmup.flashinfer_autotune_cache import flashinfer_autotune_cache_hash

    from pat_vllm.start.setup import Setup
    from pat_vllm.worker.layout_config import layout_config

    keys = {}
    for layout in Setup.of(engine).layouts:
        config = layout_config(engine, Setup.of(engine), layout)
        config.cache_config.kv_cache_layout = "LBNHC"
        before = repr(config)
        key = flashinfer_autotune_cache_hash(SimpleNamespace(vllm_config=config))  # type: ignore[arg-type]
        # vLLM adds its own ends of compile ranges once more, stock's configs have them, too.
        compilation = config.compilation_config
        compilation.compile_ranges_endpoints = sorted(set(compilation.compile_ranges_endpoints))
        keys[str(layout)] = key, repr(config) == before
    return keys


def _cases(
    add: Add, backends: Iterable[str], runners: Iterable[str], models: Iterable[str]
) -> None:
    from vllm._aiter_ops import rocm_aiter_ops as ops

    for backend in backends:
        shuffled = mock.Mock(return_value=backend == SHUFFLED)
        for runner in runners:
            for model in models:
                case: dict[str, Any] = {"backend": backend, "runner": runner, "model": model}
                with replace(ops, "is_shuffle_kv_cache_enabled", shuffled, mock.patch.object):
                    case |= _outcome(backend, runner, model)
                add("case", **case)


def _outcome(backend: str, runner: str, model: str, **options: Any) -> dict[str, Any]:
    refused_by = "front end"
    try:
        engine = engine_config(backend, runner, model, **options)
        refused_by = "worker"
        return _serve(engine, runner)
    except ValueError as error:
        return {"refused": str(error), "refused_by": refused_by}
    except Exception as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def _serve(engine: Any, runner: str) -> dict[str, Any]:
    """Which backend serves an engine, and what each layout sees of its KV cache, by tp."""
    from vllm.config import set_current_vllm_config
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout
    from vllm.v1.worker.gpu_worker import Worker

    from pat_vllm.kv_transfer.kv_buffer import SharedKVBuffer
    from pat_vllm.start.setup import Setup
    from pat_vllm.worker.gpu_worker import PATGPUWorker
    from pat_vllm.worker.layout_config import layout_config
    from pat_vllm.worker.runtime import LayoutRuntime
    from tests.gpuless.planning import plan_kv_cache, tell_kv_cache_layout

    worker: Any = PATGPUWorker.__new__(PATGPUWorker)
    worker._buffer = SharedKVBuffer()
    worker._state_transfer = SimpleNamespace(watch=lambda runner: None)
    worker._runtimes = {}
    for layout in Setup.of(engine).layouts:
        config = layout_config(engine, Setup.of(engine), layout)
        with set_current_vllm_config(config):
            context = {f"layers.{i}.attn": _Attention(config) for i in range(NUM_LAYERS)}
        config.compilation_config.static_forward_context = context
        current_platform.update_block_size_for_backend(config)
        group: Any = None
        layout_runtime = LayoutRuntime(layout, config, group, _runner(runner, config))
        worker._runtimes[layout] = layout_runtime
    worker._base = next(iter(worker._runtimes.values()))

    def activate(runtime: LayoutRuntime) -> None:
        worker._active, worker.model_runner = runtime, runtime.runner
        worker.vllm_config = runtime.config

    worker._activate = activate
    activate(worker._base)

    # vLLM's engine core, which has no current config...
    specs = worker.get_kv_cache_spec()
    names = worker.get_supported_kv_cache_layouts()
    layout = resolve_kv_cache_layout(engine, [names], list(specs.values()))
    tell_kv_cache_layout(worker, engine, layout.name)
    kv_cache_config = plan_kv_cache(engine, specs, KV_BYTES)
    assert kv_cache_config.kv_cache_layout == layout.name
    # ... and its worker process, which has the engine's.
    with (
        set_current_vllm_config(engine),
        replace(Worker, "initialize_from_config", _initialize_from_config, mock.patch.object),
        replace(Worker, "_maybe_get_memory_pool_context", mock.MagicMock(), mock.patch.object),
    ):
        worker.initialize_from_config(kv_cache_config)
    chosen = worker._base.config.compilation_config.static_forward_context["layers.0.attn"]
    return {
        "served_by": chosen.attn_backend.__name__,
        "kv_layout": layout.name,
        "views": {
            runtime.layout.tp: [tuple(v.shape[:2]) for v in runtime.connector.kv_caches.values()]
            for runtime in worker._runtimes.values()
        },
        "kernel_blocks": worker.kernel_blocks,
    }


def _compile_ranges(given: list[int] | None) -> dict[int, tuple[Any, Any]]:
    """Of each layout, and of stock vLLM at its tp: compile ranges, and whether norms are fused."""
    from pat_vllm.start.setup import Setup
    from pat_vllm.worker.layout_config import layout_config

    options = {"max_num_batched_tokens": 16384, "compilation_config": {}}
    if given is not None:
        options["compilation_config"] = {"compile_ranges_endpoints": given}

    def decided(config: Any) -> Any:
        compilation = config.compilation_config
        ranges = [(span.start, span.end) for span in compilation.get_compile_ranges()]
        return [ranges, bool(compilation.pass_config.fuse_allreduce_rms)]

    engine = engine_config("default", "v2", "gqa", **options)
    of_engine, by_tp = decided(engine), {}
    for layout in Setup.of(engine).layouts:
        stock = {"tensor_parallel_size": layout.tp, "distributed_executor_backend": "mp"}
        static = engine_config("default", "v2", "gqa", **options, **stock)
        by_tp[layout.tp] = decided(layout_config(engine, Setup.of(engine), layout)), decided(static)
    assert decided(engine) == of_engine, "a layout's ranges are no other's"
    return by_tp


def engine_config(backend: str, runner: str, model: str, **options: Any) -> Any:
    """Of an engine with 8 ranks, or those of the options."""
    from vllm.engine.arg_utils import EngineArgs

    heads, kv_heads, block_size = MODELS[model]
    described = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": NUM_LAYERS,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": 128,
        "vocab_size": 32000,
        "max_position_embeddings": 8192,
    }
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if runner == "v2" else "0"
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "config.json").write_text(json.dumps(described))
        ranks = options.get("tensor_parallel_size", 8)
        layouts = [tp for tp in (1, 2, 4, 8) if tp <= ranks]
        defaults: dict[str, Any] = {
            "additional_config": {"pat": {"layouts": layouts}},
            "model": directory,
            "skip_tokenizer_init": True,
            "dtype": "bfloat16",
            "tensor_parallel_size": 8,
            "distributed_executor_backend": "pat",
            "attention_backend": None if backend == "default" else backend.split(",")[0],
        }
        if block_size is not None:
            defaults["block_size"] = block_size
        return EngineArgs(**(defaults | options)).create_engine_config()


def _runner(kind: str, config: Any) -> Any:
    """Says of the KV cache what one of vLLM's model runners says."""
    if kind == "v2":
        from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

        return SimpleNamespace(get_kv_cache_spec=lambda: get_kv_cache_spec(config))
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    runner: Any = SimpleNamespace(vllm_config=config, shared_kv_cache_layers={})
    runner.get_kv_cache_spec = lambda: GPUModelRunner.get_kv_cache_spec(runner)
    return runner


def _Attention(config: Any) -> Any:
    """vLLM's attention layer, without the kernels that its constructor asks for."""
    from vllm.model_executor.layers.attention import Attention
    from vllm.utils.torch_utils import kv_cache_dtype_str_to_dtype
    from vllm.v1.attention.backend import AttentionType
    from vllm.v1.attention.selector import get_attn_backend

    model, parallel = config.model_config, config.parallel_config
    dtype = config.cache_config.cache_dtype
    layer: Any = Attention.__new__(Attention)
    vars(layer).update(
        attn_backend=get_attn_backend(model.get_head_size(), model.dtype, dtype),
        attn_type=AttentionType.DECODER,
        kv_cache_dtype=dtype,
        kv_cache_torch_dtype=kv_cache_dtype_str_to_dtype(dtype, model),
        kv_sharing_target_layer_name=None,
        sliding_window=None,
        num_kv_heads=model.get_num_kv_heads(parallel),
        head_size=model.get_head_size(),
        head_size_v=model.get_head_size(),
    )
    return layer


def _initialize_from_config(worker: Any, kv_cache_config: Any) -> None:
    """What vLLM's worker and its model runner do, as far as the KV cache goes."""
    from vllm.v1.worker.utils import allocate_kv_cache, prepare_kernel_block_sizes

    context = worker.vllm_config.compilation_config.static_forward_context
    groups = [
        [
            SimpleNamespace(
                backend=context[group.layer_names[0]].attn_backend,
                kv_cache_spec=group.kv_cache_spec,
            )
        ]
        for group in kv_cache_config.kv_cache_groups
    ]
    sizes = prepare_kernel_block_sizes(kv_cache_config, groups)
    worker.kernel_blocks = sizes
    with worker._maybe_get_memory_pool_context("kv_cache"):
        layout = worker.vllm_config.cache_config.get_resolved_kv_cache_layout()
        allocate_kv_cache(kv_cache_config, "meta", layout, sizes)


if __name__ == "__main__":
    main(*sys.argv[1:])
