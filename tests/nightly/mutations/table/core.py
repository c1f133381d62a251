# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes in schedulers and switches, the executor, KV transfer, weights, kernels and patches."""

from __future__ import annotations

from tests.nightly.mutations.mutation import mutations

# fmt: off
MUTATIONS = mutations({
    "tests/vllm/scheduler/test_limits.py": [
        ("a switch loses requests that wait with their KV", "scheduler.switching.switch:_carried", "*scheduler.kv_holding_waiting, ", ""),
        ("new schedulers are not told of the KV that has arrived", "scheduler.switching.switch_plan:SwitchPlan.hand_over", "finished_recving=set(admission.blocks)", "finished_recving=set()"),
        ("bitmasks have the engine's size", "patches.schedulers:make_room_for_grammars", "config.scheduler_config.max_num_seqs = max_num_seqs", "pass"),
    ],
    "tests/vllm/scheduler/test_speculation.py": [
        ("carried requests are new ones to their workers", "scheduler.switching.switch_plan:_rewind", "request.num_preemptions += 1", "pass"),
        ("a failed plan loses drafts", "scheduler.switching.switch:_plan", "in fields.items():", "in [*fields.items()][:-1]:"),
        ("accepted tokens are dropped at a switch", "scheduler.replica_set:ReplicaSet.drain", "self.finish(self.executor.finished(wait_for_all=True))", "results = self.executor.finished(wait_for_all=True)\n            [one.output.sampled_token_ids.__setitem__(slice(None), [t[:1] for t in one.output.sampled_token_ids]) for one in results]\n            self.finish(results)"),
        ("drafts come to another replica", "scheduler.replica_set:ReplicaSet.finish", "self._collect(replica.finish(result.output, result.drafts))", "self._collect(replica.finish(result.output, None))\n            if result.drafts is not None:\n                self.replicas[result.replica - 1].scheduler.update_draft_token_ids(result.drafts)"),
        ("workers do not hear what has ended", "scheduler.replica:is_empty_step", "        or step.finished_req_ids\n", ""),
        ("0 is no draft length", "scheduler.speculation:DraftLengths._table", "requested is not None", "requested"),
        ("draft lengths are not written after a plan", "scheduler.speculation:DraftLengths.write", "self._written == now", "self._written[::3] == now[::3] and self._written[1] == requested"),
        ("what was not sampled counts as rejected", "scheduler.requests:counted_drafts", "- sum(map(bool, generated))", "- len(generated)"),
        ("a policy hears of the next drafts' length", "scheduler.monitor:Monitor._tell_drafts", "listener.verified(now, length,", "listener.verified(now, shape.k,"),
    ],
    "tests/vllm/scheduler/test_scheduler.py": [
        ("the policy switches a paused engine", "scheduler.layout_controller:LayoutController._follow_policy", " or active.pause_state != PauseState.UNPAUSED", ""),
        ("a failed plan leaves requests preempted", "scheduler.switching.switch:_plan", "setattr(request, name, value)", "pass"),
        ("steps are drained before a switch is refused", "scheduler.switching.switch:switch", "    _check(active)\n\n    # 2. Quiesce.\n    active.drain()\n", "    active.drain()\n    _check(active)\n"),
        ("the word that ends a session is not noticed", "scheduler.replica_set:ReplicaSet.add", "self._ended(request.request_id, FinishReason.ABORT)", "pass"),
        ("streaming-input sessions are carried", "scheduler.switching.switch:_check", "request.resumable or ", ""),
        ("loads of replicas do not count in routing", "scheduler.replica_set:ReplicaSet._route", "[replica.num_seqs for replica in self.replicas]", "[0 for _ in self.replicas]"),
        ("blocks of preempted requests are held back for loads", "scheduler.replica:ReplicaFactory.make", "free_blocks_at_once(replica.scheduler)", "pass"),
        ("a policy is asked again at once after a refusal", "scheduler.layout_controller:LayoutController._refused", "now + back_off", "now"),
        ("a withdrawn switch is made", "scheduler.layout_controller:LayoutController._run_switch_requests", "continue  # whoever asked has given up", "pass"),
        ("an agent's tools end its batch", "scheduler.layout_controller:LayoutController._is_over", ">= self._idle_seconds", ">= 0"),
        ("a step in flight hides that the work is over", "scheduler.layout_controller:LayoutController.finish_work", "self._active.drain()", "pass"),
        ("a policy hears of a switch before it is made", "scheduler.layout_controller:LayoutController._switch", "        active.replace(target, replicas)\n        self.costs.observe(report)\n        self._monitor.switched(report, replicas)\n", "        self._monitor.switched(report, replicas)\n        active.replace(target, replicas)\n"),
    ],
    "tests/vllm/scheduler/test_admission.py": [
        ("KV is looked for in the replica that it goes to", "scheduler.switching.switch_plan:_request_blocks", "replica.index, old", "target_replica, old"),
        ("what found no room is taken for KV that comes", "scheduler.switching.switch_plan:_allocate", "replica.connector.withdraw()", "pass"),
        ("a request's last block stays behind", "models.kinds:StateKind.held", "-(-tokens // self.block_size)", "tokens // self.block_size"),
    ],
    "tests/vllm/scheduler/test_prefix_cache.py": [
        ("cached blocks come to other hashes' blocks", "scheduler.switching.prefix_cache:_take_up", "[block.block_id for block in blocks]", "[block.block_id for block in reversed(blocks)]"),
        ("chains have holes", "scheduler.switching.chains:_longest_prefix", "if not gaps:", "if True:"),
        ("what waits loses what is cached for it", "scheduler.switching.switch_plan:_carry_caches", "if c.reads_cache and c", "if False and c"),
        ("caches of old weights are carried", "scheduler.replica_set:ReplicaSet.may_carry_caches", "self._cached_with in (None, self.executor.weights_version)", "True"),
    ],
    "tests/vllm/patches/test_patches.py": [
        ("a narrower layout uses the last rows of counters", "patches.runners:share_penalty_counts", "shared.output_bin_counts[:rows]", "shared.output_bin_counts[-rows:]"),
    ],
    "tests/vllm/scheduler/test_block_pools.py": [
        ("a discarded scheduler's requests keep their blocks", "scheduler.block_pools:BlockPools.keep", "manager.free(request)", "pass"),
    ],
    "tests/unit/predictor/test_draft_lengths.py": [
        ("a policy begins with draft lengths", "predictor.adaptive:AdaptivePolicy.__init__", "self.drafts = {layout: ((1, 1, 0),) for layout in layouts}", "pass"),
        ("draft lengths of a batch's tail hold for the next", "predictor.adaptive:AdaptivePolicy._open", "self.drafts = costs.drafts", "pass"),
        ("planned draft lengths are not used", "predictor.adaptive:AdaptivePolicy._decide", "self.drafts = plan.layout_costs.drafts", "pass"),
        ("a plan does not know what is accepted", "predictor.adaptive:AdaptivePolicy._layout_costs", "draft_yield = self._acceptance.expected()", "pass"),
    ],
    "tests/vllm/executor/test_lanes.py": [
        ("rings are kept at shutdown", "executor.lanes:Lanes.shutdown", "rings, self._rings = self._rings, {}", "rings = self._rings"),
        ("a drafter's mistake is no reply", "executor.lanes:WorkerLanes.serve", "output = error", "output = error if kind != DRAFT_ROWS else None"),
        ("queues of groups are left", "executor.os_resources:os_resources_here", "(queue, *(mq.handle for mq in broadcasters if mq is not None))", "(queue,)"),
    ],
    "tests/vllm/executor/test_executor.py::test_a_rank_that_never_replies_fails_the_engine": [
        ("a failed switch does not end the engine", "executor.executor:_fatal", "self.fail(error)", "pass"),
    ],
    "tests/vllm/executor/test_executor.py": [
        ("a switch takes replies to calls before it", "executor.replies:OwnRepliesMixin._read_earlier_replies", "if self.futures_queue:", "if False:"),
        ("the executor stays in the layout that was left", "executor.executor:PATExecutorMixin.switch", "self.layout = command.target", "pass"),
        ("a drain ends with the first results", "executor.executor:PATExecutorMixin.finished", "(results and not wait_for_all)", "results"),
        ("what a failed call leaves is read by the next", "executor.replies:OwnRepliesMixin._call", "self._unread = True", "pass"),
        ("weights that are never derived are waited for", "executor.executor:PATExecutorMixin.refresh_weights", "self._call_together(rpc.REFRESH_WEIGHTS)", "self.collective_rpc(rpc.REFRESH_WEIGHTS, timeout=1)"),
    ],
    "tests/vllm/kv_transfer/test_exchange.py": [
        ("a round is written before all is packed", "kv_transfer.exchange:Exchange._run_rounds", "            packs.pack(views[index][0], part)\n", "            pass\n"),
        ("the last layers do not arrive", "kv_transfer.exchange:Exchange.staging", "                self._finish_one()", "                self._begun.clear()"),
        ("two layers are staged without room", "kv_transfer.exchange:CollectiveTransport.prepare", "2 if 2 * num_bytes <= room else 1", "2"),
        ("parts of a shared segment lie over each other", "kv_transfer.shared_memory:SharedMemoryTransport.prepare", "start += count * size", "start += count"),
    ],
    "tests/vllm/kv_transfer/test_exchange.py::test_full_switches_arrive_in_rounds": [
        ("all of a layer is one round", "kv_transfer.exchange:Exchange._prepare_rounds", "moves.split(rounds)", "moves.split(1)"),
    ],
    "tests/unit/kv_transfer/test_rounds.py": [
        ("rounds leave the rest of a move out", "kv_transfer.plan:_part", "(i + 1) * total // parts", "(i + 1) * (total // parts)"),
    ],
    "tests/vllm/weights/test_kv_scales.py": [
        ("other scales are not noticed", "worker.layout_weights:LayoutWeights.refresh", "before == self._kv_scales", "before[:0] == self._kv_scales[:0]"),
    ],
    "tests/engine/test_fp8_kv.py::test_new_scales_drop_all_kv": [
        ("KV by other scales stays", "scheduler.replica_set:ReplicaSet.schedule", "self.reset_prefix_cache(reset_running_requests=True)", "pass"),
        ("scales on the host are not shared", "weights.kv_scales:share_kv_scales", "setattr(layer, scale, getattr(of_base[name], scale))", "pass"),
    ],
    "tests/vllm/weights/test_fp8.py::test_what_a_trainer_loads_reaches_every_layout": [
        ("parameters of another class fit weights", "weights.opened_reload:_form", "type(tensor), ", ""),
        ("a trainer has weights processed that are kept for later", "weights.opened_reload:OpenedReload._close_in_time", "self.close()", "self.is_open = False"),
        ("weights are processed again when a reload has ended", "patches.weights:process_loaded_weights_by", "ask is None or not ask()", "ask is None or not ask() or True"),
    ],
    "tests/vllm/weights/test_weights.py": [
        ("fused matrices begin at the same row", "weights.shards:EvenPartition.shard", "start + tp_rank * rows", "tp_rank * rows"),
        ("replicated KV heads are those of the rank", "weights.shards:QKVPartition.shard", "tp_rank // copies * kv_heads", "tp_rank * kv_heads % self.total_kv_heads"),
        ("a shard of the vocabulary has no padding", "weights.shards:VocabPartition.shard", ", size=rows)", ")"),
        ("padding is not written", "weights.weight:derive", "weight.tensor.zero_()", "pass"),
        ("plain weights are kept after all layouts are filled", "weights.materialized:MaterializedShards.release", "self._base = None", "pass"),
        ("a subclass's own weight loader is overlooked", "weights.cuts:sharded_class", "_weight_loaders(type(module)) == _weight_loaders(layer)", "True"),
        ("weights may be tied in one layout only", "weights.model_weights:matching_weights", "sources.setdefault(weight.storage, match.storage) != match.storage", "False"),
        ("other dtypes are overlooked", "weights.model_weights:_check_match", "weight.cuts != base.cuts or weight.tensor.dtype != base.tensor.dtype", "weight.cuts != base.cuts"),
        ("a tied head is tied after its weights were taken", "weights.loaders:BaseLayoutLoader.load_weights", "tie_word_embeddings(model, model_config)", "pass"),
    ],
    "tests/vllm/weights/test_experts.py": [
        ("spread experts are cut, too", "weights.shards:Cut.ways", "self.experts in (None, place.experts)", "self.experts != 'ep' or place.experts == 'ep'"),
        ("gate and up are cut as one matrix", "weights.experts:expert_cuts", "(width, width)", "(2 * width,)"),
        ("spread experts are placed by the TP group", "weights.experts:expert_place", 'Place(parallel.ep_size, parallel.ep_rank, "ep")', "Place(parallel.ep_size, parallel.ep_rank)"),
        ("experts of other data-parallel ranks are overlooked", "weights.experts:why_not_shared", "parallel.use_all2all_kernels or parallel.dp_size > 1 or", "parallel.use_all2all_kernels or"),
        ("rows of the first expert only trade places", "kernels.swap:_sides", "(tensor.shape[:dim]), -1)", "(tensor.shape[:dim]), -1)[:1]"),
    ],
    "tests/vllm/weights/test_latent.py": [
        ("copies of absorbed weights stay old", "worker.layout_weights:renew_absorbed", "untyped_storage().data_ptr() != source", "untyped_storage().data_ptr() is None"),
        ("absorbed weights are the checkpoint's", "weights.model_weights:model_weights", "if isinstance(module, MLAAttention):", "if False:"),
    ],
    "tests/vllm/weights/test_inplace.py": [
        ("a parameter that an update replaced stays apart", "weights.inplace:InPlaceShards.refresh", "weight.bind(weight.tensor)", "pass"),
        ("the arranged layout is not noted", "weights.inplace:InPlaceShards.arrange", "self._arranged = layout", "pass"),
        ("packed weights are not noticed", "weights.inplace:InPlaceShards.release", "weight.current.data_ptr() != view.data_ptr()", "False"),
    ],
    "tests/vllm/weights/test_marlin.py": [
        ("columns of tiles come together from anywhere", "weights.inplace:InPlaceShards._blocks_of", 'weight.share == "block" and cut.dim > 0', "False"),
        ("other orders of scales are not noticed", "weights.marlin:MarlinFp8Linear._why_not_shared", "(columns > self.unit) != (all_columns > self.unit)", "False"),
        ("latent attention is made of other heads", "weights.model_weights:model_weights", "refuse_absorbed(path, module)", "pass"),
    ],
    "tests/vllm/kernels/test_kernels.py": [
        ("what lay in a block of columns stays there", "kernels.column_blocks:ColumnBlock.gather", "place.copy_(displaced)", "pass"),
        ("ranges that overlap are accepted", "kernels.swap:_check_disjoint", "(starts[order][1:] < ends[order][:-1]).any()", "False"),
        ("one side is overwritten", "kernels.swap:_CopyRound.__call__", "y.copy_(kept)", "y.copy_(x)"),
        ("bytes of one side count", "kernels.swap:prepare", "sum(2 * a.nbytes", "sum(a.nbytes"),
        ("every run comes from the first staged blocks", "kernels.kv:_IndexedPiece.unpack", "staged[done : done + count]", "staged[:count]"),
        ("blocks that ascend are one run", "kernels.kv:_runs", "sum(runs[-1]) == block", "runs[-1][0] < block"),
        ("pieces of a peer lie over each other", "kernels.kv:IndexedBlocks.__init__", "pieces[-1].end if pieces else 0\n                shape", "0\n                shape"),
    ],
    "tests/vllm/scheduler/test_groups.py::test_hits_with_a_drafter_that_reads_ahead": [
        ("what is dropped of a hit is its window's", "models.kinds:StateKind.needed", "blocks - self.dropped", "blocks"),
    ],
    "tests/vllm/weights/test_drafters.py": [
        ("drafters of all layouts share all they can", "weights.drafter:sharing_as", "modules.get(name) in of_target", "True"),
        ("a drafter's captured embeddings stay", "worker.layout_weights:LayoutWeights.loading_into", "self._of_drafter.keep(own)", "pass"),
        ("updates of drafters are not noticed", "worker.layout_weights:LayoutWeights._look_for_stale_drafter", '"drafter" not in self._updated', "True"),
        ("what drafters share is their own", "worker.layout_weights:LayoutWeights._note_update", "not shared.issuperset(loaded)", "True"),
        ("drafters' rows stay where they are", "worker.layout_weights:LayoutWeights._strategies", "(self._strategy, self._of_drafter)", "(self._strategy,)"),
    ],
    "tests/vllm/patches/test_drafts.py": [
        ("a step of 0 drafts asks for the drafter", "patches.drafts:skip_empty_drafts", "config if drafts or not samples else None", "config"),
        ("ngram_gpu is asked for its longest drafts", "patches.drafts:_propose_some", "drafts[:, :num_speculative_tokens]", "drafts"),
        ("no request drafts near the longest context", "patches.drafts:draft_near_the_longest_context", 'runner.speculative_config.method == "ngram_gpu"', 'runner.speculative_config.method == "ngram"'),
    ],
    "tests/vllm/patches/test_dead_engine.py": [
        ("calls wait for an engine that has said that it is dead", "patches.dead_engine:_set_dead", "if dead and client", "if client and not dead and client"),
        ("who waits again for a dead engine waits for ever", "patches.dead_engine:end_waits_for_dead_engines", "client.outputs_queue.put_nowait(_error(client))", "pass"),
        ("coroutines wait for a dead engine", "patches.dead_engine:_end_waits", "future.get_loop().call_soon_threadsafe(_fail, future, _error(client))", "pass"),
    ],
    "tests/vllm/worker/test_exchange_group.py": [
        ("the exchange has as many channels as NCCL likes", "worker.runtime:exchange_group", "options.config.max_ctas = EXCHANGE_CHANNELS", "pass"),
    ],
    "tests/engine/test_memory.py::test_an_engine_allocates_what_is_computed[latent]": [
        ("a workspace of latent vectors for each layout", "patches.runners:use_attention_workspace", "len(own) <= len(workspace)", "False"),
    ],
    "tests/vllm/kv_transfer/test_exchange.py::test_a_rank_alone_exchanges_with_itself": [
        ("layers come in another order", "kv_transfer.exchange:CollectiveTransport.finish", "self._under_way[0]", "self._under_way[-1]"),
    ],
})
# fmt: on
