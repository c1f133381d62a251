# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes on GPUs: order of work, memory, graphs, compiled code, groups, kernels, platforms."""

from __future__ import annotations

from tests.nightly.mutations.mutation import Mutation

WORKER = "pat_vllm.worker.worker:PATWorkerMixin"
UPDATES = "pat_vllm.worker.updates:WeightUpdatesMixin"
GPU_WORKER = "pat_vllm.worker.gpu_worker:PATGPUWorker"
CONFIG = "pat_vllm.worker.layout_config"
RUNTIME = "pat_vllm.worker.runtime"
EXCHANGE = "pat_vllm.kv_transfer.exchange"
LATE = "pat_vllm.worker.late_memory"
RUNNERS = "pat_vllm.patches.runners"
SUPPORT = "pat_vllm.support"
REFUSED = "pat_vllm.refused"
DEVICE = "pat_vllm.kernels.device"
LAYOUT_WEIGHTS = "pat_vllm.worker.layout_weights:LayoutWeights"
EXECUTOR = "pat_vllm.executor.executor:PATExecutorMixin"
DRAFTS = "pat_vllm.patches.drafts"

ELSEWHERE = "with torch.cuda.stream(torch.cuda.Stream()): "
POOL = "type(__import__('vllm.platforms').platforms.current_platform)._global_graph_pool"

