# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes on GPUs: order of work, memory, graphs, compiled code, groups, kernels, platforms."""

from __future__ import annotations

from tests.nightly.mutations.mutation import Mutation

WORKER = "pat_vllm.worker.worker:PATWorkerMixin"
GPU_WORKER = "pat_vllm.worker.gpu_worker:PATGPUWorker"
CONFIG = "pat_vllm.worker.layout_config"
RUNTIME = "pat_vllm.worker.runtime"
EXCHANGE = "pat_vllm.kv_transfer.exchange"
SIDE = "pat_vllm.worker.side_stream:SideStream"
LATE = "pat_vllm.worker.late_memory"
RUNNERS = "pat_vllm.patches.runners"
SUPPORT = "pat_vllm.support"
DEVICE = "pat_vllm.kernels.device"
LAYOUT_WEIGHTS = "pat_vllm.worker.layout_weights:LayoutWeights"
EXECUTOR = "pat_vllm.executor.executor:PATExecutorMixin"
DRAFTS = "pat_vllm.patches.drafts"

ELSEWHERE = "with torch.cuda.stream(torch.cuda.Stream()): "
OTHER_KV = (
    "[setattr(layer, 'kv_cache', layer.kv_cache.clone()) for one in self._runtimes.values() "
    "for layer in one.config.compilation_config.static_forward_context.values()]"
)
POOL = "type(__import__('vllm.platforms').platforms.current_platform)._global_graph_pool"

