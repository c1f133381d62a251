# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes on GPUs: order of work, memory, graphs, compiled code, groups, kernels, platforms."""

from __future__ import annotations

from tests.nightly.mutations.mutation import mutations

# fmt: off
MUTATIONS = mutations({
    "tests/gpuless/test_capture_sizes.py": [
        ("drafts are not counted", "worker.layout_config:_limit_cuda_graphs", " * config.uniform_decode_query_len", ""),
        ("the user's sizes are lost", "worker.layout_config:_resize_cuda_graphs", " and _vllm_chose_sizes(engine)", ""),
        ("the largest of the engine's sizes", "worker.layout_config:_resize_cuda_graphs", ".max_cudagraph_capture_size = chosen[-1]", ".max_cudagraph_capture_size = engine.compilation_config.cudagraph_capture_sizes[-1]"),
    ],
    "tests/gpuless/test_collectives.py::test_all_ranks_make_the_same_calls_on_their_devices[4]": [
        ("a switch makes its exchange", "worker.worker:PATWorkerMixin.pat_switch", "kv_bytes = 0\n", "kv_bytes = 0; Exchange(exchange_group(), self.device)\n"),
        ("devices in the order of ranks", "worker.worker:PATWorkerMixin._devices_of_group", "device_of(rank, ranks) for", "rank for"),
        ("a rank makes its groups in another order", "worker.worker:PATWorkerMixin.init_device", "for layout in layouts\n", "for layout in layouts[:: -1 if self.rank == 1 else 1]\n"),
        ("workers are known by their ranks", "worker.worker:PATWorkerMixin.init_device", "device_of(self.local_rank, self.parallel_config.world_size)", "self.local_rank"),
        ("groups are made by their members only", "worker.runtime:make_tp_group", "in range(layout.replicas)", "in [torch.distributed.get_rank() % layout.replicas]"),
        ("a rank measures its layouts in another order", "worker.gpu_worker:PATGPUWorker.determine_available_memory", "reversed(runtimes)", "(runtimes if self.rank == 1 else reversed(runtimes))"),
        ("a layout keeps the workspace of another", "patches.groups:_change_workspaces", "vars(module).update(", "dict().update("),
        ("workspaces of other layouts stay in a sleep", "patches.groups:_change_workspaces", 'replace(module, "_fi_ar_workspaces_for_group", _find_in_every_layout)', "pass"),
        ("a group finds the active workspaces only", "patches.groups:_find_in_every_layout", "(*stock(group), *own)", "(*stock(group),)"),
        ("a workspace is given back twice", "patches.groups:_find_in_every_layout", "[*{id(workspace): workspace for workspace in (*stock(group), *own)}.values()]", "[*stock(group), *own, *own]"),
        ("ranks taken for devices", "patches.groups:probe_p2p_between", "if not current_platform.is_cuda()", "if True"),
    ],
    "tests/gpuless/test_compile_keys.py": [
        ("a folder of the user's for all layouts", "worker.layout_config:layout_config", "config.compilation_config.cache_dir:", "config.compilation_config.cache_dir and False:"),
        ("replicas share", "worker.layout_config:layout_config", "layout.replica_of(rank)", "0"),
        ("parts of the compiler's config are shared", "worker.layout_config:layout_config", "copy.deepcopy(vllm", "copy.copy(vllm"),
        ("policies have code of their own", "worker.layout_config:_of_code", 'name not in ("pat", CHOSEN)', "name != CHOSEN"),
        ("what is said of the choice is code", "worker.layout_config:_of_code", '("pat", CHOSEN)', '("pat",)'),
        ("weights are left out of the key", "worker.layout_config:_of_code", '"pat_weights": resolve_weights(engine),', ""),
        ("the other layouts are left out of the key", "worker.layout_config:_of_code", '"pat_layouts": [str(each_layout) for each_layout in layouts_of(engine)],', ""),
    ],
    "tests/gpuless/test_compiled_kernels.py::test_beyond_2_31_words": [
        ("rows are counted in 32 bits", "kernels.device:copy_runs_kernel", "tl.program_id(0).to(tl.int64) * ROWS", "tl.program_id(0) * ROWS"),
        ("bytes of a swap are counted in 32 bits", "kernels.swap:_sides", "a * row,", "a * row % 2**32,", "b * row,", "b * row % 2**32,"),
    ],
    "tests/gpuless/test_compiled_kernels.py::test_kv_kernels": [
        ("starts of runs are not known to be aligned", "kernels.device:copy_runs_kernel", "other=0), ALIGN)", "other=0), 1)"),
    ],
    "tests/gpuless/test_compiled_kernels.py::test_swaps_of_all_models[90]": [
        ("addresses of a swap are not known to be aligned", "kernels.device:swap_kernel", "a = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int64)), 16)", "a = tl.load(entry).to(tl.pointer_type(tl.int64))"),
    ],
    "tests/gpuless/test_cuda_graphs.py::test_graphs[pools, offloaded]": [
        ("each capture has a stream of its own", "patches.runners:capture_on", "lambda _: original(stream)", "original"),
    ],
    "tests/gpuless/test_cuda_graphs.py::test_graphs[V2]": [
        ("capture before the weights are there", "worker.worker:PATWorkerMixin.compile_or_warm_up_model", "language_model += times.language_model", "language_model += times.language_model; [setattr(p, 'data', p.data.clone()) for p in runtime.runner.model.parameters()]"),
        ("a switch keeps the runner", "worker.worker:PATWorkerMixin.pat_switch", "self._activate(target)", "self._activate(target); self.model_runner = source.runner"),
        ("CUDA graphs: a pool for each layout", "worker.worker:PATWorkerMixin.initialize_from_config", "runtime.check_kv_cache(config)", "runtime.check_kv_cache(config); type(__import__('vllm.platforms').platforms.current_platform)._global_graph_pool = None"),
        ("new weights stay elsewhere", "weights.inplace:InPlaceShards.refresh", "weight.tensor.copy_(new)", "pass"),
    ],
    "tests/gpuless/test_cuda_graphs.py::test_graphs[order]": [
        ("a rank captures layouts in another order", "worker.worker:PATWorkerMixin.compile_or_warm_up_model", "for layout, runtime in self._runtimes.items():", "for layout, runtime in sorted(self._runtimes.items(), reverse=self.rank == 3):"),
    ],
    "tests/gpuless/test_draft_graphs.py": [
        ("layouts share a config", "worker.layout_config:_make_speculative", "own = copy.copy(engine)", "own = engine"),
        ("sizes for the longest drafts only", "worker.layout_config:_capture_every_draft_length", "in lengths_of(engine.speculative_config)", "in ()"),
        ("as many lengths as requests", "patches.drafts:_look_up_all", "max(vllm_max_batch_size, len(schedule))", "vllm_max_batch_size"),
    ],
    "tests/gpuless/test_gpu_worker.py": [
        ("the active layout's parameters are kept", "worker.gpu_worker:PATGPUWorker._in_base", "self._activate(self._base)", "pass"),
        ("sleep ends in the base layout", "worker.gpu_worker:PATGPUWorker._in_base", "self._activate(active)", "pass"),
        ("one runner is shut down", "worker.runtime:shut_down_beside", "runtime.runner.shutdown()", "pass"),
        ("one group is destroyed", "worker.worker:PATWorkerMixin.shutdown", "destroy_tp_groups((runtime.group for runtime in runtimes.values()), self._all_ranks)", "pass"),
        ("graphs that go give peers their memory", "worker.late_memory:measure_graphs", "        capture_without_ipc(),\n", ""),
        ("buffers are kept at the wrong level", "worker.gpu_worker:PATGPUWorker.sleep", "if level == 2", "if level == 1"),
        ("weights go to sleep as they lie", "worker.weight_updates:WeightUpdatesMixin.sleep", "self._weights.arrange(self._base.layout)", "pass"),
        ("an update finds another layout", "worker.weight_updates:WeightUpdatesMixin.pat_call_in_base", "self._enter_for_a_call(self._base)", "pass"),
        ("not in the default layout", "worker.worker:PATWorkerMixin.compile_or_warm_up_model", "self._enter_for_a_call(runtime)", "pass"),
        ("freed shares stay", "worker.gpu_worker:PATGPUWorker.load_model", "if len(self._runtimes) > 1 and", "if False and"),
        ("nothing is shared", "worker.worker:PATWorkerMixin.load_model", "share_buffers(loaded, self._state_transfer)", "pass"),
        ("a model for all layouts", "worker.worker:PATWorkerMixin.init_device", "self._make_runner(runtime.config)", "self._make_runner(self._base.config)"),
        ("titled by the base layout", "worker.worker:PATWorkerMixin.init_device", "install_tp_group(self._all_ranks)", "pass"),
        ("nothing is given back", "worker.late_memory:measure_buffers", "_end_smallest_kv_cache(runtime.runner)", "pass"),
        ("the base layout's workspace is not handed on", "patches.runners:use_attention_workspace", "builder.set_workspace_buffer(workspace)", "pass"),
        ("layouts capture on a stream each", "worker.gpu_worker:PATGPUWorker.compile_or_warm_up_model", "with capture_on(self._capture_stream):", "if True:"),
        ("layouts are measured on a stream each", "worker.late_memory:measure_graphs", "        capture_on(stream),\n", ""),
        ("memory beside steps: a pool for each layout", "worker.late_memory:measure_graphs", "        _kept_graph_pool(stream),\n", ""),
        ("nothing keeps the pool", "worker.late_memory:_kept_graph_pool", "with torch.cuda.graph(graph, pool=pool, stream=stream):", "if pool:"),
        ("the pool is kept for ever", "worker.late_memory:_kept_graph_pool", "torch.accelerator.empty_cache()", "pass"),
        ("the pool is handed out after it is gone", "patches.replacing:replaced", "setattr(owner, name, original)", "pass"),
        ("the buffers of every layout are counted", "start.memory_estimate:kv_cache_bytes", " - max(buffers)", ""),
        ("activations of the base layout only", "start.memory_estimate:kv_cache_bytes", "max(layout.activations for layout in layouts)", "last.activations"),
        ("a switch stages nothing", "start.memory_estimate:staged_share", "(sent + 2 / ROUNDS)", "0"),
        ("a switch leaves weights as they are", "worker.worker:PATWorkerMixin.pat_switch", "self._weights.arrange(target.layout)", "0"),
        ("CUDA graphs: a KV buffer for each layout", "kv_transfer.kv_buffer:_Allocation.__torch_function__", "if self._shared.buffer is None:", "if True:"),
    ],
    "tests/vllm/patches/test_groups.py": [
        ("a group is destroyed with another's workspaces", "patches.groups:destroy_tp_groups", "install_tp_group(group)  #", "pass  #"),
        ("a group is destroyed for each layout that has it", "patches.groups:destroy_tp_groups", "{id(group): group for group in groups if group is not own}.values()", "[group for group in groups if group is not own]"),
        ("peers open the memory of graphs that go", "patches.groups:capture_without_ipc", '"registered": False', '"registered": True'),
    ],
    "tests/gpuless/test_happens_before.py": [
        ("a call in every layout does not wait for rows", "worker.weight_updates:WeightUpdatesMixin.pat_call_in_base", "self._enter_for_a_call(runtime)", "self._enter(runtime)"),
        ("exchange: NCCL is not waited for", "kv_transfer.exchange:CollectiveTransport.finish", "work.wait()", "pass"),
        ("exchange: two layers have one set of buffers", "kv_transfer.exchange:CollectiveTransport.begin", "self._free.popleft()", "self._free[0]"),
        ("loaders: neither rows nor steps are waited for", "worker.weight_updates:WeightUpdatesMixin._enter_for_a_call", "self._synchronize_device()", "pass"),
        ("buckets: rows are in the active layout's order", "worker.weight_updates:WeightUpdatesMixin._enter_for_a_call", "_enter(", "_activate("),
        ("loaders: shards are copied on another stream", "weights.model_weights:derive", "into.copy_(", "with torch.cuda.stream(torch.cuda.Stream()): into.copy_("),
        ("outputs: are read before they are there", "executor.lanes:_reply_to", "output = output.get_output()", "output.sampled_token_ids.tolist(); output = output.get_output()"),
        ("row swaps: on another stream", "weights.inplace:InPlaceShards.arrange", "move.run()", "with torch.cuda.stream(torch.cuda.Stream()): move.run()"),
        ("row swaps: all rounds at once", "weights.row_order:rounds", "not disjoint or any", "not disjoint or False and any"),
        ("row swaps: sleep does not wait", "worker.weight_updates:WeightUpdatesMixin.sleep", "self._synchronize_device()", "pass"),
        ("the null block is zeroed beside the exchange", "worker.worker:PATWorkerMixin.pat_switch", "weight_bytes = self._weights.arrange(target.layout)", "weight_bytes = self._weights.arrange(target.layout)\n            target.connector.clear_null_block()"),
        ("side stream: is not waited for", "worker.worker:PATWorkerMixin.pat_switch", "self._side.wait()", "pass"),
    ],
    "tests/gpuless/test_kv_layouts.py": [
        ("KV cache layouts are not looked at", "worker.layout_config:layout_kv_cache_config", "if tensor.block_stride != block or (", "if False and ("),
        ("strides are divided by the heads", "worker.layout_config:layout_kv_cache_config", "tensor.block_stride //= ratio", "tensor.block_stride //= ratio * ratio"),
        ("the base layout's views", "kv_transfer.kv_buffer:SharedKVBuffer.views", "kv_cache_config.num_blocks,", "1,"),
        ("copied heads count", "models.kinds:StateKind.ratio", "len(self.heads_of(base, 0)) // len(self.heads_of(layout, 0))", "layout.tp // base.tp"),
        ("vLLM is offered all that backends have", "worker.runtime:LayoutRuntime.check_kv_cache_layouts", "if name in KV_LAYOUTS", "if name"),
    ],
    "tests/gpuless/test_layouts_in_updates.py": [
        ("a payload for another rank", "worker.weight_updates:WeightUpdatesMixin.update_weights", "update_info[self.rank]", "update_info[0]"),
        ("weights are derived from what is missing", "worker.layout_weights:LayoutWeights.refresh", "tensor.is_meta", "False"),
        ("rows leave the base layout's order", "worker.layout_weights:LayoutWeights.refresh", "return False", "self._strategy.arrange(active); return False"),
        ("the way back is forgotten while weights are away", "scheduler.layout_controller:LayoutController.end_batch_if_over", "self._return_pending = True", "pass"),
        ("a batch goes on while weights are away", "scheduler.layout_controller:LayoutController.end_batch_if_over", "if self._batch_open and self._is_over():", "if self._batch_open and self._is_over() and self._active.executor.refresh_weights():"),
        ("a switch is made", "scheduler.switch:_check", "not active.executor.refresh_weights()", "False"),
        ("requests run with half of the weights", "scheduler.replica_set:ReplicaSet.schedule", "(waits and replica.num_seqs)", "False"),
        ("a paused engine keeps gone requests", "scheduler.replica_set:ReplicaSet.schedule", "paused = self.pause_state == PauseState.PAUSED_ALL or", "paused ="),
        ("ranks of a group count from zero in each replica", "worker.layout_config:layout_config", "data_parallel_index = layout.replica_of(rank)", "data_parallel_index = 0"),
    ],
    "tests/gpuless/test_platforms.py::test_kernels_are_tuned_for_each_layout[sm90]": [
        ("a layout's config is taken for an engine's", "plugin:_executor_class", "if layout_name(vllm_config) is not None:", "if False:"),
    ],
    "tests/gpuless/test_start.py::test_a_start_with_defaults[sm90:Qwen3-30B-A3B]": [
        ("a layout's config, which vLLM copies at start, is taken for an engine's", "plugin:_executor_class", "if layout_name(vllm_config) is not None:", "if False:"),
    ],
    "tests/gpuless/test_platforms.py::test_a_default_start_and_every_other_backend[rocm]": [
        ("ROCm's own first choice", "start.prepare:_choose_attention_backend", "attention.backend is None", "False"),
    ],
    "tests/gpuless/test_platforms.py::test_a_layout_compiles_for_the_ranges_of_stock_vllm[sm90]": [
        ("the engine's ranges", "worker.layout_config:layout_config", "_resize_compile_ranges(config, vllm_config)", "pass"),
    ],
    "tests/gpuless/test_platforms.py::test_what_slows_experts_is_said[sm100]": [
        ("another choice of vLLM's is not told", "weights.experts:what_slows", "stock is not UnquantizedMoeBackend.TRITON", "False"),
        ("the experts of all layouts have one shape", "weights.experts:what_slows", "layer: Any = experts ", "layer: Any = of_layouts[0][1] "),
    ],
    "tests/gpuless/test_platforms.py::test_served_or_refused[rocm-ROCM_ATTN-v2]": [
        ("ROCM_ATTN passes the front end", "start.refused:_attention_backend", "backend.name in _PACKED_HEADS", "False"),
    ],
    "tests/gpuless/test_platforms.py::test_served_or_refused[rocm-TRITON_ATTN-v2]": [
        ("one ratio too many", "models.kinds:StateKind.ratio", "len(self.heads_of(base, 0)) //", "2 * len(self.heads_of(base, 0)) //"),
    ],
    "tests/gpuless/test_platforms.py::test_served_or_refused[sm100-FLASHINFER-v2]": [
        ("alignment of blocks is compared", "worker.runtime:LayoutRuntime.check_kv_cache", "replace(specs[name], block_stride_alignment=alignment)", "specs[name]"),
    ],
    "tests/gpuless/test_platforms.py::test_served_or_refused[sm90-FLASHINFER-v2]": [
        ("only the base layout hears of the KV cache layout", "worker.worker:PATWorkerMixin.set_kv_cache_layout", "self._each_layout()", "[self._base]"),
    ],
    "tests/gpuless/test_worker.py": [
        ("input embeddings: each layout has its own", "patches.runners:input_embeddings_of", "if not same", "if True"),
        ("token ids for each layout", "patches.runners:token_ids_of", "size[0] > most_rows", "True"),
        ("all rows for few requests", "patches.runners:token_ids_of", "shared.gpu[: size[0]]", "shared.gpu"),
        ("rows of tokens for requests", "worker.runtime:largest_first", "if runtime.config.use_v2_model_runner", "if False"),
        ("V2 gathers nothing", "worker.request_state:gather_states", " or not state_transfer.keeps_states", ""),
        ("a rank decides for itself", "worker.request_state:gather_states", "gathered: list", "if not taken:\n        return {}\n    gathered: list"),
    ],
    "tests/gpuless/test_replaced.py": [
        ("what is replaced of vLLM is not listed", "tests.gpuless.rank:live", 'replace(gpu_worker.Worker, "compile_or_warm_up_model", capture)', "gpu_worker.Worker.compile_or_warm_up_model = capture"),
        ("what is listed is not replaced", "tests.gpuless.communicators:_custom_all_reduce", 'replace(custom_all_reduce, "custom_ar", True)', "pass"),
    ],
})
# fmt: on
