"""What vLLM does that we rely on, and no type says: patterns in its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

WORKER = "vllm.v1.worker.gpu_worker.Worker"
GRAPHS = "vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager"
CONNECTORS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
LINEAR = "vllm.model_executor.layers.linear"
RING = "vllm.distributed.device_communicators.shm_broadcast"


@dataclass(frozen=True)
class Text:
    """Something that vLLM does.

    Attributes:
        owner: the class, method or function that does it, dotted.
        pattern: is found in its source without comments (`ast.unparse`).
        why: what of ours rests on it.
    """

    owner: str
    pattern: str
    why: str


TEXTS = (
    *(
        Text(
            f"vllm.v1.engine.{engine}.__init__",
            r"StatLoggerManager\(vllm_config=vllm_config, ",
            "its loggers are made for a config that names PAT's connector (`tell_loggers`)",
        )
        for engine in ("llm_engine.LLMEngine", "async_llm.AsyncLLM")
    ),
    Text(
        f"{CONNECTORS}.KVConnectorProm.__init__",
        r"connector_cls\.build_prom_metrics\(vllm_config, metric_types, labelnames, "
        r"per_engine_labelvalues\)",
        "PAT's metrics are its connector's",
    ),
    Text(
        "vllm.v1.metrics.loggers.PrometheusStatLogger.record",
        r"self\.kv_connector_prom\.observe\(scheduler_stats\.kv_connector_stats, engine_idx\)",
        "updates of them travel as its statistics",
    ),
    Text(
        f"{CONNECTORS}.KVConnectorLogging.log",
        r"not self\.transfer_stats_accumulator\.is_empty\(\)",
        "log lines leave them out",
    ),
    Text(
        "vllm.v1.worker.utils.allocate_kv_cache",
        r"torch\.zeros\(\w+, dtype=torch\.int8, device=\w+\)",
        "the one allocation that the shared buffer answers",
    ),
    Text(
        f"{WORKER}.initialize_from_config",
        r"_maybe_get_memory_pool_context\(tag='kv_cache'\)",
        "the context around it",
    ),
    Text(
        f"{WORKER}.load_model",
        r"_maybe_get_memory_pool_context\(tag='weights'\)",
        "the pool in which sleep mode finds weights",
    ),
    Text(
        "vllm.v1.executor.multiproc_executor.WorkerProc.__init__",
        r"(?s)self\.worker\.init_device\(\)\s+self\.setup_proc_title_and_log_prefix\(.*"
        r"self\.worker\.load_model\(\)",
        "a worker's process is titled by its rank in the TP group that `init_device` leaves",
    ),
    Text(
        f"{WORKER}.shutdown",
        r"(?s)model_runner\.shutdown\(\).*CuMemAllocator\.instance\.release_pools\(\)",
        "it shuts one runner down, then gives back the pools in which all have their memory",
    ),
    Text(
        f"{WORKER}._maybe_get_memory_pool_context",
        r"get_mem_allocator_instance\(\)(?s:.*)assert allocator\.get_current_usage\(\) == 0",
        "vLLM wants the weights' pool empty, and the base layout's weights are in it",
    ),
    Text(
        "vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator.__init__",
        r"self\.block_pool = BlockPool\(\s*num_gpu_blocks=[^()]*,\s*enable_caching=[^()]*,\s*"
        r"hash_block_size=[^()]*,\s*enable_kv_cache_events=[^()]*,\s*metrics_collector=[^()]*\)",
        "a scheduler's block pool is made here, from these",
    ),
    Text(
        f"{WORKER}.sleep",
        r"(?s)if level == 2:.*model = self\.model_runner\.model\b.*model\.named_buffers\(\)",
        "a level-2 sleep keeps the buffers of one model",
    ),
    Text(
        f"{WORKER}._make_model_runner",
        r"self\.vllm_config\b",
        "the runner is made for the config that the worker holds",
    ),
    Text(
        "vllm.model_executor.model_loader.base_loader.BaseModelLoader.load_model",
        r"(?s)self\.load_weights\(model, model_config\).*\n\s+process_weights_after_loading\(",
        "weights are still plain when the loader has read them",
    ),
    Text(
        "vllm.v1.executor.multiproc_executor.WorkerProc._execute_worker_rpc",
        r"(?s)method, args, kwargs, output_rank = rpc_request.*"
        r"output_rank is None or self\.rank == output_rank",
        "an order to serve a lane is never answered",
    ),
    Text(
        f"{RING}.MessageQueue",
        r"(?s)read_flag = metadata_buffer\[self\.local_reader_rank \+ 1\]\s+"
        r"written_flag = metadata_buffer\[0\]",
        "whether a reply waits is read from the ring's flags",
    ),
    Text(
        "vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator.__init__",
        r"unique_name\.startswith\('tp'\)",
        "the groups that get shared-memory collectives are known by name",
    ),
    Text(
        "vllm.v1.spec_decode.ngram_proposer._find_longest_matched_ngram_and_propose_tokens",
        r"k = min\(k, max_model_len - total_token\)",
        "n-gram drafts end at the longest context by themselves",
    ),
    Text(
        "vllm.distributed.parallel_state.get_tp_group",
        r"return _TP\b",
        "layers look their group up at each call",
    ),
    Text(
        "vllm.distributed.parallel_state.get_etp_group",
        r"return _ETP\b",
        "same",
    ),
    Text(
        "vllm.v1.engine.core.EngineCore.step",
        r"(?s)execute_model\(scheduler_output, non_block=True\).*model_output = future\.result\(\)"
        r"\s+if model_output is None:\s+model_output = self\.model_executor\.sample_tokens\(",
        "None from `execute_model` asks for `sample_tokens`",
    ),
    Text(
        "vllm.v1.engine.core.EngineCore.step_with_batch_queue",
        r"model_executed = scheduler_output\.total_num_scheduled_tokens > 0",
        "no tokens: nothing to wait for",
    ),
    Text(
        "vllm.v1.executor.multiproc_executor.WorkerProc.make_worker_process",
        r"name=f'VllmWorker-\{rank\}'",
        "how a worker knows that it has a process of its own",
    ),
    Text(
        "vllm.v1.engine.utils.CoreEngineProcManager.__init__",
        r"'EngineCore'",
        "how an engine core knows that it has a process of its own",
    ),
    Text(
        "vllm.config.vllm.VllmConfig",
        r"Executor\.get_class\(self\)",
        "the patched method sees every config in the front end",
    ),
    Text(
        f"{LINEAR}.UnquantizedLinearMethod.process_weights_after_loading",
        r"'_cpu_skip_gemm_dispatch'",
        "CPU linear layers with this keep plain weights",
    ),
    Text(
        "vllm.model_executor.layers.utils.cpu_unquantized_gemm",
        r"layer\.cpu_linear\(",
        "what an embedding multiplies with on CPU",
    ),
    Text(
        "vllm.v1.engine.core.EngineCore.__init__",
        r"(?s)self\.scheduler: SchedulerInterface = Scheduler\("
        r"vllm_config=[^=]*, kv_cache_config=[^=]*, structured_output_manager=[^=]*, "
        r"include_finished_set=[^=]*, log_stats=[^=]*, block_size=[^=]*, hash_block_size=[^=]*\)\n",
        "how `PATScheduler` is made",
    ),
    Text(
        "vllm.v1.worker.gpu.states.RequestState.__init__",
        r"self\.all_token_ids = StagedWriteTensor\(\(self\.max_num_reqs, self\.max_model_len\),",
        "layouts share the token ids, which are known by their size",
    ),
    Text(
        "vllm.v1.worker.gpu.states.RequestState.add_request",
        r"self\.all_token_ids\.stage_write\(req_idx, 0, all_token_ids\)",
        "a request begins by writing its tokens",
    ),
    Text(
        "vllm.distributed.device_communicators.custom_all_reduce.CustomAllreduce.__init__",
        r"(?s)rank = dist\.get_rank\(group=self\.group\).*not _can_p2p\(rank, world_size\)",
        "the probe is given a place in the group, which is not the index of a device",
    ),
    Text(
        "vllm.config.vllm.VllmConfig._set_compile_ranges",
        r"for x in compilation_config\.compile_ranges_endpoints:",
        "it adds the ends for a tp to those that are given",
    ),
    Text(
        f"{WORKER}.init_device",
        r"logical_device_id_to_visible_device_id\(self\.local_rank\)",
        "a worker has the device of the `local_rank` that PAT gives it",
    ),
    Text(
        "vllm.model_executor.model_loader.reload.layerwise.initialize_layerwise_reload",
        r"restore_layer_on_meta\(layer, info\)",
        "weights that have not arrived yet are known by their device",
    ),
    Text(
        "vllm.v1.worker.gpu.cudagraph_utils.profile_cudagraph_memory",
        r"throwaway_pool = current_platform\.graph_pool_handle\(\)",
        "graphs of all layouts are measured in one pool",
    ),
    Text(
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner.profile_cudagraph_memory",
        r"profiling_pool = current_platform\.graph_pool_handle\(\)",
        "same, V1",
    ),
    Text(
        f"{GRAPHS}._init_candidates",
        r"(?s)build_dynamic_sd_schedule_lookup\([^()]*vllm_max_batch_size=self\.max_num_reqs",
        "the lengths of a schedule that has more of them than there are requests",
    ),
    Text(
        f"{GRAPHS}._init_candidates",
        r"(?s)descs\.sort\(key=[^()]*\.num_tokens, reverse=True\)\s+self\._capture_descs\[",
        "of the graphs of a kind the largest comes first",
    ),
    Text(
        f"{GRAPHS}.dispatch",
        r"(?s)for desc in self\._candidates\[.*if _is_compatible\(",
        "the first candidate that fits a step is its graph",
    ),
    Text(
        "vllm.v1.spec_decode.ngram_proposer_gpu.NgramProposerGPU.propose",
        r"assert num_speculative_tokens == self\.k",
        "Model Runner V1's drafter on the device is always asked for the longest drafts",
    ),
    Text(
        "vllm.v1.worker.gpu.model_runner.GPUModelRunner.sample_tokens",
        r"(?s)num_speculative_tokens=num_spec_tokens.*draft_tokens\[:, num_spec_tokens:\] = -1",
        "what Model Runner V2's drafter returns beyond the draft length is masked",
    ),
    Text(
        f"{WORKER}.determine_available_memory",
        r"self\.model_runner\.profile_cudagraph_memory\(\)",
        "graphs can be left out of what a layout is measured to take",
    ),
    Text(
        "vllm.v1.worker.gpu_model_runner.GPUModelRunner.__init__",
        r"self\.inputs_embeds = "
        r"self\._make_buffer\(self\.max_num_tokens, [^()]*dtype=self\.dtype, numpy=False\)",
        "the one buffer without a NumPy array, which layouts share; it has a row for each token",
    ),
    Text(
        "vllm.v1.structured_output.StructuredOutputManager.grammar_bitmask",
        r"max_batch_size = self\.vllm_config\.scheduler_config\.max_num_seqs",
        "the manager of grammars has room for the requests of the config that it is given",
    ),
    Text(
        "vllm.config.vllm.VllmConfig._set_cudagraph_sizes",
        r"max_num_seqs = self\.scheduler_config\.max_num_seqs",
        "the sizes that vLLM captures follow from limits",
    ),
    Text(
        "vllm.v1.attention.backends.flashinfer.FlashInferMetadataBuilder.set_workspace_buffer",
        r"self\._workspace_buffer = workspace_buffer",
        "layouts share the workspace of attention",
    ),
    Text(
        "vllm.v1.attention.backends.flashinfer.FlashInferMetadataBuilder._get_workspace_buffer",
        r"if self\._workspace_buffer is None:",
        "same; a builder that has been given one allocates none",
    ),
    Text(
        "vllm.device_allocator.cumem.CuMemAllocator.use_memory_pool",
        r"(?s)if tag != old_tag:\s*for pool, _ in self\.allocator_and_pools\.get\(tag, \[\]\):"
        r"\s*self\._trim\(pool\)",
        "what layouts share is given back when the tag is used once more",
    ),
)


def check_texts(root: Path, instead: Mapping[Path, Path] | None = None) -> Iterator[str]:
    """What the vLLM in the folder `root` does not do any more.

    Args:
        instead: files to be read in the place of vLLM's own.
    """
    for text in TEXTS:
        found = _find(root, text.owner, instead or {})
        if found is None:
            yield f"{text.owner} does not exist ({text.why})"
        elif not re.search(text.pattern, ast.unparse(found)):
            yield f"{text.owner} does not contain {text.pattern!r} any more ({text.why})"


def _find(root: Path, dotted: str, instead: Mapping[Path, Path]) -> ast.AST | None:
    """The definition of a dotted name, in the module that its first parts name."""
    path, names = root, dotted.split(".")
    while names and (path / names[0]).is_dir():
        path /= names.pop(0)
    if names and (path / f"{names[0]}.py").is_file():
        file = path / f"{names.pop(0)}.py"
    else:
        file = path / "__init__.py"
    if not file.is_file():
        return None
    found: ast.AST | None = ast.parse(instead.get(file, file).read_text())
    for name in names:
        body = getattr(found, "body", [])
        found = next((node for node in body if getattr(node, "name", None) == name), None)
    return found
