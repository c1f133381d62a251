"""What we rely on of vLLM that our source does not tell by itself: what vLLM's objects have.

Names that we import, what we call on them, and what our subclasses override is found in the source
(`own.py`). Here is the rest, by vLLM's classes. A test fails when a line here is not used any more,
and when one of our modules asks an object for a name that is neither ours nor listed here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Names:
    """Attributes, methods or fields of one of vLLM's classes, or parameters of its constructor.

    Attributes:
        owner: dotted.
        by: our modules that use them, below `pat_vllm`, unless they begin with another package.
        names: separated by blanks.
        used: "asked" of an object, where calls are checked, too; "passed" as arguments of a call
            of the class, in a mapping; "spelled" in strings that vLLM looks up.
    """

    owner: str
    by: str
    names: str
    used: Literal["asked", "passed", "spelled"] = "asked"


CONFIG = "vllm.config"
SCHED = "vllm.v1.core.sched"
KV = "vllm.v1.kv_cache_interface"
RING = "vllm.distributed.device_communicators.shm_broadcast"
LINEAR = "vllm.model_executor.layers.linear"
VOCAB = "vllm.model_executor.layers.vocab_parallel_embedding"
RUNNER_V1 = "vllm.v1.worker.gpu_model_runner.GPUModelRunner"
RUNNER_V2 = "vllm.v1.worker.gpu.model_runner.GPUModelRunner"
WORKERS = ("vllm.v1.worker.gpu_worker.Worker", "vllm.v1.worker.cpu_worker.CPUWorker")

NAMES = (
    # ---------------------------------------------------------------- configuration
    Names(
        f"{CONFIG}.VllmConfig",
        "support plugin executor.launcher scheduler.scheduler scheduler.replica executor.executor "
        "worker.runtime profiling.runner profiling.key profiling.engine_profile "
        "worker.layout_config worker.warmup worker.worker worker.cpu_worker "
        "worker.gpu_worker",
        "additional_config cache_config compilation_config ec_transfer_config instance_id "
        "kernel_config kv_events_config kv_transfer_config load_config lora_config model_config "
        "parallel_config scheduler_config speculative_config use_v2_model_runner",
    ),
    Names(
        f"{CONFIG}.ParallelConfig",
        "support plugin executor.launcher worker.layout_config profiling.key executor.ray",
        "data_parallel_index data_parallel_size decode_context_parallel_size "
        "distributed_executor_backend "
        "enable_expert_parallel nnodes numa_bind pipeline_parallel_size placement_group "
        "prefill_context_parallel_size rank ray_runtime_env tensor_parallel_size worker_cls "
        "world_size",
    ),
    Names(
        f"{CONFIG}.ModelConfig",
        "support scheduler.scheduler scheduler.replica worker.worker worker.gpu_worker "
        "profiling.runner profiling.key profiling.engine_profile worker.warmup "
        "weights.loaders",
        "disable_sliding_window dtype enable_cumem_allocator enforce_eager get_sliding_window "
        "get_total_num_kv_heads has_inner_state hf_text_config is_attention_free "
        "is_encoder_decoder is_hybrid is_moe is_multimodal_model max_model_len model "
        "model_arch_config quantization runner_type seed use_mla "
        "word_embeddings_untied_by_checkpoint",
    ),
    Names(
        "vllm.transformers_utils.model_arch_config_convertor.ModelArchitectureConfig",
        "support",
        "total_num_attention_heads",
    ),
    Names(
        f"{CONFIG}.CacheConfig",
        "support scheduler.replica worker.runtime profiling.key worker.gpu_worker",
        "block_size cache_dtype get_resolved_kv_cache_layout kv_cache_memory_bytes "
        "kv_offloading_size num_gpu_blocks",
    ),
    Names(
        f"{CONFIG}.SchedulerConfig",
        "support scheduler.scheduler scheduler.replica profiling.runner profiling.key "
        "worker.warmup",
        "async_scheduling get_scheduler_cls max_num_batched_tokens max_num_seqs scheduler_cls",
    ),
    Names(
        f"{CONFIG}.CompilationConfig",
        "worker.layout_config profiling.key",
        "cudagraph_capture_sizes cudagraph_mode max_cudagraph_capture_size static_forward_context",
    ),
    Names("vllm.config.kernel.KernelConfig", "worker.worker", "linear_backend"),
    Names(f"{CONFIG}.LoadConfig", "weights.loaders", "load_format model_loader_extra_config"),
    Names(f"{CONFIG}.KVEventsConfig", "support", "enable_kv_cache_events"),
    # ---------------------------------------------------------------- requests
    Names(
        "vllm.v1.request.Request",
        "scheduler.scheduler scheduler.switch scheduler.requests scheduler.replica "
        "kv_transfer.connector",
        "block_hashes events get_skip_reading_prefix_cache max_tokens "
        "next_decode_eligible_step num_computed_tokens num_output_tokens num_preemptions "
        "num_prompt_tokens num_tokens prompt_token_ids request_id resumable sampling_params "
        "skip_reading_prefix_cache spec_token_ids status",
    ),
    Names(
        "vllm.sampling_params.SamplingParams",
        "scheduler.switch scheduler.requests",
        "ignore_eos prompt_logprob_token_ids prompt_logprobs stop stop_token_ids",
    ),
    # ---------------------------------------------------------------- scheduler
    Names(
        f"{SCHED}.scheduler.Scheduler",
        "scheduler.scheduler scheduler.replica scheduler.switch scheduler.requests scheduler.stats "
        "scheduler.block_pools scheduler.admission profiling.runner",
        "_inflight_prefill_reserved_blocks _inflight_prefills _request_remaining_blocks "
        "_set_kv_fetch_stage add_request connector defer_block_free deferred_waiting "
        "finish_requests finished_recving_kv_req_ids get_grammar_bitmask get_kv_cache_usage "
        "get_num_unfinished_requests get_request_counts has_finished_requests has_requests "
        "kv_cache_manager kv_holding_waiting make_stats requests reset_encoder_cache "
        "reset_prefix_cache running schedule set_pause_state shutdown update_from_output "
        "use_v2_model_runner waiting",
    ),
    Names(
        f"{SCHED}.scheduler.Scheduler",
        "scheduler.replica scheduler.scheduler",
        "block_size hash_block_size include_finished_set kv_cache_config log_stats mm_registry "
        "structured_output_manager vllm_config",
        used="passed",
    ),
    Names(
        "vllm.v1.core.block_pool.BlockPool",
        "scheduler.block_pools scheduler.admission",
        "enable_caching enable_kv_cache_events free_block_queue hash_block_size metrics_collector "
        "num_gpu_blocks reset_prefix_cache",
    ),
    Names(
        "vllm.v1.core.kv_cache_utils.FreeKVCacheBlockQueue",
        "scheduler.block_pools",
        "append_n num_free_blocks popleft_n",
    ),
    Names("vllm.v1.core.kv_cache_utils.KVCacheBlock", "scheduler.block_pools", "block_id"),
    Names(
        f"{SCHED}.request_queue.RequestQueue", "scheduler.replica", "prepend_request remove_request"
    ),
    Names(
        "vllm.v1.core.kv_cache_manager.KVCacheManager",
        "scheduler.replica scheduler.switch scheduler.block_pools scheduler.admission",
        "block_pool free get_block_ids",
    ),
    Names("vllm.v1.core.kv_cache_manager.KVCacheBlocks", "kv_transfer.connector", "get_block_ids"),
    Names(
        f"{SCHED}.output.SchedulerOutput",
        "scheduler.replica scheduler.switch scheduler.requests executor.messages executor.executor "
        "worker.synthetic profiling.runner worker.handover",
        "finished_req_ids has_structured_output_requests kv_cache_block_copies "
        "kv_connector_metadata num_scheduled_tokens preempted_req_ids scheduled_cached_reqs "
        "scheduled_new_reqs total_num_scheduled_tokens",
    ),
    Names(f"{SCHED}.output.CachedRequestData", "scheduler.requests", "num_computed_tokens req_ids"),
    Names(f"{SCHED}.output.GrammarOutput", "scheduler.scheduler", "grammar_bitmask"),
    # ---------------------------------------------------------------- outputs and statistics
    Names(
        "vllm.v1.engine.EngineCoreOutputs",
        "scheduler.scheduler scheduler.stats",
        "finished_requests outputs scheduler_stats",
    ),
    Names("vllm.v1.engine.EngineCoreOutput", "scheduler.scheduler", "finish_reason request_id"),
    Names(
        "vllm.v1.metrics.stats.SchedulerStats",
        "scheduler.stats",
        "connector_prefix_cache_stats cudagraph_stats kv_cache_eviction_events kv_cache_usage "
        "num_running_reqs num_skipped_waiting_reqs num_waiting_reqs perf_stats prefix_cache_stats",
    ),
    Names(
        "vllm.v1.metrics.stats.PrefixCacheStats",
        "scheduler.stats",
        "hits hits_by_source preempted_hits preempted_queries preempted_requests queries requests "
        "reset",
    ),
    Names("vllm.v1.outputs.AsyncModelRunnerOutput", "executor.lanes worker.warmup", "get_output"),
    # ---------------------------------------------------------------- KV cache
    Names(
        f"{KV}.KVCacheConfig",
        "scheduler.replica worker.worker profiling.runner worker.layout_config "
        "kv_transfer.kv_buffer worker.warmup kv_transfer.connector",
        "kv_cache_groups kv_cache_layout kv_cache_tensors num_blocks",
    ),
    Names(
        f"{KV}.KVCacheGroupSpec",
        "worker.worker profiling.runner worker.layout_config kv_transfer.kv_buffer "
        "kv_transfer.connector",
        "kv_cache_spec layer_names",
    ),
    Names(
        f"{KV}.KVCacheTensor",
        "worker.layout_config kv_transfer.kv_buffer",
        "block_stride layer_stride layers",
    ),
    Names(
        f"{KV}.FullAttentionSpec",
        "worker.layout_config worker.worker profiling.runner kv_transfer.connector",
        "attention_chunk_size block_size num_head_slots num_kv_heads page_size_bytes "
        "page_size_padded sliding_window",
    ),
    Names(
        "vllm.distributed.kv_transfer.kv_connector.v1.base.KVConnectorBase_V1",
        "worker.worker",
        "bind_connector_metadata clear_connector_metadata",
    ),
    # ---------------------------------------------------------------- executor and workers
    Names("vllm.v1.executor.abstract.Executor", "executor.launcher", "uses_ray"),
    Names(
        "vllm.v1.executor.multiproc_executor.MultiprocExecutor",
        "executor.executor profiling.engine_profile profiling.runner",
        "failure_callback is_failed response_mqs rpc_broadcast_mq vllm_config",
    ),
    *(
        Names(
            worker,
            "executor.executor",
            "check_health discard execute_dummy_batch get_supported_tasks profile "
            "reset_encoder_cache reset_mm_cache shutdown sleep synchronize_device wake_up",
            used="spelled",
        )
        for worker in WORKERS
    ),
    *(
        Names(
            worker,
            "worker.warmup executor.lanes",
            "execute_model sample_tokens vllm_config",
        )
        for worker in WORKERS
    ),
    Names("vllm.v1.worker.worker_base.CompilationTimes", "worker.worker", "encoder language_model"),
    Names(WORKERS[0], "worker.gpu_worker", "_make_model_runner"),
    Names("vllm.device_allocator.MemAllocator", "worker.gpu_worker", "use_memory_pool"),
    Names(
        "vllm.distributed.parallel_state.GroupCoordinator",
        "worker.runtime",
        "cpu_group device_group",
    ),
    Names(
        f"{RING}.MessageQueue",
        "executor.lanes",
        "_is_local_reader _spin_condition buffer current_idx dequeue enqueue export_handle "
        "remote_socket shutdown shutting_down wait_until_ready",
    ),
    Names(f"{RING}.MessageQueue", "executor.executor", "enqueue"),
    Names(f"{RING}.ShmRingBuffer", "executor.lanes", "get_metadata"),
    Names(f"{RING}.SpinCondition", "executor.lanes", "local_notify_socket read_cancel_socket"),
    # ---------------------------------------------------------------- model runners
    *(
        Names(runner, "worker.worker worker.gpu_worker", "get_kv_cache_spec get_model model")
        for runner in (RUNNER_V1, RUNNER_V2)
    ),
    *(
        Names(runner, "worker.gpu_worker", "model_memory_usage")
        for runner in (RUNNER_V1, RUNNER_V2)
    ),
    Names(
        RUNNER_V1,
        "worker.handover",
        "device execute_model input_batch num_prompt_logprobs requests",
    ),
    Names(
        "vllm.v1.worker.gpu_input_batch.InputBatch",
        "worker.handover",
        "async_copy_ready_event prev_req_id_to_index prev_sampled_token_ids sampled_token_ids_cpu",
    ),
    Names(
        "vllm.v1.worker.gpu_input_batch.CachedRequestState",
        "worker.handover",
        "block_ids generator num_computed_tokens output_token_ids prompt_token_ids",
    ),
    Names(RUNNER_V2, "worker.handover", "execute_model req_states sampler"),
    Names("vllm.v1.worker.gpu.sample.sampler.Sampler", "worker.handover", "penalties_state"),
    Names(
        "vllm.v1.worker.gpu.sample.penalties.PenaltiesState",
        "worker.handover",
        "output_bin_counts prompt_bin_mask",
    ),
    Names("vllm.v1.worker.gpu.states.RequestState", "worker.handover", "req_id_to_index"),
    # ---------------------------------------------------------------- layers
    Names(f"{LINEAR}.LinearBase", "weights.model_weights", "quant_method tp_rank tp_size"),
    Names(f"{LINEAR}.ColumnParallelLinear", "weights.model_weights", "output_size weight_loader"),
    Names(f"{LINEAR}.MergedColumnParallelLinear", "weights.model_weights", "output_sizes"),
    Names(
        f"{LINEAR}.QKVParallelLinear",
        "weights.model_weights",
        "head_size total_num_heads total_num_kv_heads v_head_size",
    ),
    Names(f"{LINEAR}.RowParallelLinear", "weights.model_weights", "input_size weight_loader"),
    Names(
        f"{VOCAB}.VocabParallelEmbedding",
        "weights.model_weights weights.inplace",
        "num_added_embeddings org_vocab_size padding_size quant_method tp_rank tp_size "
        "weight_loader",
    ),
    # ---------------------------------------------------------------- front ends
    Names(
        "vllm.entrypoints.llm.LLM",
        "api cli.engine_run cli.profile",
        "collective_rpc generate llm_engine",
    ),
    Names(
        "vllm.v1.engine.llm_engine.LLMEngine",
        "api cli.profile",
        "engine_core",
    ),
    Names("vllm.v1.engine.core_client.SyncMPClient", "api", "_send_input"),
    Names("vllm.outputs.RequestOutput", "cli.engine_run", "outputs"),
    Names("vllm.outputs.CompletionOutput", "cli.engine_run", "token_ids"),
    Names(
        "vllm.v1.engine.async_llm.AsyncLLM",
        "api pat_verl.server pat_openrlhf.engines",
        "abort check_health collective_rpc output_processor pause_generation",
    ),
    Names("vllm.v1.engine.output_processor.OutputProcessor", "pat_verl.server", "external_req_ids"),
    Names(
        "vllm.engine.arg_utils.EngineArgs",
        "cli.profile cli.demo",
        "additional_config distributed_executor_backend dtype enforce_eager max_model_len "
        "max_num_seqs model tensor_parallel_size",
        used="passed",
    ),
)

NOT_VLLMS = frozenset(
    {
        # multiprocessing, threading, zmq, ray, pydantic, torch
        *("level", "pid", "set", "poll", "recv", "bundle_specs", "model_copy", "model_dump"),
        *("_non_persistent_buffers_set", "_parameters"),
    }
)
"""Attributes of other libraries' objects in our modules that use vLLM."""