TABLE: dict[str, dict[str, dict[str, dict[str, str]]]] = {
    "test_capture_sizes.py": {
        f"{CONFIG}:_limit_cuda_graphs": {
            "drafts are not counted": {" * config.uniform_decode_query_len": ""},
        },
        f"{CONFIG}:_resize_cuda_graphs": {
            "the user's sizes are lost": {" and _vllm_chose_sizes(engine)": ""},
            "the largest of the engine's sizes": {
                ".max_cudagraph_capture_size = chosen[-1]": ".max_cudagraph_capture_size = engine.compilation_config.cudagraph_capture_sizes[-1]"
            },
        },
    },
    "test_collectives.py::test_all_ranks_make_the_same_calls_on_their_devices[4]": {
        f"{WORKER}.pat_switch": {
            "a switch makes its exchange": {
                "kv_bytes = 0\n": "kv_bytes = 0; Exchange(device_world_group(), self.device)\n"
            },
        },
        f"{WORKER}._devices_of_group": {
            "devices in the order of ranks": {"device_of(rank, ranks) for": "rank for"},
        },
        f"{WORKER}.init_device": {
            "a rank makes its groups in another order": {
                "for layout in layouts\n": "for layout in layouts[:: -1 if self.rank == 1 else 1]\n"
            },
            "workers are known by their ranks": {
                "device_of(self.local_rank, self.parallel_config.world_size)": "self.local_rank"
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
        "pat_vllm.patches.groups:probe_p2p_between": {
            "ranks taken for devices": {"if not current_platform.is_cuda()": "if True"},
        },
    },
    "test_compile_keys.py": {
        f"{CONFIG}:layout_config": {
            "a folder of the user's for all layouts": {
                "config.compilation_config.cache_dir:": "config.compilation_config.cache_dir and False:"
            },
            "replicas share": {"layout.replica_of(rank)": "0"},
            "parts of the compiler's config are shared": {"copy.deepcopy(vllm": "copy.copy(vllm"},
        },
        f"{CONFIG}:_of_code": {
            "policies have code of their own": {'name not in ("pat", CHOSEN)': "name != CHOSEN"},
            "what is said of the choice is code": {'("pat", CHOSEN)': '("pat",)'},
            "weights are left out of the key": {'"pat_weights": resolve_weights(engine),': ""},
            "the other layouts are left out of the key": {
                '"pat_layouts": [str(one) for one in layouts_of(engine)],': ""
            },
        },
    },
    "test_compiled_kernels.py::test_beyond_2_31_words": {
        f"{DEVICE}:copy_runs_kernel": {
            "rows are counted in 32 bits": {
                "tl.program_id(0).to(tl.int64) * ROWS": "tl.program_id(0) * ROWS"
            },
        },
        "pat_vllm.kernels.swap:_sides": {
            "bytes of a swap are counted in 32 bits": {
                "a * row,": "a * row % 2**32,",
                "b * row,": "b * row % 2**32,",
            },
        },
    },
    "test_compiled_kernels.py::test_kv_kernels": {
        f"{DEVICE}:copy_runs_kernel": {
            "starts of runs are not known to be aligned": {"other=0), ALIGN)": "other=0), 1)"},
        },
    },
    "test_compiled_kernels.py::test_swaps_of_all_models[90]": {
        f"{DEVICE}:swap_kernel": {
            "addresses of a swap are not known to be aligned": {
                "a = tl.multiple_of(tl.load(entry).to(tl.pointer_type(tl.int64)), 16)": "a = tl.load(entry).to(tl.pointer_type(tl.int64))"
            },
        },
    },
    "test_cuda_graphs.py::test_graphs[pools, offloaded]": {
        f"{RUNNERS}:capture_on": {
            "each capture has a stream of its own": {"lambda _: original(stream)": "original"},
        },
    },
    "test_cuda_graphs.py::test_graphs[V2]": {
        f"{WORKER}.compile_or_warm_up_model": {
            "capture before the weights are there": {
                "language_model += times.language_model": "language_model += times.language_model; [setattr(p, 'data', p.data.clone()) for p in runtime.runner.model.parameters()]"
            },
        },
        f"{WORKER}.pat_switch": {
            "a switch keeps the runner": {
                "self._activate(target)": "self._activate(target); self.model_runner = source.runner"
            },
        },
        f"{WORKER}.initialize_from_config": {
            "CUDA graphs: a pool for each layout": {
                "runtime.check_kv_cache(config)": f"runtime.check_kv_cache(config); {POOL} = None"
            },
        },
        "pat_vllm.weights.inplace:InPlaceShards.refresh": {
            "new weights stay elsewhere": {"weight.tensor.copy_(new)": "pass"},
        },
    },
    "test_cuda_graphs.py::test_graphs[order]": {
        f"{WORKER}.compile_or_warm_up_model": {
            "a rank captures layouts in another order": {
                "for layout, runtime in self._runtimes.items():": "for layout, runtime in sorted(self._runtimes.items(), reverse=self.rank == 3):"
            },
        },
    },
    "test_draft_graphs.py": {
        f"{CONFIG}:_make_speculative": {
            "layouts share a config": {"own = copy.copy(engine)": "own = engine"},
        },
        f"{CONFIG}:_capture_every_draft_length": {
            "sizes for the longest drafts only": {
                "in lengths_of(engine.speculative_config)": "in ()"
            },
        },
        f"{DRAFTS}:_look_up_all": {
            "as many lengths as requests": {
                "max(vllm_max_batch_size, len(schedule))": "vllm_max_batch_size"
            },
        },
    },
    "test_gpu_worker.py": {
        f"{GPU_WORKER}._in_base": {
            "the active layout's parameters are kept": {"self._activate(self._base)": "pass"},
            "sleep ends in the base layout": {"self._activate(active)": "pass"},
        },
        f"{RUNTIME}:shut_down_beside": {
            "one runner is shut down": {"runtime.runner.shutdown()": "pass"},
        },
        f"{GPU_WORKER}.sleep": {
            "buffers are kept at the wrong level": {"if level == 2": "if level == 1"},
        },
        f"{UPDATES}.sleep": {
            "weights go to sleep as they lie": {"self._weights.arrange(self._base.layout)": "pass"},
        },
        f"{UPDATES}.pat_call_in_base": {
            "an update finds another layout": {"self._enter_for_a_call(self._base)": "pass"},
        },
        f"{WORKER}.compile_or_warm_up_model": {
            "not at home": {"self._enter_for_a_call(home)": "pass"},
        },
        f"{GPU_WORKER}.load_model": {
            "freed shares stay": {"if len(self._runtimes) > 1 and": "if False and"},
        },
        f"{WORKER}.load_model": {
            "nothing is shared": {"share_buffers(loaded, self._handover)": "pass"},
        },
        f"{WORKER}.init_device": {
            "a model for all layouts": {
                "self._make_runner(runtime.config)": "self._make_runner(self._base.config)"
            },
            "titled by the base layout": {"install_tp_group(all_ranks)": "pass"},
        },
        f"{LATE}:measure_buffers": {
            "nothing is given back": {"_end_smallest_kv_cache(runtime.runner)": "pass"},
        },
        f"{RUNNERS}:use_attention_workspace": {
            "the base layout's workspace is not handed on": {
                "builder.set_workspace_buffer(workspace)": "pass"
            },
        },
        f"{GPU_WORKER}.compile_or_warm_up_model": {
            "layouts capture on a stream each": {
                "with capture_on(self._capture_stream):": "if True:"
            },
        },
        f"{LATE}:measure_graphs": {
            "layouts are measured on a stream each": {"        capture_on(stream),\n": ""},
            "memory beside steps: a pool for each layout": {
                "        _kept_graph_pool(stream),\n": ""
            },
        },
        f"{LATE}:_kept_graph_pool": {
            "nothing keeps the pool": {
                "with torch.cuda.graph(graph, pool=pool, stream=stream):": "if pool:"
            },
            "the pool is kept for ever": {"torch.accelerator.empty_cache()": "pass"},
        },
        f"{RUNNERS}:one_graph_pool": {
            "the pool is handed out after it is gone": {
                "torch.cuda.graph_pool_handle = original": "pass"
            },
        },
        "pat_vllm.memory.estimate:kv_cache_bytes": {
            "the buffers of every layout are counted": {" - max(buffers)": ""},
            "activations of the base layout only": {
                "max(one.activations for one in layouts)": "last.activations"
            },
        },
        "pat_vllm.memory.estimate:staged_share": {
            "a switch stages nothing": {"(sent + 2 / ROUNDS)": "0"},
        },
        f"{WORKER}.pat_switch": {
            "a switch leaves weights as they are": {"self._weights.arrange(target.layout)": "0"},
        },
        "pat_vllm.kv_transfer.kv_buffer:_Allocation.__torch_function__": {
            "CUDA graphs: a KV buffer for each layout": {
                "if self._shared.buffer is None:": "if True:"
            },
        },
    },
    "test_happens_before.py": {
        f"{UPDATES}.pat_call_in_base": {
            "a call in every layout does not wait for rows": {
                "self._enter_for_a_call(runtime)": "self._enter(runtime)"
            },
        },
        f"{EXCHANGE}:CollectiveTransport.finish": {
            "exchange: NCCL is not waited for": {"work.wait()": "pass"},
        },
        f"{EXCHANGE}:CollectiveTransport.begin": {
            "exchange: two layers have one set of buffers": {
                "self._free.popleft()": "self._free[0]"
            },
        },
        f"{UPDATES}._enter_for_a_call": {
            "loaders: neither rows nor steps are waited for": {
                "self._synchronize_device()": "pass"
            },
            "buckets: rows are in the active layout's order": {"_enter(": "_activate("},
        },
        "pat_vllm.weights.model_weights:derive": {
            "loaders: shards are copied on another stream": {
                "into.copy_(": f"{ELSEWHERE}into.copy_("
            },
        },
        "pat_vllm.executor.lanes:_reply_to": {
            "outputs: are read before they are there": {
                "output = output.get_output()": "output.sampled_token_ids.tolist(); output = output.get_output()"
            },
        },
        "pat_vllm.weights.inplace:InPlaceShards.arrange": {
            "row swaps: on another stream": {"move.run()": f"{ELSEWHERE}move.run()"},
        },
        "pat_vllm.weights.row_order:rounds": {
            "row swaps: all rounds at once": {"not made or any": "not made or False and any"},
        },
        f"{UPDATES}.sleep": {
            "row swaps: sleep does not wait": {"self._synchronize_device()": "pass"},
        },
        f"{WORKER}.pat_switch": {
            "side stream: is not waited for": {"self._side.wait()": "pass"},
        },
    },
    "test_kv_layouts.py": {
        f"{CONFIG}:layout_kv_cache_config": {
            "KV cache layouts are not looked at": {
                "if tensor.block_stride != block or (": "if False and ("
            },
            "strides are divided by the heads": {
                "tensor.block_stride //= ratio": "tensor.block_stride //= ratio * ratio"
            },
        },
        "pat_vllm.kv_transfer.kv_buffer:SharedKVBuffer.views": {
            "the base layout's views": {"kv_cache_config.num_blocks,": "1,"},
        },
        "pat_vllm.kinds:StateKind.ratio": {
            "copied heads count": {
                "len(self.heads_of(base, 0)) // len(self.heads_of(layout, 0))": (
                    "layout.tp // base.tp"
                )
            },
        },
        f"{RUNTIME}:LayoutRuntime.check_kv_cache_layouts": {
            "vLLM is offered all that backends have": {"if name in KV_LAYOUTS": "if name"},
        },
    },
    "test_layouts_in_updates.py": {
        f"{UPDATES}.update_weights": {
            "a payload for another rank": {"update_info[self.rank]": "update_info[0]"},
        },
        f"{LAYOUT_WEIGHTS}.refresh": {
            "weights are derived from what is missing": {"tensor.is_meta": "False"},
            "rows leave the base layout's order": {
                "return False": "self._strategy.arrange(active); return False"
            },
        },
        "pat_vllm.scheduler.switch:_check": {
            "a switch is made": {"not active.executor.refresh_weights()": "False"},
        },
        "pat_vllm.scheduler.replica_set:ReplicaSet.schedule": {
            "requests run with half of the weights": {"(waits and replica.num_seqs)": "False"},
            "a paused engine keeps gone requests": {
                "paused = self.pause_state == PauseState.PAUSED_ALL or": "paused ="
            },
        },
        "pat_vllm.executor.calls:WeightCalls.keep_weights": {
            "buffers of layouts are discarded": {"if method in _REFUSED:": "if False:"},
        },
        f"{EXECUTOR}.waits_for_weights": {
            "requests wait for ever": {"waited < envs.VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": "True"},
        },
        f"{CONFIG}:layout_config": {
            "ranks of a group count from zero in each replica": {
                "data_parallel_index = layout.replica_of(rank)": "data_parallel_index = 0"
            },
        },
        f"{EXECUTOR}.refresh_weights": {
            "one rank speaks for all": {"not all(": "not any("},
            "workers are asked at each step": {"and not self._missing ": ""},
        },
        f"{EXECUTOR}.execute_model": {
            "a step runs with half of the weights": {"if has_tokens and not": "if False and not"},
            "a step in flight counts as tokens": {
                "any(step.total_num_scheduled_tokens for step in steps)": "scheduler_output.total_num_scheduled_tokens"
            },
        },
    },
    "test_platforms.py::test_kernels_are_tuned_for_each_layout[sm90]": {
        "pat_vllm.plugin:_executor_class": {
            "a layout's config is taken for an engine's": {
                "if layout_name(vllm_config) is not None:": "if False:"
            },
        },
    },
    "test_start.py::test_a_start_with_defaults[sm90:Qwen3-30B-A3B]": {
        "pat_vllm.plugin:_executor_class": {
            "a layout's config, which vLLM copies at start, is taken for an engine's": {
                "if layout_name(vllm_config) is not None:": "if False:"
            },
        },
    },
    "test_platforms.py::test_a_default_start_and_every_other_backend[rocm]": {
        f"{SUPPORT}:_choose_attention_backend": {
            "ROCm's own first choice": {"attention.backend is None": "False"},
        },
    },
    "test_platforms.py::test_a_layout_compiles_for_the_ranges_of_stock_vllm[sm90]": {
        f"{CONFIG}:layout_config": {
            "the engine's ranges": {"_resize_compile_ranges(config, vllm_config)": "pass"},
        },
    },
    "test_platforms.py::test_what_slows_experts_is_said[sm100]": {
        "pat_vllm.weights.experts:what_slows": {
            "another choice of vLLM's is not told": {
                "stock is not UnquantizedMoeBackend.TRITON": "False"
            },
            "the experts of all layouts have one shape": {
                "layer: Any = experts ": "layer: Any = of_layouts[0][1] "
            },
        },
    },
    "test_platforms.py::test_served_or_refused[rocm-ROCM_ATTN-v2]": {
        f"{REFUSED}:_attention_backend": {
            "ROCM_ATTN passes the front end": {"backend.name in _PACKED_HEADS": "False"},
        },
    },
    "test_platforms.py::test_served_or_refused[rocm-TRITON_ATTN-v2]": {
        "pat_vllm.kinds:StateKind.ratio": {
            "one ratio too many": {
                "len(self.heads_of(base, 0)) //": "2 * len(self.heads_of(base, 0)) //"
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
                "self._each_layout()": "[self._base]"
            },
        },
    },
    "test_worker.py": {
        f"{RUNNERS}:input_embeddings_of": {
            "input embeddings: each layout has its own": {"if not same": "if True"},
        },
        f"{RUNNERS}:token_ids_of": {
            "token ids for each layout": {"size[0] > most_rows": "True"},
            "all rows for few requests": {"shared.gpu[: size[0]]": "shared.gpu"},
        },
        f"{RUNTIME}:largest_first": {
            "rows of tokens for requests": {"if runtime.config.use_v2_model_runner": "if False"},
        },
        "pat_vllm.worker.handover:gather_states": {
            "V2 gathers nothing": {" or not handover.keeps_states": ""},
            "a rank decides for itself": {
                "gathered: list": "if not mine:\n        return {}\n    gathered: list"
            },
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
MUTATIONS += [
    Mutation(name, function, changes, ("tests/gpuless/test_replaced.py",))
    for name, function, changes in [
        (
            "what is replaced of vLLM is not listed",
            "tests.gpuless.rank:live",
            {
                'replace(gpu_worker.Worker, "compile_or_warm_up_model", capture)': (
                    "gpu_worker.Worker.compile_or_warm_up_model = capture"
                )
            },
        ),
        (
            "what is listed is not replaced",
            "tests.gpuless.communicators:_custom_all_reduce",
            {'replace(custom_all_reduce, "custom_ar", True)': "pass"},
        ),
    ]
]
