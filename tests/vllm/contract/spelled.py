"""What our code names where a type checker does not see it: in strings, in what others call, on
objects whose type is another library's. `checker.py` has mypy check this file with ours; it is
never run.
"""

from __future__ import annotations

from typing import Any

from vllm.config import CacheConfig, ModelConfig, MultiModalConfig, VllmConfig
from vllm.distributed.device_communicators import custom_all_reduce, flashinfer_all_reduce
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.linear import ColumnParallelLinear, LinearBase, RowParallelLinear
from vllm.model_executor.layers.mamba.gdn.qwen_gdn_linear_attn import QwenGatedDeltaNetAttention
from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2, Mixer2RMSNormGated
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.models.interfaces import SupportsEagleBase
from vllm.v1.attention.backends.mamba_attn import BaseMambaAttentionMetadataBuilder
from vllm.v1.attention.backends.registry import MambaAttentionBackendEnum
from vllm.v1.core import kv_cache_coordinator
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.core_client import SyncMPClient
from vllm.v1.executor.abstract import Executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    MambaSpec,
    MLAAttentionSpec,
    SlidingWindowSpec,
)
from vllm.v1.outputs import AsyncModelRunnerOutput
from vllm.v1.spec_decode.llm_base_proposer import SpecDecodeBaseProposer
from vllm.v1.spec_decode.ngram_proposer_gpu import NgramProposerGPU
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.cpu_worker import CPUWorker
from vllm.v1.worker.gpu import cudagraph_utils, model_runner
from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as RunnerV2
from vllm.v1.worker.gpu.spec_decode.eagle import utils as eagle_utils
from vllm.v1.worker.gpu.spec_decode.ngram.speculator import NgramGPUSpeculator
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator
from vllm.v1.worker.gpu.spec_decode.target_dependent_ar import cudagraph_utils as of_drafters
from vllm.v1.worker.gpu_model_runner import GPUModelRunner as RunnerV1
from vllm.v1.worker.gpu_worker import Worker

from pat_vllm.executor.executor import PATExecutor
from pat_vllm.executor.ray import PATRayExecutor
from pat_vllm.kv_transfer.connector import PATConnector
from pat_vllm.scheduler.scheduler import PATScheduler
from pat_vllm.weights.loaders import BaseLayoutLoader, DerivedLayoutLoader
from pat_vllm.worker.cpu_worker import PATCPUWorker
from pat_vllm.worker.gpu_worker import PATGPUWorker


def classes_that_vllm_makes() -> tuple[Any, ...]:
    """By a dotted name or from a registry. None of them may be abstract."""
    scheduler: type[SchedulerInterface] = PATScheduler
    executors: list[type[Executor]] = [PATExecutor, PATRayExecutor]
    workers: list[type[Worker]] = [PATCPUWorker, PATGPUWorker]
    stock: list[type[Worker]] = [CPUWorker, Worker]  # their names select ours
    connector: type[KVConnectorBase_V1] = PATConnector
    loaders: list[type[BaseModelLoader]] = [BaseLayoutLoader, DerivedLayoutLoader]
    return scheduler, executors, workers, stock, connector, loaders


def schedulers_of_replicas(config: VllmConfig, kv: KVCacheConfig, other: Any) -> Scheduler:
    """`ReplicaFactory` passes its keywords on."""
    return Scheduler(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=1,
        hash_block_size=1,
        mm_registry=other,
        include_finished_set=False,
        log_stats=False,
    )


def worker_methods(gpu: Worker) -> tuple[Any, ...]:
    """Named in `collective_rpc`."""
    return (
        *(gpu.check_health, gpu.discard, gpu.execute_dummy_batch, gpu.get_supported_tasks),
        *(gpu.profile, gpu.reset_encoder_cache, gpu.reset_mm_cache, gpu.shutdown, gpu.sleep),
        *(gpu.synchronize_device, gpu.wake_up),
    )


def assigned(worker: Worker, executor: MultiprocExecutor) -> tuple[Any, ...]:
    """What our subclasses assign, and vLLM's code reads."""
    return (
        *(worker.local_rank, worker.weight_transfer_engine, worker.model_runner),
        *(worker.vllm_config, worker.parallel_config, worker.cache_config),
        *(worker.compilation_config, worker.load_config, worker.available_kv_cache_memory_bytes),
        worker.scheduler_config,
        *(executor.is_failed, executor.failure_callback, executor.response_mqs),
        *(executor.supports_pp, executor.uses_ray),
    )


def in_strings(
    client: SyncMPClient, runner: RunnerV2, output: AsyncModelRunnerOutput, model: ModelConfig
) -> tuple[Any, ...]:
    """For `getattr`, `replaced` and their like."""
    return (
        *(client._send_input, runner.req_states, output.get_output),
        *(flashinfer_all_reduce._fi_ar_workspace, flashinfer_all_reduce._fi_ar_quant_workspace),
        flashinfer_all_reduce._fi_ar_workspace_failed,
        flashinfer_all_reduce._fi_ar_quant_workspace_failed,
        *(custom_all_reduce._can_p2p, kv_cache_coordinator.BlockPool),
    )


