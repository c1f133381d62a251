"""What vLLM does that we rely on, and no type says: patterns in its source."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks.gpu.bare.one_gpu import PATCHES

_TEXTS = r"""
vllm.v1.engine.core.EngineCoreProc.run_engine_core
    (?s)signal\.signal\(signal\.SIGTERM, signal\.SIG_DFL\)\s+
    signal\.signal\(signal\.SIGINT, signal\.SIG_DFL\).*engine_core\.shutdown\(\)
    a core's signals get their default action before it ends (`end_in_order`)
vllm.v1.engine
    PauseMode = Literal\['abort', 'wait', 'keep'\]
    the pauses that switches are tested with; `recompute` drops KV that layouts have
vllm.v1.engine.core.EngineCoreProc.pause_scheduler
    (?s)if mode not in get_args\(PauseMode\):\s+raise ValueError\(f'Invalid pause mode: \{mode\}'\)
    another is refused by name
vllm.v1.engine.llm_engine.LLMEngine.__init__
    StatLoggerManager\(vllm_config=vllm_config,
    its loggers are made for a config that names PAT's connector (`tell_loggers`)
vllm.v1.engine.async_llm.AsyncLLM.__init__
    StatLoggerManager\(vllm_config=vllm_config,
    its loggers are made for a config that names PAT's connector (`tell_loggers`)
vllm.distributed.kv_transfer.kv_connector.v1.metrics.KVConnectorProm.__init__
    connector_cls\.build_prom_metrics\(vllm_config, metric_types, labelnames,
    per_engine_labelvalues\)
    PAT's metrics are its connector's
vllm.v1.metrics.loggers.PrometheusStatLogger.record
    self\.kv_connector_prom\.observe\(scheduler_stats\.kv_connector_stats, engine_idx\)
    updates of them travel as its statistics
vllm.distributed.kv_transfer.kv_connector.v1.metrics.KVConnectorLogging.log
    not self\.transfer_stats_accumulator\.is_empty\(\)
    log lines leave them out
vllm.platforms.interface.Platform._align_hybrid_block_size
    max\(min\((?s:.*?)cache_config\.block_size\)(?s:.*)
    cache_config\.mamba_page_size_padded = attn_page_size
    blocks are a multiple of the size that a layout is given, and slots are padded to them
vllm.model_executor.layers.mamba.abstract.MambaBase.bind_kv_cache
    (?s)pages\[:, offset:offset \+ nbytes\]\.view\(dtype\).*offset \+= nbytes
    a slot has its states one after the other, as `_parts_of_slot` says
vllm.model_executor.layers.mamba.mamba_mixer2.MambaMixer2.__init__
    (?s)output_sizes=\[intermediate_size, self\.groups_ssm_state_size,
    self\.groups_ssm_state_size\].*register_buffer\('conv_weights', conv_weights
    a row of the convolution has x, B and C, as `_ROWS` says, and kernels read it by a view
vllm.model_executor.layers.mamba.mamba_mixer2.MambaMixer2.get_kv_cache_spec
    spec = super\(\)\.get_kv_cache_spec\(vllm_config\)(?s:.*)num_prefill_checkpoint_blocks=1
    what `end_prompts_parts_with_blocks` puts in its place is what it changes
vllm.v1.attention.backends.mamba_attn.BaseMambaAttentionMetadataBuilder.build_for_cudagraph_capture
    assert m\.max_query_len == 1 \+ self\.num_spec_tokens
    graphs of fewer drafts are refused for their length alone, which `capture_fewer_drafts` says
vllm.v1.worker.mamba_utils._copy_mamba_state_block
    (?s)src_block_addr \+ \(token_idx \+ token_bias\) \* token_bytes.*
    block_table_base \+ src_col \+ token_bias
    of drafts' states that of the last accepted token lies where `settle` looks for it
vllm.v1.worker.gpu.model_states.mamba_hybrid.MambaHybridModelState.add_request
    (?s)num_accepted_tokens_gpu\[req_index\]\.fill_\(1\).*
    new_req_data\.num_computed_tokens - 1\) //
    a request that comes goes on from where `settle` has put its state
vllm.v1.worker.utils.allocate_kv_cache
    torch\.zeros\(\w+, dtype=torch\.int8, device=\w+\)
    the one allocation that the shared buffer answers
vllm.v1.worker.gpu_worker.Worker.initialize_from_config
    _maybe_get_memory_pool_context\(tag='kv_cache'\)
    the context around it
vllm.v1.worker.gpu_worker.Worker.load_model
    _maybe_get_memory_pool_context\(tag='weights'\)
    the pool in which sleep mode finds weights
vllm.v1.executor.multiproc_executor.WorkerProc.__init__
    (?s)self\.worker\.init_device\(\)\s+self\.setup_proc_title_and_log_prefix\(.*
    self\.worker\.load_model\(\)
    a worker's process is titled by its rank in the TP group that `init_device` leaves
vllm.v1.worker.gpu_worker.Worker.shutdown
    (?s)model_runner\.shutdown\(\).*CuMemAllocator\.instance\.release_pools\(\)
    it shuts one runner down, then gives back the pools in which all have their memory
vllm.v1.worker.gpu_worker.Worker._maybe_get_memory_pool_context
    get_mem_allocator_instance\(\)(?s:.*)assert allocator\.get_current_usage\(\) == 0
    vLLM wants the weights' pool empty, and the base layout's weights are in it
vllm.v1.core.kv_cache_coordinator.KVCacheCoordinator.__init__
    self\.block_pool = BlockPool\(\s*num_gpu_blocks=[^()]*,\s*enable_caching=[^()]*,\s*
    hash_block_size=[^()]*,\s*enable_kv_cache_events=[^()]*,\s*metrics_collector=[^()]*\)
    a scheduler's block pool is made here, from these
vllm.v1.worker.gpu_worker.Worker.sleep
    (?s)if level == 2:.*model = self\.model_runner\.model\b.*model\.named_buffers\(\)
    a level-2 sleep keeps the buffers of one model
vllm.v1.worker.gpu_worker.Worker._make_model_runner
    self\.vllm_config\b
    the runner is made for the config that the worker holds
vllm.model_executor.model_loader.base_loader.BaseModelLoader.load_model
    (?s)self\.load_weights\(model, model_config\).*\n\s+process_weights_after_loading\(
    weights are still plain when the loader has read them
vllm.v1.executor.multiproc_executor.WorkerProc._execute_worker_rpc
    (?s)method, args, kwargs, output_rank = rpc_request.*
    output_rank is None or self\.rank == output_rank
    an order to serve a lane is never answered
vllm.distributed.device_communicators.shm_broadcast.MessageQueue
    (?s)read_flag = metadata_buffer\[self\.local_reader_rank \+ 1\]\s+
    written_flag = metadata_buffer\[0\]
    whether a reply waits is read from the ring's flags
vllm.distributed.device_communicators.cpu_communicator.CpuCommunicator.__init__
    unique_name\.startswith\('tp'\)
    the groups that get shared-memory collectives are known by name
vllm.v1.spec_decode.ngram_proposer._find_longest_matched_ngram_and_propose_tokens
    k = min\(k, max_model_len - total_token\)
    n-gram drafts end at the longest context by themselves
vllm.distributed.parallel_state.get_tp_group
    return _TP\b
    layers look their group up at each call
vllm.distributed.parallel_state.get_etp_group
    return _ETP\b
    same
vllm.v1.engine.core.EngineCore.step
    (?s)execute_model\(scheduler_output,
    non_block=True\).*model_output = future\.result\(\)
    \s+if model_output is None:\s+model_output = self\.model_executor\.sample_tokens\(
    None from `execute_model` asks for `sample_tokens`
vllm.v1.engine.core.EngineCore.step_with_batch_queue
    model_executed = scheduler_output\.total_num_scheduled_tokens > 0
    no tokens: nothing to wait for
vllm.v1.executor.multiproc_executor.WorkerProc.make_worker_process
    name=f'VllmWorker-\{rank\}'
    how a worker knows that it has a process of its own
vllm.v1.engine.utils.CoreEngineProcManager.__init__
    'EngineCore'
    how an engine core knows that it has a process of its own
vllm.config.vllm.VllmConfig
    Executor\.get_class\(self\)
    the patched method sees every config in the front end
vllm.model_executor.layers.linear.UnquantizedLinearMethod.process_weights_after_loading
    '_cpu_skip_gemm_dispatch'
    CPU linear layers with this keep plain weights
vllm.model_executor.layers.utils.cpu_unquantized_gemm
    layer\.cpu_linear\(
    what an embedding multiplies with on CPU
vllm.v1.engine.core.EngineCore.__init__
    (?s)self\.scheduler: SchedulerInterface = Scheduler\(vllm_config=[^=]*, kv_cache_config=[^=]*,
    structured_output_manager=[^=]*, include_finished_set=[^=]*, log_stats=[^=]*, block_size=[^=]*,
    hash_block_size=[^=]*\)\n
    how `PATScheduler` is made
vllm.v1.core.single_type_kv_cache_manager.SlidingWindowManager.get_num_skipped_tokens
    max\(0, num_computed_tokens - self\.sliding_window \+ 1 - self\.extra_retained_tokens\)
    which blocks of a sliding window are null
vllm.v1.core.single_type_kv_cache_manager.SlidingWindowManager._contiguous_blocks_for_hit
    blocks = cdiv\(window_size - 1, block_size\)
    what a hit in the prefix cache needs of a sliding window
vllm.v1.core.single_type_kv_cache_manager.ChunkedLocalAttentionManager.get_num_skipped_tokens
    num_computed_tokens // self\.attention_chunk_size \* self\.attention_chunk_size
    which blocks of chunked attention are null
vllm.v1.core.kv_cache_manager.KVCacheManager.allocate_slots
    max\(0, total_computed_tokens - request\.num_in_flight_tokens\)
    drafts that are refused do not need what has left the window
vllm.model_executor.models.gpt_oss.GptOssModel._load_weights_other
    (?s)weight\[:, :, 2 \* tp_rank_start:2 \* tp_rank_end\].*if tp_rank != 0:\s+weight\.zero_\(\)
    how gpt-oss cuts its experts, whose gate's and up's rows take turns, and their biases
vllm.v1.worker.gpu.states.RequestState.__init__
    self\.all_token_ids = StagedWriteTensor\(\(self\.max_num_reqs, self\.max_model_len\),
    layouts share the token ids, which are known by their size
vllm.v1.worker.gpu.states.RequestState.add_request
    self\.all_token_ids\.stage_write\(req_idx, 0, all_token_ids\)
    a request begins by writing its tokens
vllm.distributed.device_communicators.custom_all_reduce.CustomAllreduce.__init__
    (?s)rank = dist\.get_rank\(group=self\.group\).*not _can_p2p\(rank, world_size\)
    the probe is given a place in the group, which is not the index of a device
vllm.config.vllm.VllmConfig._set_compile_ranges
    for x in compilation_config\.compile_ranges_endpoints:
    it adds the ends for a tp to those that are given
vllm.v1.worker.gpu_worker.Worker.init_device
    logical_device_id_to_visible_device_id\(self\.local_rank\)
    a worker has the device of the `local_rank` that PAT gives it
vllm.model_executor.model_loader.reload.layerwise.initialize_layerwise_reload
    restore_layer_on_meta\(layer, info\)
    weights that have not arrived yet are known by their device
vllm.v1.worker.gpu.cudagraph_utils.profile_cudagraph_memory
    throwaway_pool = current_platform\.graph_pool_handle\(\)
    graphs of all layouts are measured in one pool
vllm.v1.worker.gpu_model_runner.GPUModelRunner.profile_cudagraph_memory
    profiling_pool = current_platform\.graph_pool_handle\(\)
    same, V1
vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager._init_candidates
    (?s)build_dynamic_sd_schedule_lookup\([^()]*vllm_max_batch_size=self\.max_num_reqs
    the lengths of a schedule that has more of them than there are requests
vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager._init_candidates
    (?s)descs\.sort\(key=[^()]*\.num_tokens, reverse=True\)\s+self\._capture_descs\[
    of the graphs of a kind the largest comes first
vllm.v1.worker.gpu.cudagraph_utils.CudaGraphManager.dispatch
    (?s)for desc in self\._candidates\[.*if _is_compatible\(
    the first candidate that fits a step is its graph
vllm.v1.spec_decode.ngram_proposer_gpu.NgramProposerGPU.propose
    assert num_speculative_tokens == self\.k
    Model Runner V1's drafter on the device is always asked for the longest drafts
vllm.v1.worker.gpu.model_runner.GPUModelRunner.sample_tokens
    (?s)num_speculative_tokens=num_spec_tokens.*draft_tokens\[:, num_spec_tokens:\] = -1
    what Model Runner V2's drafter returns beyond the draft length is masked
vllm.v1.worker.gpu.spec_decode.target_dependent_ar.speculator.TargetDependentARSpeculator.propose
    (?s)self\._prefill\(.*if num_speculative_tokens <= 1:
    a drafter's pass is made in steps of draft length 0, too, so that its KV has no gaps
vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer.propose
    (?s)self\.model\(\*\*model_kwargs\).*if self\.num_speculative_tokens == 0:
    the same with Model Runner V1
vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer.propose
    positions = self\._update_positions_dependent_metadata\(positions, common_attn_metadata,
    the positions that it returns are only where the next pass counts from
vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer._update_positions_dependent_metadata
    (?s)max_model_len=self\.max_model_len, out_clamped_positions=out_pos,
    a pass beyond the longest context is at position 0, and writes no KV
vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer.load_model
    (?s)self\._get_model\(\).*self\._maybe_share_embeddings\(.*self\._maybe_share_lm_head\(
    a drafter is loaded before it shares with its target, also with Model Runner V1
vllm.v1.spec_decode.llm_base_proposer.SpecDecodeBaseProposer.propose
    self\.hidden_states\[:batch_size\] = hidden_states
    layouts share what a pass begins with: it is written before it is read
vllm.v1.worker.gpu.spec_decode.eagle.utils.load_eagle_model
    (?s)get_model\(vllm_config=vllm_config, model_config=draft_model_config\).*_should_share\(
    the loader is asked once more for a drafter, which shares with its target afterwards
vllm.config.speculative.SpeculativeConfig.__post_init__
    self\.draft_model_config = ModelConfig\(model=self\.model, runner='draft'
    by that the loader knows whose weights it loads (`is_drafters`)
vllm.v1.worker.gpu_worker.Worker.determine_available_memory
    self\.model_runner\.profile_cudagraph_memory\(\)
    graphs can be left out of what a layout is measured to take
vllm.v1.worker.gpu_model_runner.GPUModelRunner.__init__
    self\.inputs_embeds = self\._make_buffer\(self\.max_num_tokens, [^()]*dtype=self\.dtype,
    numpy=False\)
    the one buffer without a NumPy array, which layouts share; it has a row for each token
vllm.v1.structured_output.StructuredOutputManager.grammar_bitmask
    max_batch_size = self\.vllm_config\.scheduler_config\.max_num_seqs
    the manager of grammars has room for the requests of the config that it is given
vllm.config.vllm.VllmConfig._set_cudagraph_sizes
    max_num_seqs = self\.scheduler_config\.max_num_seqs
    the sizes that vLLM captures follow from limits
vllm.v1.attention.backends.flashinfer.FlashInferMetadataBuilder.set_workspace_buffer
    self\._workspace_buffer = workspace_buffer
    layouts share the workspace of attention
vllm.v1.attention.backends.flashinfer.FlashInferMetadataBuilder._get_workspace_buffer
    if self\._workspace_buffer is None:
    same; a builder that has been given one allocates none
vllm.model_executor.layers.attention.mla_attention.MLACommonMetadataBuilder.__init__
    self\.chunked_prefill_workspace = torch\.empty\(
    layouts share it, where latent attention gathers earlier parts of prompts
vllm.model_executor.layers.attention.mla_attention.MLACommonMetadataBuilder.determine_chunked_prefill_workspace_size
    (?s)max\(8 \* model_config\.max_model_len, 4 \* scheduler_config\.max_num_seqs
    \s\* cache_config\.block_size\), 64 \* 1024
    estimates count it
vllm.model_executor.layers.attention.mla_attention.MLAAttention.process_weights_after_loading
    (?s)replace_parameter\(self, 'W_UV', W_UV\.transpose\(0, 1\)(, prefer_copy=True)?\).*
    replace_parameter\(self, 'W_UK_T', W_UK\.permute\(1, 2, 0\)(, prefer_copy=True)?\)
    they are views of `kv_b_proj`
vllm.model_executor.utils.replace_parameter
    old_param\.(data\.)?copy_\(new_tensor\)
    what is made anew lies where it lay, for compiled code
vllm.model_executor.layers.attention.mla_attention.MLAAttention.get_kv_cache_spec
    (?s)num_kv_heads=1,\s*max_tp_shards=1,
    a latent vector is whole on every rank
vllm.device_allocator.cumem.CuMemAllocator.use_memory_pool
    (?s)if tag != old_tag:\s*for pool, _ in self\.allocator_and_pools\.get\(tag,
    \[\]\):\s*self\._trim\(pool\)
    what layouts share is given back when the tag is used once more
vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator.all_reduce
    if pynccl_comm is None or pynccl_comm\.disabled:\s+out = input_\.clone\(\)\s+
    torch\.distributed\.all_reduce\(out, group=self\.device_group\)
    of ranks that share a GPU: a sum without NCCL (`benchmarks/gpu/bare/one_gpu.py`)
vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase.all_gather
    dist\.all_gather_into_tensor\(output_tensor, input_, group=self\.device_group\)
    of ranks that share a GPU: logits
vllm.platforms.interface.Platform.logical_device_id_to_visible_device_id
    physical_device_id = cls\.device_id_to_physical_device_id\(device_id\)
    of ranks that share a GPU: a worker's device
vllm.v1.worker.gpu_worker.Worker.init_device
    self\.local_rank < torch\.accelerator\.device_count\(\)
    of ranks that share a GPU: what a worker asserts
vllm.v1.attention.backends.mla.prefill.flash_attn.FlashAttnPrefillBackend.supports_mla_dimensions
    MLADimensions\(qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128\)
    the doctor's shape of latent attention, on Hopper
vllm.distributed.device_communicators.custom_all_reduce
    from vllm\.distributed\.device_communicators\.all_reduce_utils import [^()]*
    gpu_p2p_access_check
    of ranks that share a GPU: the probe is replaced before this is imported
"""
"""Each: the class, method or function of vLLM's; a regular expression, maybe on several lines, of
which one that ends with a comma goes on after a space; what of ours rests on it."""


class Text(NamedTuple):
    """Something that vLLM does.

    Attributes:
        owner: the class, method or function that does it, dotted.
        pattern: is found in its source without comments (`ast.unparse`).
        why: what of ours rests on it.
    """

    owner: str
    pattern: str
    why: str


def _texts() -> Iterator[Text]:
    for entry in re.split(r"\n(?=\w)", _TEXTS.strip()):
        owner, *pattern, why = map(str.strip, entry.split("\n"))
        yield Text(owner, re.sub(r",\n *", ", ", "\n".join(pattern)).replace("\n", ""), why)


TEXTS = tuple(_texts())


def check_texts(root: Path, instead: Mapping[Path, Path] | None = None) -> Iterator[str]:
    """What the vLLM in the folder `root` does not do any more.

    Args:
        instead: files to be read in the place of vLLM's own.
    """
    for text in TEXTS:
        definition = _find(root, text.owner, instead or {})
        if definition is None:
            yield f"{text.owner} does not exist ({text.why})"
        elif not re.search(text.pattern, ast.unparse(definition)):
            yield f"{text.owner} does not contain {text.pattern!r} any more ({text.why})"


def check_patches(root: Path, instead: Mapping[Path, Path] | None = None) -> Iterator[str]:
    """What ranks that share a GPU would replace, and is not there or has other parameters.

    Args:
        root: a folder of packages. What is in others is not looked at.
        instead: as of `check_texts`.
    """
    for patch in PATCHES:
        if not (root / patch.where.partition(".")[0]).is_dir():
            continue
        definition = _find(root, patch.where.replace(":", "."), instead or {})
        parameters = None
        if isinstance(definition, ast.FunctionDef):
            parameters = ", ".join(arg.arg for arg in definition.args.args)
        if definition is None or parameters != patch.parameters:
            yield f"{patch.where} has {parameters}, not {patch.parameters} ({patch.why})"


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
    definition: ast.AST | None = ast.parse(instead.get(file, file).read_text())
    for name in names:
        body = getattr(definition, "body", [])
        definition = next((node for node in body if name in _names(node)), None)
    return definition


def _names(node: ast.AST) -> tuple[str, ...]:
    """What a statement defines."""
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return (node.target.id,)
    return (getattr(node, "name", ""),)
