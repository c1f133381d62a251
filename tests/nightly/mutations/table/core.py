# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes in schedulers and switches, the executor, KV transfer, weights, kernels and patches."""

from __future__ import annotations

from tests.nightly.mutations.mutation import Mutation

SCHEDULER = "tests/vllm/scheduler/test_scheduler.py"
ADMISSION = "tests/vllm/scheduler/test_admission.py"
POOLS = "tests/vllm/scheduler/test_block_pools.py"
CACHES = "tests/vllm/scheduler/test_prefix_cache.py"
LIMITS = "tests/vllm/scheduler/test_limits.py"
SPECULATION = "tests/vllm/scheduler/test_speculation.py"
DRAFT_LENGTHS = "tests/unit/predictor/test_draft_lengths.py"
EXECUTOR = "tests/vllm/executor/test_executor.py"
LANES = "tests/vllm/executor/test_lanes.py"
EXCHANGE = "tests/vllm/kv_transfer/test_exchange.py"
FULL_SWITCHES = f"{EXCHANGE}::test_full_switches_arrive_in_rounds"
SEGMENTS = f"{EXCHANGE}::test_others_see_the_last_barrier_while_a_rank_makes_room"
OTHER_HOST = f"{EXCHANGE}::test_a_file_of_the_same_path_on_another_host_is_not_opened"
UNREACHABLE = f"{EXCHANGE}::test_ranks_agree_not_to_share_memory_when_one_cannot"
ROUNDS = "tests/unit/kv_transfer/test_rounds.py"
WEIGHTS = "tests/vllm/weights/test_weights.py"
INPLACE = "tests/vllm/weights/test_inplace.py"
EXPERTS = "tests/vllm/weights/test_experts.py"
LATENT = "tests/vllm/weights/test_latent.py"
KERNELS = "tests/vllm/kernels/test_kernels.py"
PATCHES = "tests/vllm/patches/test_patches.py"
DEAD = "tests/vllm/patches/test_dead_engine.py"
DRAFTS = "tests/vllm/patches/test_drafts.py"
REJECTION = "tests/vllm/patches/test_rejection.py"

Row = tuple[str, str, str, str, str]
"""The mistake, the function, what is replaced, by what, and the tests that must see it."""

