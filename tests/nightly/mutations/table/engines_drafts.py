# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes with drafts and with Model Runner V2: a switch in the workers, handing over, grammars."""

from __future__ import annotations

from tests.nightly.mutations.mutation import mutations

# fmt: off
MUTATIONS = mutations({
    "tests/vllm/worker/test_request_state.py": [
        ("the phrase that ends thinking begins anew", "worker.request_state:V1RequestStateTransfer.watch", "batch.thinking_budget_state_holder is not None", "False"),
        ("a second switch before the next step loses what the first one carried", "worker.logits_processors:CarriedState.take", "return self.waiting.get(request_id)", "return None"),
        ("V1: a runner that is left still knows the tokens that it sampled", "worker.request_state:V1RequestStateTransfer.clear", "forget_sampled_tokens(runner.input_batch)", "pass"),
        ("a field of a request begins anew", "worker.request_state:V1RequestStateTransfer.take", "not in self._NEW", "not in {*self._NEW, 'in_progress_prompt_logprobs_cpu'}"),
    ],
    "tests/vllm/worker/test_logits_processors.py": [
        ("a processor that is done begins again", "worker.row_state:RowState.restore", "place.pop(row, None)", "pass"),
        ("a table is taken for rows", "worker.row_state:RowState.look", "before is None or before[row] != _print_of(element)", "True"),
        ("a dict by token is taken for rows", "worker.row_state:RowState._places", "path in self._dicts and all(key in rows for key in value)", "path in self._dicts"),
        ("what was there at first is taken for rows", "worker.row_state:RowState._places", "path in self._dicts and ", ""),
        ("a list that has grown is taken for rows", "worker.row_state:RowState._places", "isinstance(value, list) and path not in self._lists", "False"),
        ("what is taken changes with its array", "worker.row_state:_copied", "element.copy()", "element"),
        ("what others own is taken for rows", "worker.row_state:RowState._attributes", "*self._foreign", "*()"),
        ("objects of the user's are not looked into", "worker.row_state:RowState._attributes", '(own and package != "vllm")', "False"),
        ("a processor sees the tokens of another runner", "worker.logits_processors:_Pickler.persistent_id", "(name := self._names.get(id(obj))) is not None", "(name := None) is not None"),
        ("what cannot be pickled ends the engine", "worker.logits_processors:CarriedState._pack", "except Exception as error", "except KeyError as error"),
        ("what cannot be unpickled ends the engine", "worker.logits_processors:CarriedState.restore", "except Exception as error", "except KeyError as error"),
        ("what cannot be written ends the engine", "worker.row_state:RowState.restore", "except Exception", "except KeyError"),
        ("an odd attribute ends the start", "worker.row_state:RowState._begin", "except Exception", "except KeyError"),
        ("places of a row no longer share an object", "worker.logits_processors:CarriedState.take", "return [_dumps(values, lists, self._shared)]", "raise KeyError"),
        ("a row brings a processor of its own", "worker.row_state:RowState.references", "{(): self.owner}", "{}"),
        ("slots are not looked into", "worker.row_state:_fields", "fields[name] = getattr(holder, name)", "pass"),
        ("what is kept beside rows is not told", "worker.logits_processors:CarriedState.look", "self._users and", "False and"),
        ("rows move before they are given back", "patches.runners:restore_added_rows", "added=arrived, moved=[]", "added=arrived"),
        ("a new request is added twice", "patches.runners:restore_added_rows", " if id(request) not in known", ""),
        ("those that have ended wait for ever", "worker.logits_processors:CarriedState.keep", "self.waiting.keys() - set(request_ids)", "()"),
    ],
    "tests/engine/v2/test_pairs.py::test_every_ordered_pair_when_kv_is_computed_again": [
        ("tokens left behind count as computed", "scheduler.switch_plan:_rewind", "request.num_computed_tokens = 0", "request.num_computed_tokens = 0 if carried.migrates else max(0, carried.computed - 1)"),
        ("V2: replicas that do not know a request have its state forgotten", "worker.request_state:V2RequestStateTransfer.take", "if any(packed)", ""),
        ("V2: slots are not given back", "patches.runners:restore_written_rows", "again = restore()", "again = ()"),
    ],
    "tests/engine/v2/test_pairs.py::test_every_ordered_pair_of_layouts": [
        ("KV stays where it was", "worker.worker:PATWorkerMixin.pat_switch", "self._move_kv(source, target, command.moves)", "pass"),
        ("weights of the layout before", "worker.worker:PATWorkerMixin.pat_switch", "weight_bytes = self._weights.arrange(target.layout)", "weight_bytes = 0"),
        ("ranks of a replica draw different numbers", "worker.worker:PATWorkerMixin.pat_switch", "command.target.replica_of(self.rank)", "self.rank"),
        ("V2: the runner that is left keeps its requests", "worker.worker:PATWorkerMixin.pat_switch", "self._state_transfer.clear(source.runner)", "pass"),
        ("KV comes to other rows of the block table", "scheduler.switch_plan:_request_blocks", "new = target_blocks[group][held.start : held.stop]", "new = target_blocks[group][held.start : held.stop][::-1]"),
        ("V2: log-probabilities of half-computed prompts are not computed again", "scheduler.switch:_must_recompute", "scheduler.use_v2_model_runner", "False"),
        ("the step in flight hands out the token before", "scheduler.replica_set:ReplicaSet.drain", "self.finish(self.executor.finished(wait_for_all=True))", "results = self.executor.finished(wait_for_all=True)\n            for one in results:\n                requests = self.replicas[one.replica].scheduler.requests\n                for name, tokens in zip(one.output.req_ids, one.output.sampled_token_ids, strict=True):\n                    tokens[:] = [requests[name].all_token_ids[-1] for _ in tokens if name in requests]\n            self.finish(results)"),
        ("a second step starts beside one with grammars", "scheduler.replica:Replica.may_step", "step.has_structured_output_requests for", "False for"),
    ],
    "tests/engine/speculation/test_law.py::test_the_law_holds_across_switches_and_changes_of_the_draft_length": [
        ("replicas draw the same numbers", "worker.worker:PATWorkerMixin.pat_switch", "command.target.replica_of(self.rank)", "0"),
        ("each switch seeds alike", "worker.worker:PATWorkerMixin.pat_switch", "command.switch_id", "0"),
    ],
    "tests/engine/v2/test_pairs.py::test_every_ordered_pair_of_layouts[V2 linear]": [
        ("V2: a part of linear attention's states stays", "kv_transfer.connector:PATConnector.register_kv_caches", "kind.segments(spec, view)", "kind.segments(spec, view)[:1]"),
    ],
    "tests/engine/test_switch.py::test_null_blocks_are_clear_after_a_switch[windows]": [
        ("null blocks hold what another layout left", "worker.worker:PATWorkerMixin.pat_switch", "target.connector.clear_null_block()", "pass"),
        ("null blocks are zeroed before KV has moved", "worker.worker:PATWorkerMixin.pat_switch", "kv_bytes = 0\n", "target.connector.clear_null_block(); kv_bytes = 0\n"),
    ],
    "tests/engine/v2/test_pairs.py::test_an_update_between_switches_reaches_every_layout": [
        ("new weights come to the active layout", "worker.weight_updates:WeightUpdatesMixin.pat_call_in_base", "self._enter_for_a_call(self._base)\n            return function", "return function"),
    ],
    "tests/engine/test_updates_under_way.py::test_a_storm_of_updates": [
        ("after an update rows stay as in the base layout", "worker.layout_weights:LayoutWeights.refresh", "self._strategy.arrange(active)", "pass"),
        ("requests run on while weights are missing", "worker.layout_weights:LayoutWeights.refresh", "return False", "return True"),
    ],
    "tests/engine/speculation/test_sampled.py::test_a_seed_without_drafts_gives_what_it_does_without_speculation": [
        ("a request's random numbers begin again", "worker.request_state:V1RequestStateTransfer.restore", "generator.set_state(packed.generator_state)", "generator.manual_seed(packed.state['sampling_params'].seed)"),
        ("a request's seed is lost", "worker.request_state:V1RequestStateTransfer.take", "state.generator.get_state() if state.generator else None", "None"),
    ],
    "tests/engine/speculation/test_features.py::test_outputs_are_those_without_drafts": [
        ("a runner does not know what was generated", "worker.request_state:V1RequestStateTransfer.restore", "output_token_ids=packed.output_token_ids.tolist()", "output_token_ids=[]"),
        ("half-computed prompts lose their log-probabilities", "worker.request_state:V1RequestStateTransfer.restore", "packed.num_prompt_logprobs is not None", "False"),
        ("V1: without drafts the phrase that ends thinking comes to another request", "patches.drafts:prepare_drafter", "end_thinking_in_own_rows(runner)", "pass"),
        ("V1: thinking is drafted for", "scheduler.replica:Replica._drop_drafts_of_thinking", "request.spec_token_ids = []", "pass"),
    ],
    "tests/engine/speculation/test_walks.py::test_switches_inside_runs_of_right_drafts": [
        ("V1: the runner that is left keeps its requests", "worker.request_state:V1RequestStateTransfer.clear", "_finish(runner, set(runner.requests))", "pass"),
        ("states come to the replica that a rank was in", "worker.request_state:gather_states", "command.target.replica_of(rank)", "command.source.replica_of(rank)"),
    ],
    "tests/engine/v2/test_drafts.py::test_buffers_are_as_computed": [
        ("V2: each layout has penalty counters of its own", "worker.request_state:V2RequestStateTransfer.share", "share_penalty_counts(runner, host)", "pass"),
        ("V2: each layout has grammar bitmasks of its own", "patches.runners:share_grammar_bitmask", "own.grammar_bitmask = shared.grammar_bitmask[:rows]", "pass"),
        ("V2: each layout has token ids of its own", "patches.runners:token_ids_of", '"StagedWriteTensor", take', '"StagedWriteTensor", make'),
    ],
    "tests/engine/v2/test_drafts.py::test_every_ordered_pair_of_layouts": [
        ("drafts are kept between kinds of experts", "patches.schedulers:queue_with_blocks", "request.spec_token_ids = []", "pass"),
    ],
    "tests/engine/v2/test_drafts.py::test_grammars_see_the_drafts": [
        ("a grammar sees older drafts", "scheduler.replica:Replica.finish", "self._drafts = drafts", "self._drafts = getattr(self, 'older', None); self.older = drafts"),
    ],
    "tests/vllm/patches/test_drafts.py": [
        ("V1: steps of draft length 0 draft", "patches.drafts:prepare_drafter", "skip_empty_drafts(runner)", "pass"),
        ("all drafts of ngram_gpu are valid", "patches.drafts:_propose_some", "num_valid.clamp(max=num_speculative_tokens)", "num_valid"),
        ("a step without drafts fails on CPU", "patches.drafts:verify_sampled_drafts", "original(logits, *args, **options) if len(logits) else logits", "original(logits, *args, **options)"),
    ],
    "tests/engine/v2/test_drafts.py::test_steps_without_drafts_look_for_none": [
        ("V2: drafts of length 0 are looked for", "patches.drafts:_propose", 'options.get("num_speculative_tokens") == 0', "False"),
    ],
})
# fmt: on
