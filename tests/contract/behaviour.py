"""What vLLM does that we rely on: pieces of its source, and what it asks objects of ours for."""

from __future__ import annotations

from dataclasses import dataclass

from tests.contract.names import LINEAR, RING, WORKERS


@dataclass(frozen=True)
class Text:
    """Something that vLLM does, as a pattern in its source without comments (`ast.unparse`)."""

    owner: str
    by: str
    pattern: str
    why: str


@dataclass(frozen=True)
class Replaced:
    """An object of ours that vLLM's code uses in the place of its own.

    Attributes:
        users: vLLM's classes whose code does.
        expression: what the object is called there.
        ours: our class, dotted; it and its bases have to have whatever is asked for.
    """

    users: tuple[str, ...]
    expression: str
    ours: str


TEXTS = (
    Text(
        "vllm.v1.worker.utils.allocate_kv_cache",
        "kv_transfer.kv_buffer",
        r"torch\.zeros\(\w+, dtype=torch\.int8, device=\w+\)",
        "the one allocation that the shared buffer answers",
    ),
    Text(
        f"{WORKERS[0]}.initialize_from_config",
        "worker.worker",
        r"_maybe_get_memory_pool_context\(tag='kv_cache'\)",
        "the context around it",
    ),
    Text(
        f"{WORKERS[0]}.load_model",
        "worker.gpu_worker",
        r"_maybe_get_memory_pool_context\(tag='weights'\)",
        "the pool in which sleep mode finds weights",
    ),
    Text(
        f"{WORKERS[0]}._maybe_get_memory_pool_context",
        "worker.gpu_worker",
        r"get_mem_allocator_instance\(\)(?s:.*)assert allocator\.get_current_usage\(\) == 0",
        "vLLM wants the weights' pool empty, and the base layout's weights are in it",
    ),
    Text(
        "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator.__init__",
        "scheduler.block_pools",
        r"self\.block_pool = BlockPool\(\s*num_gpu_blocks=[^()]*,\s*enable_caching=[^()]*,\s*"
        r"hash_block_size=[^()]*,\s*enable_kv_cache_events=[^()]*,\s*metrics_collector=[^()]*\)",
        "a scheduler's block pool is made here, from these",
    ),
    Text(
        f"{WORKERS[0]}.sleep",
        "worker.gpu_worker",
        r"(?s)if level == 2:.*model = self\.model_runner\.model\b.*model\.named_buffers\(\)",
        "a level-2 sleep keeps the buffers of one model",
    ),
    Text(
        f"{WORKERS[0]}._make_model_runner",
        "worker.gpu_worker",
        r"self\.vllm_config\b",
        "the runner is made for the config that the worker holds",
    ),
    Text(
        "vllm.model_executor.model_loader.base_loader.BaseModelLoader.load_model",
        "weights.loaders",
        r"(?s)self\.load_weights\(model, model_config\).*\n\s+process_weights_after_loading\(",
        "weights are still plain when the loader has read them",
    ),
    Text(
        "vllm.v1.executor.multiproc_executor.WorkerProc._execute_worker_rpc",
        "executor.executor",
        r"(?s)method, args, kwargs, output_rank = rpc_request.*"
        r"output_rank is None or self\.rank == output_rank",
        "an order to serve a lane is never answered",
    ),
    Text(
        f"{RING}.MessageQueue",
        "executor.lanes",
        r"(?s)read_flag = metadata_buffer\[self\.local_reader_rank \+ 1\]\s+"
        r"written_flag = metadata_buffer\[0\]",
        "whether a reply waits is read from the ring's flags",
    ),
    Text(
        "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator.__init__",
        "worker.runtime",
        r"unique_name\.startswith\('tp'\)",
        "the groups that get shared-memory collectives are known by name",
    ),
    Text(
        "vllm.distributed.parallel_state.get_tp_group",
        "worker.runtime",
        r"return _TP\b",
        "layers look their group up at each call",
    ),
    Text(
        "vllm.distributed.parallel_state.get_etp_group",
        "worker.runtime",
        r"return _ETP\b",
        "same",
    ),
    Text(
        "vllm.v1.engine.core.EngineCore.step",
        "executor.executor",
        r"(?s)execute_model\(scheduler_output, non_block=True\).*model_output = future\.result\(\)"
        r"\s+if model_output is None:\s+model_output = self\.model_executor\.sample_tokens\(",
        "None from `execute_model` asks for `sample_tokens`",
    ),
    Text(
        "vllm.v1.engine.core.EngineCore.step_with_batch_queue",
        "executor.messages",
        r"model_executed = scheduler_output\.total_num_scheduled_tokens > 0",
        "no tokens: nothing to wait for",
    ),
    Text(
        "vllm.v1.executor.multiproc_executor.WorkerProc.make_worker_process",
        "executor.orphan",
        r"name=f'VllmWorker-\{rank\}'",
        "how a worker knows that it has a process of its own",
    ),
    Text(
        "vllm.v1.engine.utils.CoreEngineProcManager.__init__",
        "executor.orphan",
        r"'EngineCore'",
        "how an engine core knows that it has a process of its own",
    ),
    Text(
        "vllm.config.vllm.VllmConfig",
        "plugin",
        r"Executor\.get_class\(self\)",
        "the patched method sees every config in the front end",
    ),
    Text(
        f"{LINEAR}.UnquantizedLinearMethod.process_weights_after_loading",
        "weights.inplace",
        r"'_cpu_skip_gemm_dispatch'",
        "CPU linear layers with this keep plain weights",
    ),
    Text(
        "vllm.model_executor.layers.utils.cpu_unquantized_gemm",
        "weights.inplace",
        r"layer\.cpu_linear\(",
        "what an embedding multiplies with on CPU",
    ),
)

REPLACED = (
    Replaced(
        ("vllm.v1.engine.core.EngineCore", "vllm.v1.engine.core.EngineCoreProc"),
        "self.scheduler",
        "pat_vllm.scheduler.scheduler.PATScheduler",
    ),
    Replaced(
        ("vllm.v1.engine.core.EngineCore", "vllm.v1.engine.core.EngineCoreProc"),
        "self.model_executor",
        "pat_vllm.executor.executor.PATExecutor",
    ),
)