# fmt: off
_SCHEDULER: list[Row] = [
    ("a switch loses requests that wait with their KV", "switch:_carried", "*scheduler.kv_holding_waiting, ", "", LIMITS),
    ("new schedulers are not told of the KV that has arrived", "switch_plan:Carry.hand_over", "finished_recving=set(load.blocks)", "finished_recving=set()", LIMITS),
    ("carried requests are new ones to their workers", "switch_plan:_rewind", "request.num_preemptions += 1", "pass", SPECULATION),
    ("drafts are kept at a switch", "switch_plan:_rewind", "request.spec_token_ids = []", "pass", SPECULATION),
    ("a failed plan loses drafts", "switch:_Undo.apply", "self.request.spec_token_ids = self.spec_token_ids", "pass", SPECULATION),
    ("a failed plan leaves requests preempted", "switch:_plan", "            one.apply()", "            pass", SCHEDULER),
    ("a failed plan keeps its block pools", "switch:_plan", "active.factory.discard(fresh)", "pass", SCHEDULER),
    ("steps are drained before a switch is refused", "switch:switch", "    _check(active)\n\n    # 2. Quiesce.\n    active.drain()\n", "    active.drain()\n    _check(active)\n", SCHEDULER),
    ("streaming-input sessions are carried", "switch:_check", "request.resumable or ", "", SCHEDULER),
    ("KV is looked for in the replica that it goes to", "switch_plan:_request_blocks", "replica.index, old", "target_replica, old", ADMISSION),
    ("cached blocks come to other hashes' blocks", "prefix_cache:_take_up", "[block.block_id for block in blocks]", "[block.block_id for block in reversed(blocks)]", CACHES),
    ("the most wanted cached block is evicted first", "prefix_cache:_take_up", "append_n(taken[::-1])", "append_n(taken)", CACHES),
    ("cached blocks stay in use", "prefix_cache:_take_up", "pool.free_block_queue.append_n(taken[::-1])", "pass", CACHES),
    ("a chain is looked for in the first replica", "prefix_cache:place_chains", "cached.index(longest)", "0", CACHES),
    ("chains have holes", "pat_vllm.chains:_what_fits", "if all(map(all, found)):", "if True:", CACHES),
    ("what waits loses what is cached for it", "switch_plan:_carry_caches", "if one.reads_cache and one", "if False and one", CACHES),
    ("blocks that come with a request are carried twice", "switch_plan:_carry_caches", "hashes.update(one.request.block_hashes[first:full])", "pass", CACHES),
    ("caches of old weights are carried", "replica_set:ReplicaSet.may_carry_caches", "self._cached_with in (None, self.executor.weights_version)", "True", CACHES),
    ("caches are carried across a reset", "replica_set:ReplicaSet.reset_prefix_cache", "self.chains.forget()", "pass", CACHES),
    ("what is never asked for is carried", "switch:_plan", "if pays and active", "if active", CACHES),
    ("the router does not look into caches", "replica_set:ReplicaSet._route", "route(prefixes, loads, cached)", "route(prefixes, loads)", CACHES),
    ("samples of a prompt count as next turns", "replica_set:ReplicaSet._route", "if self._router.knows(prompt)", "if False", CACHES),
    ("blocks in use count as asked for again", "prefix_cache:num_unused", "return len(places) - bisect_left(places, True, key=is_unused)", "return len(places)", CACHES),
    ("what found no room is taken for KV that comes", "switch_plan:_allocate", "replica.connector.withdraw()", "pass", ADMISSION),
    ("admission counts loads again and again", "pat_vllm.patches.schedulers:linear_time_admission", "new.clear()", "pass", PATCHES),
    ("admitted loads are forgotten", "pat_vllm.patches.schedulers:linear_time_admission", "scheduler._inflight_prefills.update(counted)", "pass", ADMISSION),
    ("requests stay in place between layouts of different tp", "in_place:keeps_places", "source.shares_kv(target) and all(", "all(", SCHEDULER),
    ("requests stay only where blocks are left over", "in_place:keeps_places", "<= replica", "< replica", SCHEDULER),
    ("the rest of a prompt needs no blocks", "in_place:_blocks_of_a_step", "request.num_tokens - request.num_computed_tokens + lookahead", "lookahead", SCHEDULER),
    ("the other layout's workers are told of requests as of known ones", "pat_vllm.patches.schedulers:queue_with_blocks", "scheduler.prev_step_scheduled_req_ids.clear()", "pass", SCHEDULER),
    ("accepted tokens are dropped at a switch", "replica_set:ReplicaSet.drain", "self.finish(self.executor.finished(wait_for_all=True))", "results = self.executor.finished(wait_for_all=True)\n        [one.output.sampled_token_ids.__setitem__(slice(None), [t[:1] for t in one.output.sampled_token_ids]) for one in results]\n        self.finish(results)", SPECULATION),
    ("drafts come to another replica", "replica_set:ReplicaSet.finish", "self._collect(replica.finish(result.output, result.drafts))", "self._collect(replica.finish(result.output, None))\n            if result.drafts is not None:\n                self.replicas[result.replica - 1].scheduler.update_draft_token_ids(result.drafts)", SPECULATION),
    ("loads of replicas do not count in routing", "replica_set:ReplicaSet._route", "[one.num_seqs for one in self.replicas]", "[0 for _ in self.replicas]", SCHEDULER),
    ("a switch forgets the outputs of steps that reached no worker", "replica_set:ReplicaSet.drain", "self.finish(())", "self._empty_steps.clear()", SCHEDULER),
    ("workers do not hear what has ended", "replica:is_empty_step", "        or step.finished_req_ids\n", "", SPECULATION),
    ("blocks of preempted requests are held back for loads", "replica:ReplicaFactory.make", "free_blocks_at_once(replica.scheduler)", "pass", SCHEDULER),
    ("a discarded scheduler's requests keep their blocks", "block_pools:BlockPools.keep", "manager.free(request)", "pass", POOLS),
    ("a pool of another kind is taken", "block_pools:BlockPools._take", "frozenset(options.items())", "frozenset()", POOLS),
    ("a pool keeps the metrics of its last scheduler", "block_pools:BlockPools._take", "pool.metrics_collector = metrics_collector", "pass", POOLS),
    ("live requests of the first replica only", "layout_controller:LayoutController._follow_policy", "for replica in active.replicas", "for replica in active.replicas[:1]", SCHEDULER),
    ("live requests of replicas are not in the report", "layout_controller:LayoutController._follow_policy", "active.layout, num_seqs, several", "active.layout, num_seqs", SCHEDULER),
    ("the policy overrules a user", "layout_controller:LayoutController._follow_policy", "num_seqs == 0 or self._forced or ", "num_seqs == 0 or ", SCHEDULER),
    ("a policy is asked again at once after a refusal", "layout_controller:LayoutController._refused", "now + back_off", "now", SCHEDULER),
    ("a withdrawn switch is made", "layout_controller:LayoutController._run_requested", "continue  # whoever asked has given up", "pass", SCHEDULER),
    ("a step in flight hides that the work is over", "layout_controller:LayoutController.finish_work", "self._active.drain()", "pass", SCHEDULER),
    ("a policy hears of a switch before it is made", "layout_controller:LayoutController._switch", "        active.replace(target, replicas)\n        self.costs.observe(report)\n        self._monitor.switched(report, replicas)\n", "        self._monitor.switched(report, replicas)\n        active.replace(target, replicas)\n", SCHEDULER),
    ("an engine goes on whose hand-over has failed", "layout_controller:LayoutController._switch", "active.executor.fail(error)", "pass", SCHEDULER),
    ("0 is no draft length", "speculation:DraftLengths._table", "requested is not None", "requested", SPECULATION),
    ("the policy's draft lengths are not heard", "speculation:DraftLengths._table", "planned or self", "self", SPECULATION),
    ("draft lengths are not written after a plan", "speculation:DraftLengths.write", "self._written == (requested, of_policy, replicas)", "self._written[::2] == (requested, replicas)", SPECULATION),
    ("a requested draft length holds for ever", "speculation:DraftLengths.release", "self._requested = None", "pass", SPECULATION),
    ("a draft length is in use before a step", "speculation:DraftLengths.request", "self._asked.put(length)", "self._requested = length", SPECULATION),
    ("what was not sampled counts as rejected", "requests:counted_drafts", "- sum(map(bool, generated))", "- len(generated)", SPECULATION),
    ("chunks of prompts decode", "requests:step_shape", "tokens == requests + drafts and not", "tokens >= requests + drafts and not", SPECULATION),
    ("steps of decodes do not draft", "requests:step_shape", "0, busy, drafts, k)", "0, busy, drafts)", SPECULATION),
    ("prompts of embeddings are alike", "requests:prompt_key", "tuple(embeds.shape), data.view(torch.uint8).numpy().tobytes()", "tuple(embeds.shape)", SCHEDULER),
    ("a policy hears of the next drafts' length", "monitor:Monitor.stepped", "self.policy.drafted(now, asked,", "self.policy.drafted(now, shape.k,", SPECULATION),
    ("drafts are expected after a switch", "monitor:Monitor.switched", "self._asked.clear()", "pass", SPECULATION),
    ("merged outputs have the time of the first", "stats:merge_outputs", "max(merged.timestamp", "min(merged.timestamp", SCHEDULER),
    ("a layout's replicas have the engine's limit", "pat_vllm.worker.layout_config:_scheduler_config", "config.max_num_seqs = limits.max_num_seqs", "pass", LIMITS),
    ("bitmasks have the engine's size", "pat_vllm.patches.schedulers:make_room_for_grammars", "config.scheduler_config.max_num_seqs = max_num_seqs", "pass", LIMITS),
]