TABLE: dict[str, dict[str, dict[str, dict[str, str]]]] = {
    "test_capture_sizes.py::test_a_request_takes_a_token_for_each_draft": {
        f"{CONFIG}:_limit_cuda_graphs": {
            "drafts are not counted": {" * config.uniform_decode_query_len": ""},
        },
    },
    "test_capture_sizes.py::test_a_users_sizes_stay": {
        f"{CONFIG}:_resize_cuda_graphs": {
            "the user's sizes are lost": {" and _vllm_chose_sizes(engine)": ""},
        },
    },
    "test_capture_sizes.py::test_limits_are_the_layouts_own": {
        f"{CONFIG}:layout_config": {
            "a runner with the engine's limits": {
                "_scheduler_config(vllm_config, layout)": "copy.copy(vllm_config.scheduler_config)"
            },
        },
        f"{CONFIG}:_scheduler_config": {
            "limits of all layouts in one": {
                "copy.copy(engine.scheduler_config)": "engine.scheduler_config"
            },
        },
    },
    "test_capture_sizes.py::test_sizes_are_those_of_stock_vllm": {
        f"{CONFIG}:layout_config": {
            "capture sizes are copied": {"_resize_cuda_graphs(config, vllm_config)": "pass"},
        },
        f"{CONFIG}:_resize_cuda_graphs": {
            "the largest of the engine's sizes": {
                ".max_cudagraph_capture_size = chosen[-1]": ".max_cudagraph_capture_size = engine.compilation_config.cudagraph_capture_sizes[-1]"
            },
        },
        f"{CONFIG}:_capture_sizes": {
            "the engine's config is changed": {
                "copy.copy(engine.compilation_config)": "engine.compilation_config"
            },
        },
    },
    "test_collectives.py::test_all_ranks_make_the_same_calls_on_their_devices[check_constructors-4]": {
        f"{WORKER}.pat_switch": {
            "a switch makes its exchange": {
                "kv_bytes = 0\n": "kv_bytes = 0; Exchange(device_world_group(), self.device)\n"
            },
        },
    },
    "test_collectives.py::test_all_ranks_make_the_same_calls_on_their_devices[check_devices-4]": {
        f"{WORKER}._devices_of_group": {
            "devices in the order of ranks": {"device_of(rank, ranks) for": "rank for"},
        },
        "pat_vllm.patches.groups:probe_p2p_between": {
            "peers are asked for by their place in the group": {
                "custom_all_reduce._can_p2p = can_p2p": "pass"
            },
        },
        f"{WORKER}.init_device": {
            "a rank's device is its place in the group": {
                "(layout, self.local_rank,": "(layout, layout.tp_rank_of(self.rank),"
            },
        },
    },
    "test_collectives.py::test_all_ranks_make_the_same_calls_on_their_devices[check_order-4]": {
        f"{WORKER}.init_device": {
            "a rank makes its groups in another order": {
                "for layout in layouts\n": "for layout in layouts[:: -1 if self.rank == 1 else 1]\n"
            },
        },
        f"{RUNTIME}:make_tp_group": {
            "groups are made by their members only": {
                "in range(layout.replicas)": "in [torch.distributed.get_rank() % layout.replicas]"
            },
        },
        f"{GPU_WORKER}.determine_available_memory": {
            "a rank measures its layouts in another order": {
                "reversed(runtimes)": "(runtimes if self.rank == 1 else reversed(runtimes))"
            },
        },
        "pat_vllm.patches.groups:_change_workspaces": {
            "a layout keeps the workspace of another": {"vars(module).update(": "dict().update("},
        },
        f"{WORKER}.pat_switch": {
            "a rank does not take part in an exchange": {
                "if command.moves:": "if command.moves and self.rank != 2:"
            },
        },
    },
    "test_compile.py::test_each_layout_runs_its_own_code[cold]": {
        f"{WORKER}.init_device": {
            "a model for all layouts": {
                "self._make_runner(runtime.config)": "self._make_runner(self._base.config)"
            },
        },
    },
    "test_compile_keys.py::test_a_second_start_finds_them": {
        f"{CONFIG}:layout_config": {
            "a key of this start": {'"pat_layout": str(layout)': '"pat_layout": str(id(config))'},
        },
    },
    "test_compile_keys.py::test_folders_for_debugging": {
        f"{CONFIG}:layout_config": {
            "a folder for what all layouts dump": {
                ".debug_dump_path /= str(layout)": ".debug_dump_path /= ''"
            },
        },
    },
    "test_compile_keys.py::test_folders_in_the_users_folder": {
        f"{CONFIG}:layout_config": {
            "a folder of the user's for all layouts": {
                "config.compilation_config.cache_dir:": "config.compilation_config.cache_dir and False:"
            },
            "the user's folder is left": {
                "os.path.join(config.compilation_config.cache_dir, str(layout))": "str(layout)"
            },
        },
    },
    "test_compile_keys.py::test_other_weights_have_other_artifacts": {
        f"{CONFIG}:layout_config": {
            "the layout is left out of the key": {', "pat_layout": str(layout)}': "}"},
            "only the tp is in the key": {'"pat_layout": str(layout)': '"pat_layout": layout.tp'},
            "weights are left out of the key": {"{**vllm_config.additional_config, ": "{"},
        },
    },
    "test_compile_keys.py::test_ranks_and_layouts_have_artifacts_of_their_own": {
        f"{CONFIG}:layout_config": {
            "replicas share": {"layout.replica_of(rank)": "0"},
            "ranks of a group share": {"layout.tp_rank_of(rank)": "0"},
        },
    },
    "test_compile_keys.py::test_what_compiling_writes_down_stays_in_the_layout": {
        f"{CONFIG}:layout_config": {
            "the compiler's config is shared": {
                "copy.deepcopy(vllm_config.compilation_config)": "vllm_config.compilation_config"
            },
            "parts of the compiler's config are shared": {"copy.deepcopy(vllm": "copy.copy(vllm"},
        },
    },
    "test_compiled_kernels.py::test_beyond_2_31_words": {
        f"{DEVICE}:copy_runs_kernel": {
            "rows are counted in 32 bits": {
                "tl.program_id(0).to(tl.int64) * ROWS": "tl.program_id(0) * ROWS"
            },
            "starts of runs are read as 32 bits": {
                "mask=known, other=0)": "mask=known, other=0).to(tl.int32)"
            },
        },
        "pat_vllm.kernels.kv:TableBlocks.__init__": {
            "starts of blocks are counted in 32 bits": {
                "in blocks], dtype=torch.int64": "in blocks], dtype=torch.int32"
            },
        },
        "pat_vllm.kernels.swap:_sides": {
            "bytes of a swap are counted in 32 bits": {
                "a * row,": "a * row % 2**32,",
                "b * row,": "b * row % 2**32,",
            },
        },
    },
    "test_compiled_kernels.py::test_kv_kernels_of_llama[90]": {
        f"{DEVICE}:copy_runs_kernel": {
            "starts of runs are not known to be aligned": {"other=0), ALIGN)": "other=0), 1)"},
        },
        "pat_vllm.kernels.kv:TableBlocks.__init__": {
            "strides are taken for odd": {"2 if all(": "1 if all("},
        },
    },
    "test_compiled_kernels.py::test_swaps_of_all_models[90]": {
        f"{DEVICE}:swap_kernel": {
            "addresses of a swap are not known to be aligned": {
                "a = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int64)), 16)": "a = tl.load(entry).to(tl.pointer_type(tl.int64))"
            },
            "lengths of a swap are not known to be even": {
                "tl.multiple_of(tl.load(entry + 2), 2)": "tl.load(entry + 2)"
            },
        },
    },
    "test_cuda_graphs.py::test_graphs[addresses]": {
        f"{WORKER}.compile_or_warm_up_model": {
            "capture before the KV cache is there": {
                "language_model += times.language_model": f"language_model += times.language_model; {OTHER_KV}"
            },
            "capture before the weights are there": {
                "language_model += times.language_model": "language_model += times.language_model; [setattr(p, 'data', p.data.clone()) for p in runtime.runner.model.parameters()]"
            },
        },
        f"{WORKER}.pat_switch": {
            "a switch moves the slot mapping": {
                "self._activate(target)": "self._activate(target); source.runner.block_tables.slot_mappings = source.runner.block_tables.slot_mappings.clone()"
            },
        },
    },
    "test_cuda_graphs.py::test_graphs[drafts]": {
        f"{DRAFTS}:_asks_for_none": {
            "drafts of length 0 are looked for": {
                'options.get("num_speculative_tokens") == 0': "False"
            },
        },
    },
    "test_cuda_graphs.py::test_graphs[order]": {
        f"{WORKER}.compile_or_warm_up_model": {
            "a rank captures layouts in another order": {
                "for layout, runtime in self._runtimes.items():": "for layout, runtime in sorted(self._runtimes.items(), reverse=self.rank == 3):"
            },
        },
        f"{CONFIG}:layout_config": {
            "a rank captures fewer sizes": {
                "pat_config(vllm_config).largest_batch(layout)": "2 if rank == 3 else None"
            },
        },
        f"{WORKER}._enter": {
            "capture with another layout's group": {
                "self._activate(runtime)": "self._activate(runtime); install_tp_group(self._base.group)"
            },
        },
    },
    "test_cuda_graphs.py::test_graphs[own graphs]": {
        f"{WORKER}.pat_switch": {
            "a switch keeps the runner": {
                "self._activate(target)": "self._activate(target); self.model_runner = source.runner"
            },
            "a switch takes the other layout's graphs along": {
                "self._activate(target)": "self._activate(target); target.runner.cudagraph_manager.graphs = source.runner.cudagraph_manager.graphs"
            },
            "graphs end with their layout": {
                "self._handover.clear(source.runner)": "self._handover.clear(source.runner); source.runner.cudagraph_manager.release_graphs()"
            },
        },
    },
    "test_cuda_graphs.py::test_graphs[pools]": {
        f"{WORKER}.initialize_from_config": {
            "CUDA graphs: a pool for each layout": {
                "runtime.check_kv_cache(config)": f"runtime.check_kv_cache(config); {POOL} = None"
            },
        },
        f"{WORKER}._enter": {
            "a layout is entered as the base layout": {
                "self._activate(runtime)": "self._activate(self._base)"
            },
        },
    },
    "test_cuda_graphs.py::test_graphs[replays]": {
        f"{WORKER}.pat_switch": {
            "a switch leaves rows where they are": {
                "weight_bytes = self._weights.arrange(target.layout)": "weight_bytes = 0"
            },
            "a switch allocates an input": {
                "self._activate(target)": "self._activate(target); target.runner.input_buffers.positions = target.runner.input_buffers.positions.clone()"
            },
            "a switch allocates the KV cache": {
                "self._activate(target)": f"self._activate(target); {OTHER_KV}"
            },
        },
        f"{GPU_WORKER}.wake_up": {
            "the KV cache wakes up elsewhere": {
                "super().wake_up(tags)": f"super().wake_up(tags); {OTHER_KV}"
            },
            "buffers wake up elsewhere": {
                "buffer.copy_(buffers[name])": "buffer.data = buffers[name]"
            },
        },
        "pat_vllm.weights.inplace:InPlaceShards.refresh": {
            "new weights stay elsewhere": {"weight.tensor.copy_(new)": "pass"},
        },
        f"{LAYOUT_WEIGHTS}.refresh": {
            "rows stay the base layout's after an update": {
                "self._strategy.arrange(active)": "pass"
            },
        },
    },
    "test_cuda_graphs.py::test_graphs[shared]": {
        "pat_vllm.kv_transfer.kv_buffer:_Allocation.__torch_function__": {
            "CUDA graphs: a KV buffer for each layout": {
                "if self._shared.buffer is None:": "if True:"
            },
        },
    },
    "test_draft_graphs.py::test_a_layout_speculates_with_its_own_tp": {
        f"{CONFIG}:_make_speculative": {
            "layouts share a config": {"own = copy.copy(engine)": "own = engine"},
            "the tp of the engine": {"config.parallel_config": "engine.target_parallel_config"},
        },
    },
    "test_draft_graphs.py::test_every_draft_length_has_graphs_in_every_layout": {
        "pat_vllm.speculation:every_length": {
            "graphs for the longest drafts only": {"sorted(lengths)": "[max(lengths)]"},
        },
        f"{CONFIG}:_capture_every_draft_length": {
            "sizes for the longest drafts only": {
                "in lengths_of(engine.speculative_config)": "in ()"
            },
        },
        f"{DRAFTS}:_worth_capturing": {
            "graphs of every size for every length": {"return kept": "return list(graphs)"},
        },
        f"{DRAFTS}:_smallest_graphs": {
            "graphs of one size only": {
                "return ": "return [one for one in kinds.values() if one.num_tokens == min(each.num_tokens for each in kinds.values() if each.cg_mode == one.cg_mode)]; "
            },
        },
    },
    "test_draft_graphs.py::test_fewer_requests_than_draft_lengths[2]": {
        f"{DRAFTS}:_look_up_all": {
            "as many lengths as requests": {
                "max(vllm_max_batch_size, len(schedule))": "vllm_max_batch_size"
            },
        },
    },
    "test_gpu_worker.py::test_parameters_that_survive_a_sleep_are_the_base_layout_s": {
        f"{GPU_WORKER}._in_base": {
            "the active layout's parameters are kept": {"self._activate(self._base)": "pass"},
        },
    },
    "test_gpu_worker.py::test_shutdown": {
        f"{RUNTIME}:shut_down_beside": {
            "one runner is shut down": {"runtime.runner.shutdown()": "pass"},
            "views of KV outlive its pool": {"runtime.connector = None": "pass"},
        },
        f"{WORKER}.shutdown": {
            "shared KV outlives its pool": {"del self._weights, self._buffer": "pass"},
        },
    },
    "test_gpu_worker.py::test_sleep_and_wake_up": {
        f"{GPU_WORKER}.sleep": {
            "buffers are kept at the wrong level": {"if level == 2": "if level == 1"},
        },
        f"{GPU_WORKER}.wake_up": {
            "buffers come back with everything only": {
                'if tags is None or "weights" in tags': "if tags is None"
            },
        },
    },
    "test_gpu_worker.py::test_sleep_wake_up_discard_update_switch_and_step": {
        f"{WORKER}.sleep": {
            "weights go to sleep as they lie": {"self._weights.arrange(self._base.layout)": "pass"},
        },
        f"{GPU_WORKER}._in_base": {
            "sleep ends in the base layout": {"self._activate(active)": "pass"},
        },
        f"{WORKER}.pat_call_in_base": {
            "an update finds another layout": {"self._enter_for_a_call(self._base)": "pass"},
        },
    },
    "test_gpu_worker.py::test_what_an_engine_does_fits": {
        f"{GPU_WORKER}._maybe_get_memory_pool_context": {
            "derived weights enter a pool of their own": {
                "self._active is not self._base": "False"
            },
        },
        "pat_vllm.kv_transfer.kv_buffer:_Allocation.__torch_function__": {
            "a worker's life: a KV buffer for each layout": {
                "if self._shared.buffer is None": "if True"
            },
        },
        f"{WORKER}.compile_or_warm_up_model": {
            "not at home": {"self._enter_for_a_call(home)": "pass"},
        },
        f"{WORKER}.pat_switch": {
            "a switch leaves weights as they are": {"self._weights.arrange(target.layout)": "0"},
        },
        f"{WORKER}._activate": {
            "the warm-up takes the engine's limits": {
                "self.scheduler_config = runtime.config.scheduler_config": "pass"
            },
        },
    },
    "test_gpu_worker.py::test_what_layouts_share_is_there_once": {
        f"{GPU_WORKER}.load_model": {
            "freed shares stay": {"if len(self._runtimes) > 1 and": "if False and"},
        },
        f"{WORKER}.load_model": {
            "nothing is shared": {
                "share_buffers([*self._runtimes.values()][:count], self._handover)": "pass"
            },
        },
        f"{RUNTIME}:share_buffers": {
            "the smallest is shared": {
                "host, *others = largest_first(runtimes)": "*others, host = largest_first(runtimes)"
            },
        },
    },
    "test_happens_before.py::test_a_call_in_every_layout": {
        f"{WORKER}.pat_call_in_base": {
            "a call in every layout does not wait for rows": {
                "self._enter_for_a_call(runtime)": "self._enter(runtime)"
            },
        },
    },
    "test_happens_before.py::test_exchange": {
        f"{EXCHANGE}:CollectiveTransport.finish": {
            "exchange: NCCL is not waited for": {"work.wait()": "pass"},
            "exchange: the layer before is waited for": {
                "work.wait()": "getattr(self, 'last', work).wait(); self.last = work"
            },
        },
        f"{EXCHANGE}:CollectiveTransport.begin": {
            "exchange: two layers have one set of buffers": {
                "self._free.popleft()": "self._free[0]"
            },
        },
        f"{EXCHANGE}:CollectiveTransport.done": {
            "exchange: buffers of the layer under way are free": {
                "self._under_way.popleft()": "self._under_way.pop()"
            },
        },
        f"{EXCHANGE}:Exchange.run": {
            "exchange: sends before it packs": {
                "packs.pack(_words(source), self._transport.send)": "send = self._transport.send",
                "self._transport.begin()": "self._transport.begin(); packs.pack(_words(source), send)",
            },
            "exchange: packs on another stream": {
                "packs.pack(_words(source), self._transport.send)": f"{ELSEWHERE}packs.pack(_words(source), self._transport.send)"
            },
        },
        f"{EXCHANGE}:Exchange._finish_one": {
            "exchange: unpacks on another stream": {
                "unpacks.unpack(self._transport.finish(), self._begun.popleft())": f"{ELSEWHERE}unpacks.unpack(self._transport.finish(), self._begun.popleft())"
            },
        },
        "pat_vllm.kernels.kv:TableBlocks.__init__": {
            "exchange: makes the table of blocks on another stream": {
                "torch.add(start[:, None], heads": f"{ELSEWHERE}torch.add(start[:, None], heads"
            },
        },
    },
    "test_happens_before.py::test_loaders": {
        f"{WORKER}._enter_for_a_call": {
            "loaders: rows are not waited for": {
                "if self._weights.arrange(runtime.layout):\n            self._synchronize_device()": "self._weights.arrange(runtime.layout)"
            },
            "loaders: rows are waited for before they move": {
                "if self._weights.arrange(runtime.layout):\n            self._synchronize_device()": "self._synchronize_device(); self._weights.arrange(runtime.layout)"
            },
            "swaps are not waited for": {"self._synchronize_device()": "pass"},
        },
        f"{WORKER}.compile_or_warm_up_model": {
            "loaders: start does not wait for the rows of the home layout": {
                "self._enter_for_a_call(home)": "self._enter(home)"
            },
        },
        f"{SIDE}.wait": {
            "loaders: of a switch, only the current stream waits": {
                "self._stream.synchronize()": "self._module.current_stream().wait_stream(self._stream)"
            },
        },
        f"{WORKER}.pat_refresh_weights": {
            "loaders: replaced weights are not waited for": {"self._synchronize_device()": "pass"},
        },
    },
    "test_happens_before.py::test_loading": {
        "pat_vllm.weights.materialized:MaterializedShards._derive": {
            "loaders: shards are copied on another stream": {
                "into.copy_(": f"{ELSEWHERE}into.copy_("
            },
        },
    },
    "test_happens_before.py::test_outputs": {
        "pat_vllm.executor.lanes:_reply_to": {
            "outputs: are read before they are there": {
                "output = output.get_output()": "output.sampled_token_ids.tolist(); output = output.get_output()"
            },
        },
    },
    "test_happens_before.py::test_row_swaps": {
        "pat_vllm.weights.inplace:InPlaceShards.arrange": {
            "row swaps: on another stream": {"move.run()": f"{ELSEWHERE}move.run()"},
        },
        "pat_vllm.kernels.swap:_KernelRound.__call__": {
            "row swaps: kernels on another stream": {"self._launch(": f"{ELSEWHERE}self._launch("},
        },
        "pat_vllm.kernels.swap:_CopyRound.__call__": {
            "row swaps: staged on another stream": {"kept.copy_(x)": f"{ELSEWHERE}kept.copy_(x)"},
        },
        "pat_vllm.weights.row_order:rounds": {
            "row swaps: all rounds at once": {"not made or any": "not made or False and any"},
        },
        f"{WORKER}.sleep": {
            "row swaps: sleep does not wait": {"self._synchronize_device()": "pass"},
        },
        "pat_vllm.weights.inplace:InPlaceShards.refresh": {
            "row swaps: replaced weights are taken over on another stream": {
                "weight.tensor.copy_(new)": f"{ELSEWHERE}weight.tensor.copy_(new)"
            },
        },
    },
    "test_happens_before.py::test_switches": {
        f"{SIDE}.beside": {
            "side stream: does not wait for the current one": {
                "self._stream.wait_stream(self._module.current_stream())": "pass"
            },
            "side stream: its event is recorded after the wait": {
                "self._stream.wait_stream(self._module.current_stream())": "event = self._module.Event(); event.wait(self._stream); event.record()"
            },
            "side stream: waits for itself": {"self._module.current_stream()": "self._stream"},
            "side stream: works on a third": {
                "self._module.stream(self._stream)": "self._module.stream(self._module.Stream())"
            },
        },
        f"{WORKER}.pat_switch": {
            "side stream: is not waited for": {"self._side.wait()": "pass"},
            "side stream: the current one is waited for": {
                "self._side.wait()": "self._side.wait_for_current()"
            },
        },
    },
    "test_kv_layouts.py::test_layouts_alias_or_are_refused": {
        f"{CONFIG}:layout_kv_cache_config": {
            "KV cache layouts are not looked at": {
                "if tensor.block_stride != block or (": "if False and ("
            },
            "all KV cache layouts are refused": {
                "if tensor.block_stride != block or (": "if True or ("
            },
            "strides stay": {"tensor.block_stride //= ratio": "pass"},
            "strides are divided by the heads": {
                "tensor.block_stride //= ratio": "tensor.block_stride //= ratio * ratio"
            },
            "layers are divided, too": {
                "tensor.block_stride //= ratio": "tensor.block_stride //= ratio; tensor.layer_stride //= ratio"
            },
            "as many blocks as before": {"base.num_blocks * ratio": "base.num_blocks"},
            "a block too many": {"base.num_blocks * ratio": "base.num_blocks * ratio + 1"},
        },
        f"{CONFIG}:_narrow": {
            "as many heads as before": {"spec.num_kv_heads // ratio": "spec.num_kv_heads"},
            "half the tokens in place of half the heads": {
                "num_kv_heads=spec.num_kv_heads // ratio": "block_size=max(1, 2 // ratio)"
            },
        },
        "pat_vllm.kv_transfer.kv_buffer:SharedKVBuffer.views": {
            "the base layout's views": {"kv_cache_config.num_blocks,": "1,"},
        },
    },
    "test_kv_layouts.py::test_ratios": {
        f"{CONFIG}:block_ratio": {
            "copied heads count": {
                "// layout.kv_heads_per_rank(num_kv_heads)": "* layout.tp // num_kv_heads"
            },
            "the base layout is one of one rank": {
                "base.kv_heads_per_rank(num_kv_heads)": "num_kv_heads"
            },
        },
    },
    "test_kv_layouts.py::test_what_is_refused": {
        f"{CONFIG}:layout_kv_cache_config": {
            "the refusal names no way out": {
                "; set VLLM_KV_CACHE_LAYOUT={' or '.join(KV_LAYOUTS)}": ""
            },
        },
    },
    "test_kv_layouts.py::test_what_vllm_is_offered": {
        f"{RUNTIME}:LayoutRuntime.check_kv_cache_layouts": {
            "vLLM is offered all that backends have": {"if name in KV_LAYOUTS": "if name"},
            "vLLM is offered what PAT would choose": {"return served": "return list(KV_LAYOUTS)"},
        },
    },
    "test_late_memory.py::test_buffers_that_come_with_a_kv_cache_are_measured": {
        f"{LATE}:measure_buffers": {
            "KV is counted": {" - kv_cache)": ")"},
            "nothing is given back": {"_end_smallest_kv_cache(runtime.runner)": "pass"},
            "a workspace for each layout": {", use_attention_workspace(workspace)": ""},
            "layouts are measured in the base layout": {"enter(runtime)\n        free": "free"},
        },
        f"{RUNNERS}:use_attention_workspace": {
            "the base layout's workspace is not handed on": {
                "builder.set_workspace_buffer(workspace)": "pass"
            },
        },
    },
    "test_late_memory.py::test_graphs_are_measured_in_the_pool_that_they_share": {
        f"{LATE}:measure_graphs": {
            "memory beside steps: a pool for each layout": {"_kept_graph_pool(), ": ""},
        },
        f"{LATE}:_kept_graph_pool": {
            "vLLM is not given the pool": {"with one_graph_pool(pool):": "if pool:"},
            "nothing keeps the pool": {"with torch.cuda.graph(graph, pool=pool):": "if pool:"},
            "the pool is kept for ever": {"torch.accelerator.empty_cache()": "pass"},
        },
        f"{RUNNERS}:one_graph_pool": {
            "the pool is handed out after it is gone": {
                "torch.cuda.graph_pool_handle = original": "pass"
            },
        },
    },
    "test_late_memory.py::test_layouts_share_input_embeddings": {
        f"{RUNNERS}:input_embeddings_of": {
            "input embeddings: each layout has its own": {"if not same": "if True"},
            "input embeddings: rows that are not there": {" or rows > most_rows": ""},
            "input embeddings: all rows for few": {
                "shared.cpu[:rows], shared.gpu[:rows]": "shared.cpu, shared.gpu"
            },
            "input embeddings: another dtype": {
                ' and options.get("dtype") == shared.cpu.dtype': ""
            },
            "input embeddings: another size": {"size == (rows, columns) and ": ""},
            "input embeddings: for ever": {"GPUModelRunner._make_buffer = original": "pass"},
        },
    },
    "test_late_memory.py::test_the_kv_cache_leaves_what_layouts_take": {
        f"{GPU_WORKER}.determine_available_memory": {
            "buffers are not counted": {"sum(graphs), buffers": "sum(graphs), [0]"},
            "graphs of the base layout only": {"sum(graphs)": "graphs[0]"},
        },
        "pat_vllm.memory.sizing:kv_cache_bytes": {
            "the buffers of every layout are counted": {" - max(buffers)": ""},
            "activations of the base layout only": {
                "max(one.activations for one in layouts)": "last.activations"
            },
            "the first layout's memory is taken for all": {"layouts[-1]": "layouts[0]"},
        },
        f"{GPU_WORKER}._measure": {
            "vLLM counts the graphs, too": {
                "with graphs_measured_apart(runtime.runner):": "if runtime:"
            },
        },
        f"{WORKER}.initialize_from_config": {
            "layouts take workspaces of their own in the end": {
                ", use_attention_workspace(workspace)": ""
            },
        },
        "pat_vllm.memory.sizing:staged_share": {
            "a switch stages nothing": {"(sent + 2 / ROUNDS)": "0"},
        },
    },
    "test_layouts_in_updates.py::test_a_worker_is_known_by_its_device": {
        f"{WORKER}.init_device": {
            "workers are known by their ranks": {
                "device_of(self.local_rank, self.parallel_config.world_size)": "self.local_rank"
            },
        },
    },
    "test_layouts_in_updates.py::test_each_rank_takes_its_own": {
        f"{WORKER}.update_weights": {
            "a payload for another rank": {"update_info[self.rank]": "update_info[0]"},
        },
    },
    "test_layouts_in_updates.py::test_layouts_wait_for_whole_weights": {
        f"{LAYOUT_WEIGHTS}.refresh": {
            "weights are derived from what is missing": {"parameter.is_meta": "False"},
            "one weight that is there is enough": {"if any(": "if all("},
            "missing weights are whole": {"return False": "return True"},
            "rows leave the base layout's order": {
                "return False": "self._strategy.arrange(active); return False"
            },
        },
    },
    "test_layouts_in_updates.py::test_no_switch_in_an_update": {
        "pat_vllm.scheduler.switch:_check": {
            "a switch is made": {"not active.executor.refresh_weights()": "False"},
        },
        "pat_vllm.scheduler.layout_controller:LayoutController.go_home_if_idle": {
            "the engine goes home": {"not self._active.executor.refresh_weights()": "False"},
        },
    },
    "test_layouts_in_updates.py::test_places_in_a_trainers_group": {
        f"{CONFIG}:layout_config": {
            "ranks of a group count from zero in each replica": {
                "data_parallel_index = layout.replica_of(rank)": "data_parallel_index = 0"
            },
            "a group is as large as the engine": {
                "world_size = layout.tp": "world_size = layout.world_size"
            },
            "replica and place in it change roles": {
                "rank = layout.tp_rank_of(rank)": "rank = layout.replica_of(rank)"
            },
        },
    },
    "test_layouts_in_updates.py::test_steps_in_an_update": {
        f"{EXECUTOR}.refresh_weights": {
            "one rank speaks for all": {"not all(": "not any("},
            "nobody asks again": {"return not self._stale": "self._stale = False; return True"},
        },
        f"{EXECUTOR}.execute_model": {
            "a step runs with half of the weights": {"if has_tokens and not": "if False and not"},
            "a step in flight counts as tokens": {
                "any(step.total_num_scheduled_tokens for step in steps)": "scheduler_output.total_num_scheduled_tokens"
            },
        },
    },
    "test_platforms.py::test_a_default_start[rocm]": {
        f"{SUPPORT}:_choose_attention_backend": {
            "ROCm's own first choice": {"attention.backend is None": "False"},
        },
    },
    "test_platforms.py::test_a_layout_compiles_for_the_ranges_of_stock_vllm[sm90]": {
        f"{CONFIG}:layout_config": {
            "the engine's ranges": {"_resize_compile_ranges(config, vllm_config)": "pass"},
        },
        f"{CONFIG}:_resize_compile_ranges": {
            "the engine's ends of ranges stay": {"set(ranges) - set(added)": "set(ranges)"},
            "the user's ends of ranges are lost": {"set(ranges) - set(added)": "set()"},
            "replicas fuse all-reduces": {
                "fuse_allreduce_rms = False": "fuse_allreduce_rms = True"
            },
            "the engine's ranges are changed": {
                "copy.copy(engine.compilation_config)": "engine.compilation_config"
            },
            "norms are fused with all-reduces on one rank": {
                "pass_config.fuse_allreduce_rms = False": "mode"
            },
            "a user's ends of ranges are lost": {"sorted(set(ranges) - set(added))": "[]"},
        },
    },
    "test_platforms.py::test_options_that_cannot_be_served[sm90]": {
        f"{SUPPORT}:_unsupported": {
            "sampling in shards of the batch": {"parallel.enable_batch_sharded_sampling": "False"},
            "weights in CPU memory": {"offload.uva.cpu_offload_gb": "0"},
            "weights that are fetched from CPU memory": {
                "offload.prefetch.offload_group_size": "0"
            },
            "a transfer of weights that vLLM runs under Ray only": {
                'transfer.backend == "sharded_rdt"': "False"
            },
        },
    },
    "test_platforms.py::test_served_or_refused": {
        f"{RUNTIME}:LayoutRuntime.check_kv_cache_specs": {
            "shuffled KV passes the first check": {"if is_plain_attention(spec):": "if True:"},
        },
    },
    "test_platforms.py::test_served_or_refused[rocm-ROCM_AITER_FA-v2]": {
        f"{SUPPORT}:_choose_attention_backend": {
            "a user's choice is overridden": {"attention.backend is None": "True"},
        },
    },
    "test_platforms.py::test_served_or_refused[rocm-ROCM_ATTN-v2]": {
        f"{SUPPORT}:_unsupported": {
            "ROCM_ATTN passes the front end": {"backend.name in _PACKED_HEADS": "False"},
        },
    },
    "test_platforms.py::test_served_or_refused[rocm-TRITON_ATTN-v2]": {
        f"{CONFIG}:block_ratio": {
            "one ratio too many": {
                "base.kv_heads_per_rank(num_kv_heads) //": "2 * num_kv_heads //"
            },
        },
    },
    "test_platforms.py::test_served_or_refused[sm100-FLASHINFER-v2]": {
        f"{RUNTIME}:LayoutRuntime.check_kv_cache": {
            "alignment of blocks is compared": {
                "replace(specs[name], block_stride_alignment=alignment)": "specs[name]"
            },
        },
    },
    "test_platforms.py::test_served_or_refused[sm90-FLASHINFER-v2]": {
        f"{WORKER}.set_kv_cache_layout": {
            "only the base layout hears of the KV cache layout": {
                "self._runtimes.values()": "[self._base]"
            },
        },
    },
    "test_platforms.py::test_served_or_refused[sm90-FLASH_ATTN-v2]": {
        f"{CONFIG}:layout_config": {
            "all ranks as one group in every layout": {
                "tensor_parallel_size = layout.tp": "tensor_parallel_size = layout.world_size"
            },
        },
        f"{WORKER}.initialize_from_config": {
            "views of the base layout for all": {
                "runtime.register_kv(config, self._buffer)": "runtime.register_kv(kv_cache_config, self._buffer)"
            },
        },
    },
    "test_worker.py::test_layouts_share_the_pinned_memory_of_token_ids": {
        f"{RUNNERS}:token_ids_of": {
            "token ids for each layout": {"size[0] > most_rows": "True"},
            "all states of requests are shared": {
                "if isinstance(size, int) or": "if isinstance(size, int):\n            size = (size, columns)\n        if"
            },
            "all rows for few requests": {"shared.gpu[: size[0]]": "shared.gpu"},
        },
        f"{RUNTIME}:largest_first": {
            "the rows of a layout that has fewer": {"reverse=True": "reverse=False"},
            "rows of tokens for requests": {"if runtime.config.use_v2_model_runner": "if False"},
        },
    },
    "test_worker.py::test_peer_access_to_each_other_rank": {
        "pat_vllm.patches.groups:probe_p2p_between": {
            "ranks taken for devices": {"if not current_platform.is_cuda()": "if True"},
        },
    },
    "test_worker.py::test_states_are_gathered_by_all_ranks_or_none": {
        "pat_vllm.worker.handover:gather_states": {
            "V2 gathers nothing": {" or not handover.keeps_states": ""},
            "a rank decides for itself": {
                "gathered: list": "if not mine:\n        return {}\n    gathered: list"
            },
        },
    },
    "test_worker.py::test_titles": {
        f"{WORKER}.init_device": {
            "titled by the base layout": {"install_tp_group(all_ranks)": "pass"},
        },
    },
}
"""By test of `tests/gpuless`, function and name: what replaces what."""

MUTATIONS = [
    Mutation(name, function, changes, (f"tests/gpuless/{test}",))
    for test, functions in TABLE.items()
    for function, mistakes in functions.items()
    for name, changes in mistakes.items()
]