def of_text_alone(config: MultiModalConfig) -> tuple[Any, ...]:
    """What a rule names by its path."""
    return config.language_model_only, config.enable_mm_embeds


def of_runners(v1: RunnerV1, v2: RunnerV2) -> tuple[Any, ...]:
    """Told apart, and asked for what not every one has."""
    return v1.inputs_embeds, v1.attn_groups, v2.attn_groups, v1._input_fits_in_drafter


def specs_of_kinds(
    full: FullAttentionSpec,
    window: SlidingWindowSpec,
    latent: MLAAttentionSpec,
    slot: MambaSpec,
) -> tuple[Any, ...]:
    """What `kinds.py`, which imports nothing of vLLM's, reads and replaces."""
    return (
        *(full.block_size, full.num_kv_heads, full.num_head_slots, full.page_size_padded),
        *(window.block_size, window.num_kv_heads, window.num_head_slots, window.page_size_padded),
        *(window.sliding_window, window.extra_retained_tokens),
        *(latent.block_size, latent.num_head_slots, latent.page_size_padded),
        *(slot.block_size, slot.shapes, slot.dtypes, slot.page_size_bytes, slot.page_size_padded),
        *(slot.state_content_size_bytes, slot.mamba_cache_mode, slot.tp_replicated),
        *(slot.num_speculative_blocks, slot.num_prefill_checkpoint_blocks),
        *(slot.mamba_type, MambaAttentionBackendEnum.GDN_ATTN),
    )


def of_linear_attention(layer: QwenGatedDeltaNetAttention) -> tuple[Any, ...]:
    """What `patches/weights.py` and `model_weights.py` ask for, and rules name by a path."""
    return (
        *(layer._forward_method, layer.conv1d, layer.A_log, layer.dt_bias, layer.kv_cache),
        *(layer.key_dim, layer.value_dim, layer.num_v_heads, layer.tp_size, layer.tp_rank),
        *(CacheConfig.mamba_cache_mode, CacheConfig.prefix_match_unit),
        CacheConfig.user_specified_block_size,
    )


def of_mamba2(
    layer: MambaMixer2, norm: Mixer2RMSNormGated, builder: BaseMambaAttentionMetadataBuilder[Any]
) -> tuple[Any, ...]:
    """What `model_weights.py` asks for, `patches/linear_attention.py` replaces, and rules name."""
    return (
        *(layer.conv1d, layer.in_proj, layer.num_heads, layer.A, layer.D),
        *(layer.dt_bias, layer.get_kv_cache_spec, norm.full_hidden_size, norm.tp_size),
        *(builder.build_for_cudagraph_capture, builder.num_spec_tokens),
        *(norm.tp_rank, norm.weight, CacheConfig.use_replayssm, MambaAttentionBackendEnum.MAMBA2),
    )


def drafters(
    v1: NgramProposerGPU,
    v2: NgramGPUSpeculator,
    runner: RunnerV1,
    model: DraftModelSpeculator,
    proposer: SpecDecodeBaseProposer,
) -> tuple[Any, ...]:
    """What of speculation is replaced by name, or asked for."""
    return (
        *(proposer._maybe_share_embeddings, proposer._maybe_share_lm_head, proposer.model),
        *(proposer._update_positions_dependent_metadata, proposer._draft_attn_layer_names),
        *(proposer.hidden_states, proposer.inputs_embeds),
        *(model.model, model.draft_attn_layer_names, eagle_utils._should_share),
        *(SupportsEagleBase.has_own_lm_head, SupportsEagleBase.has_own_embed_tokens),
        *(of_drafters.build_dynamic_sd_schedule_lookup, model_runner.sort_batch_req_ids),
        *(v1.propose, v1.k, v2.propose, v2.drafts, runner.token_ids_gpu_tensor),
        *(cudagraph_utils.build_dynamic_sd_schedule_lookup, CudaGraphManager._init_candidates),
    )


def weight_loaders(
    linear: LinearBase,
    column: ColumnParallelLinear,
    row: RowParallelLinear,
    vocab: VocabParallelEmbedding,
) -> tuple[Any, ...]:
    """Asked for by name."""
    return (
        *(column.weight_loader, column.weight_loader_v2, row.weight_loader, row.weight_loader_v2),
        *(vocab.weight_loader, linear.disable_tp),
    )


def engine_arguments() -> EngineArgs:
    """Keywords that travel in a mapping."""
    return EngineArgs(
        model="",
        dtype="float32",
        tensor_parallel_size=1,
        distributed_executor_backend="pat",
        additional_config={},
        enforce_eager=True,
        max_model_len=1,
        max_num_seqs=1,
    )


async def of_trainers(engine: AsyncLLM) -> tuple[Any, ...]:
    """Of the engines that the trainers' classes hold, whose types are theirs."""
    await engine.abort("")
    await engine.check_health()
    await engine.pause_generation(mode="abort")
    return (await engine.collective_rpc("", args=()), engine.output_processor.external_req_ids)