_POLICY: list[Row] = [
    ("a policy begins with draft lengths", "pat_vllm.predictor.adaptive:AdaptivePolicy.__init__", "self.drafts = self._no_drafts", "pass", DRAFT_LENGTHS),
    ("draft lengths of a batch's tail hold for the next", "pat_vllm.predictor.adaptive:AdaptivePolicy._open", "self.drafts = plan.drafts", "pass", DRAFT_LENGTHS),
    ("planned draft lengths are not used", "pat_vllm.predictor.adaptive:AdaptivePolicy._decide", "self.drafts = plan.drafts", "pass", DRAFT_LENGTHS),
    ("a plan does not know what is accepted", "pat_vllm.predictor.adaptive:AdaptivePolicy._outlook", "self._drafting = self._acceptance.expected()", "pass", DRAFT_LENGTHS),
]

_EXECUTOR: list[Row] = [
    ("rings are kept at shutdown", "lanes:Lanes.shutdown", "rings, self._rings = self._rings, {}", "rings = self._rings", LANES),
    ("sockets stay at shutdown", "lanes:Lanes.shutdown", "remove_sockets(ring.handle)", "pass", LANES),
    ("a step without tokens sends the drafts of the step before", "lanes:WorkerLanes.serve", "output = worker.execute_model(payload)", "output = worker.execute_model(payload); drafts = worker.drafts_of_step(constrained=False)", LANES),
    ("drafts are lost on their way", "lanes:WorkerLanes.serve", "self._answer(output, drafts)", "self._answer(output, None)", LANES),
    ("a worker that waits for a step looks stuck", "lanes:_at_rest", "with module.get_watch_dog().disable():\n        yield", "yield", LANES),
    ("a worker that makes steps looks stuck", "lanes:_at_rest", "module.get_watch_dog().feed()", "pass", LANES),
    ("every rank replies", "lanes:WorkerLanes.serve", "layout.tp_rank_of(self._rank) == 0", "True", LANES),
    ("queues of groups are left", "leftovers:made_here", "(queue, *(mq.handle for mq in broadcasters if mq is not None))", "(queue,)", LANES),
    ("shared memory of groups is left", "leftovers:Leftovers.remove", '(path, *_SHARED_MEMORY.glob(f"{glob.escape(path.name)}-*"))', "(path,)", LANES),
    ("a user's file is taken for a socket", "leftovers:_remove", "is_made(path.lstat().st_mode)", "True", LANES),
    ("a socket's path ends at a hash sign", "leftovers:remove_sockets", 'address.removeprefix("ipc://")', 'address.removeprefix("ipc://").partition("#")[0]', LANES),
    ("a failed switch does not end the engine", "executor:_fatal", "self.fail(error)", "pass", f"{EXECUTOR}::test_a_rank_that_never_replies_fails_the_engine"),
    ("an update leaves other layouts' weights as they were", "executor:PATExecutorMixin.collective_rpc", "self._stale, self._missing = True, False", "pass", EXECUTOR),
    ("weights are derived while the engine sleeps", "executor:PATExecutorMixin.refresh_weights", "self._stale and not self._missing and not self.is_sleeping", "self._stale and not self._missing", EXECUTOR),
    ("a switch takes replies to calls before it", "executor:PATExecutorMixin._read_earlier_replies", "if self.futures_queue:", "if False:", EXECUTOR),
    ("the executor stays in the layout that was left", "executor:PATExecutorMixin.switch", "self.layout = command.target", "pass", EXECUTOR),
    ("a drain ends with the first results", "executor:PATExecutorMixin.finished", "(results and not wait_for_all)", "results", EXECUTOR),
    ("a call that failed in a worker succeeds", "calls:_checked", "isinstance(reply, CallFailed)", "False", EXECUTOR),
    ("sleep is called on the base layout's model", "calls:discards_weights", "method in _DISCARD_WEIGHTS", "method not in _DISCARD_WEIGHTS", EXECUTOR),
]

_KV_TRANSFER: list[Row] = [
    ("a round is written before all is packed", "exchange:Exchange._run_rounds", "            packs.pack(views[index][0], part)\n", "            pass\n", EXCHANGE),
    ("all of a layer is one round", "exchange:Exchange._prepare_rounds", "moves.split(rounds)", "moves.split(1)", FULL_SWITCHES),
    ("two layers may always be staged", "exchange:Exchange.staging", "staged > room", "False", FULL_SWITCHES),
    ("buffers are not given back", "exchange:CollectiveTransport.release", "self._kept.clear()", "pass", FULL_SWITCHES),
    ("the last layers do not arrive", "exchange:Exchange.staging", "                self._finish_one()", "                self._begun.clear()", EXCHANGE),
    ("bytes of rounds are not summed", "exchange:Exchange._run_rounds", "self.bytes_sent += part.nbytes", "self.bytes_sent = part.nbytes", FULL_SWITCHES),
    ("two layers are staged without room", "exchange:CollectiveTransport.prepare", "2 if 2 * num_bytes <= room else 1", "2", EXCHANGE),
    ("parts of a shared segment lie over each other", "shared_memory:SharedMemoryTransport.prepare", "start += count * size", "start += count", EXCHANGE),
    ("torch makes a shared segment larger", "shared_memory:_Segment.resize", "os.truncate(self._path, _PAGE + size)", "pass", SEGMENTS),
    ("any file of a segment's path is opened", "shared_memory:_Segment.attach", 'os.readlink(path) == f"/memfd:{name} (deleted)"', "os.path.exists(path)", OTHER_HOST),
    ("ranks share memory where one cannot", "shared_memory:SharedMemoryTransport.connect", "all(everywhere)", "any(everywhere)", UNREACHABLE),
    ("rounds leave the rest of a move out", "plan:_part", "(i + 1) * total // parts", "(i + 1) * (total // parts)", ROUNDS),
    ("a request's last block stays behind", "connector:PATConnector.update_state_after_alloc", "-(-tokens // size)", "tokens // size", ADMISSION),
]

_WEIGHTS: list[Row] = [
    ("fused matrices begin at the same row", "shards:EvenPartition.shard", "start + tp_rank * rows", "tp_rank * rows", WEIGHTS),
    ("replicated KV heads are those of the rank", "shards:QKVPartition.shard", "tp_rank // copies * kv_heads", "tp_rank * kv_heads % self.total_kv_heads", WEIGHTS),
    ("heads of v have the size of those of k", "shards:QKVPartition.shard", "(v_start + first_kv_head * self.v_head_size", "(v_start + first_kv_head * self.head_size", WEIGHTS),
    ("a shard of the vocabulary has no padding", "shards:VocabPartition.shard", ", size=rows)", ")", WEIGHTS),
    ("spread experts are cut, too", "shards:Cut.ways", "self.experts in (None, place.experts)", "self.experts != 'ep' or place.experts == 'ep'", EXPERTS),
    ("copies of absorbed weights stay old", "latent:renew_absorbed", "not _is_view(module)", "False", LATENT),
    ("absorbed weights are the checkpoint's", "model_weights:model_weights", "if isinstance(module, MLAAttention):", "if False:", LATENT),
    ("padding is not written", "model_weights:derive", "weight.tensor.zero_()", "pass", WEIGHTS),
    ("plain weights are kept after all layouts are filled", "materialized:MaterializedShards.release", "self._base = None", "pass", WEIGHTS),
    ("a subclass's own weight loader is overlooked", "model_weights:_layer_class", "_weight_loaders(type(module)) == _weight_loaders(layer)", "True", WEIGHTS),
    ("weights may be tied in one layout only", "model_weights:matching_weights", "sources.setdefault(weight.storage, match.storage) != match.storage", "False", WEIGHTS),
    ("other dtypes are overlooked", "model_weights:_check_match", "weight.cuts != base.cuts or weight.tensor.dtype != base.tensor.dtype", "weight.cuts != base.cuts", WEIGHTS),
    ("a tied head is tied after its weights were taken", "loaders:BaseLayoutLoader.load_weights", "tie_word_embeddings(model, model_config)", "pass", WEIGHTS),
    ("layouts compare head and embeddings for themselves", "pat_vllm.patches.weights:tie_word_embeddings", "model_config.word_embeddings_untied_by_checkpoint = False", "pass", WEIGHTS),
    ("a parameter that an update replaced stays apart", "inplace:InPlaceShards.refresh", "weight.bind(weight.tensor)", "pass", INPLACE),
    ("the arranged layout is not noted", "inplace:InPlaceShards.arrange", "self._arranged = layout", "pass", INPLACE),
    ("packed weights are not noticed", "inplace:InPlaceShards.release", "weight.current.data_ptr() != view.data_ptr()", "False", INPLACE),
    ("gate and up are cut as one matrix", "experts:expert_cuts", "(width, width)", "(2 * width,)", EXPERTS),
    ("spread experts are placed by the TP group", "experts:expert_place", 'Place(parallel.ep_size, parallel.ep_rank, "ep")', "Place(parallel.ep_size, parallel.ep_rank)", EXPERTS),
    ("experts of other data-parallel ranks are overlooked", "experts:_reasons", "parallel.use_all2all_kernels or parallel.dp_size > 1 or", "parallel.use_all2all_kernels or", EXPERTS),
    ("experts that vLLM has packed are overlooked", "experts:_reasons", "method.moe_kernel is not None", "False", EXPERTS),
]

_KERNELS: list[Row] = [
    ("rows of the first expert only trade places", "swap:_sides", "(tensor.shape[:dim]), -1)", "(tensor.shape[:dim]), -1)[:1]", EXPERTS),
    ("ranges that overlap are accepted", "swap:_check_disjoint", "(starts[order][1:] < ends[order][:-1]).any()", "False", KERNELS),
    ("one side is overwritten", "swap:_CopyRound.__call__", "y.copy_(kept)", "y.copy_(x)", KERNELS),
    ("bytes of one side count", "swap:prepare", "sum(2 * a.nbytes", "sum(a.nbytes", KERNELS),
    ("every run comes from the first staged blocks", "kv:_IndexedPiece.unpack", "staged[done : done + count]", "staged[:count]", KERNELS),
    ("blocks that ascend are one run", "kv:_runs", "sum(runs[-1]) == block", "runs[-1][0] < block", KERNELS),
    ("pieces of a peer lie over each other", "kv:IndexedBlocks.__init__", "pieces[-1].end if pieces else 0\n                shape", "0\n                shape", KERNELS),
    ("padding between heads is copied", "kv:TableBlocks.__init__", "self._width, self._stride = content, token_stride", "self._width, self._stride = content, content", KERNELS),
    ("all runs begin in the first block", "kv:TableBlocks.__init__", "ids.mul_(block_stride)", "ids.mul_(0)", KERNELS),
    ("a chunk is swapped a word too far", "device:swap_kernel", "inside = at < words", "inside = at <= words", KERNELS),
]

_PATCHES: list[Row] = [
    ("a step of 0 drafts asks for the drafter", "drafts:skip_empty_drafts", "config if drafts or not samples else None", "config", DRAFTS),
    ("a runner does not speculate after an empty step", "drafts:skip_empty_drafts", "config if drafts or not samples else None", "config if drafts else None", DRAFTS),
    ("drafts are not verified in a step of 0", "drafts:skip_empty_drafts", "step.scheduled_spec_decode_tokens or step.num", "step.num", DRAFTS),
    ("ngram_gpu is asked for its longest drafts", "drafts:_propose_some", "drafts[:, :num_speculative_tokens]", "drafts", DRAFTS),
    ("no request drafts near the longest context", "drafts:draft_near_the_longest_context", 'runner.speculative_config.method == "ngram"', 'runner.speculative_config.method == "ngram_gpu"', DRAFTS),
    ("drafts are verified by the temperature of the request before", "drafts:_of_each_token", "x.repeat", "x.roll(1).repeat", REJECTION),
    ("greedy requests are divided by zero", "drafts:_of_each_token", "of_tokens.masked_fill(of_tokens == replace_from, replace_to)", "of_tokens", REJECTION),
    ("the user's number of numba's threads is replaced", "drafts:keep_openmp_threads", "if name in os.environ:", "if False:", DRAFTS),
    ("methods are replaced twice", "replacing:replace", "getattr(original, _PATCHED, False)", "False", PATCHES),
    ("sends of two threads meet", "front_end:serialize_sends", "with lock:", "if lock:", PATCHES),
    ("calls wait for an engine that has said that it is dead", "dead_engine:_set_dead", "if dead and client", "if client and not dead and client", DEAD),
    ("who waits again for a dead engine waits for ever", "dead_engine:end_waits_for_dead_engines", "client.outputs_queue.put_nowait(_error(client))", "pass", DEAD),
    ("coroutines wait for a dead engine", "dead_engine:_end_waits", "future.get_loop().call_soon_threadsafe(_fail, future, _error(client))", "pass", DEAD),
    ("a core does not tell of what it dies", "dead_engine:tell_cause_of_death", "core.output_queue.put_nowait((client, EngineCoreOutputs(utility_output=answer)))", "pass", DEAD),
    ("a ring that is removed already is a traceback", "dead_engine:let_others_remove_rings", "suppress(FileNotFoundError)", "suppress()", DEAD),
    ("Ctrl-C does not end a start", "front_end:interrupt_starts", "interrupt = raised", "pass", PATCHES),
    ("a stopped worker outlives its core", "front_end:let_engine_cores_end", "worker.kill()", "pass", DEAD),
    ("generate waits for a dead core", "dead_engine:_end_waits", "client.outputs_queue.put_nowait(_error(client))", "pass", DEAD),
    ("a narrower layout uses the last rows of counters", "runners:share_penalty_counts", "shared.output_bin_counts[:rows]", "shared.output_bin_counts[-rows:]", PATCHES),
]

# fmt: on

_ROWS = {
    "scheduler": _SCHEDULER,
    "predictor": _POLICY,
    "executor": _EXECUTOR,
    "kv_transfer": _KV_TRANSFER,
    "weights": _WEIGHTS,
    "kernels": _KERNELS,
    "patches": _PATCHES,
}

MUTATIONS = [
    Mutation(
        name,
        function if function.startswith("pat_vllm") else f"pat_vllm.{package}.{function}",
        {old: new},
        (tests,),
    )
    for package, rows in _ROWS.items()
    for name, function, old, new, tests in rows
]
