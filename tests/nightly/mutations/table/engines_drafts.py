# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes with drafts and with Model Runner V2: a switch in the workers, handing over, grammars."""

from __future__ import annotations

from tests.nightly.mutations.mutation import mutations

# fmt: off
MUTATIONS = mutations({
    "tests/vllm/worker/test_request_state.py": [
        ("the phrase that ends thinking begins anew", "worker.request_state:V1RequestStateTransfer.watch", "batch.thinking_budget_state_holder is not None", "False"),
        ("V1: a runner that is left still knows the tokens that it sampled", "worker.request_state:V1RequestStateTransfer.clear", "forget_sampled_tokens(runner.input_batch)", "pass"),
        ("a field of a request begins anew", "worker.request_state:V1RequestStateTransfer.take", "not in self._NEW", "not in {*self._NEW, 'in_progress_prompt_logprobs_cpu'}"),
    ],
    "tests/vllm/worker/test_logits_processors.py": [
        ("a processor that is done begins again", "worker.row_state:RowState.restore", "place.pop(row, None)", "pass"),
        ("a table is taken for rows", "worker.row_state:RowState.look", "before is None or before[row] != _print_of(element)", "True"),
        ("rows move before they are given back", "patches.runners:restore_added_rows", "added=arrived, moved=[]", "added=arrived"),
    ],
    "tests/engine/v2/test_pairs.py::test_every_ordered_pair_when_kv_is_computed_again": [
        ("V2: replicas that do not know a request have its state forgotten", "worker.request_state:V2RequestStateTransfer.take", "if any(packed)", ""),
    ],
    "tests/engine/v2/test_pairs.py::test_every_ordered_pair_of_layouts": [
        ("KV stays where it was", "worker.worker:PATWorkerMixin.pat_switch", "self._move_kv(source, target, command.moves)", "pass"),
        ("V2: log-probabilities of half-computed prompts are not computed again", "scheduler.switching.switch:_must_recompute", "scheduler.use_v2_model_runner", "False"),
    ],
    "tests/engine/v2/test_drafters.py::test_linear_attention_goes_on_from_the_last_accepted_token": [
        ("V2: a part of linear attention's states stays", "kv_transfer.connector:PATConnector.register_kv_caches", "kind.segments(spec, view)", "kind.segments(spec, view)[:1]"),
    ],
    "tests/engine/v2/test_pairs.py::test_an_update_between_switches_reaches_every_layout": [
        ("new weights come to the active layout", "worker.weight_updates:WeightUpdatesMixin.pat_call_in_base", "self._enter_for_a_call(self._base)\n            with", "with"),
    ],
    "tests/engine/test_updates_under_way.py::test_a_storm_of_updates": [
        ("after an update rows stay as in the base layout", "worker.layout_weights:LayoutWeights.refresh", "self.arrange(active)", "pass"),
    ],
    "tests/engine/speculation/test_sampled.py::test_a_seed_without_drafts_gives_what_it_does_without_speculation": [
        ("a request's random numbers begin again", "worker.request_state:V1RequestStateTransfer.restore", "generator.set_state(packed.generator_state)", "generator.manual_seed(packed.state['sampling_params'].seed)"),
    ],
    "tests/unit/drafts/test_drafts.py": [
        ("the earliest of equally long matches drafts", "drafts.suffix:draft", "        if match > best:\n            best, place = match, at", "        if match >= best:\n            best, place = match, at"),
    ],
    "tests/vllm/scheduler/test_draft_rows.py": [
        ("the last responses are not kept", "scheduler.draft_rows:DraftRows.close", "self._file.close(self._corpus)", "pass"),
        ("requests with seeds see what they said", "scheduler.draft_rows:DraftRows.add", "if params.sampling_type != SamplingType.RANDOM_SEED:", "if True:"),
        ("a salt changes nothing", "worker.runtime:seed_replica", "(salt, switch_id, replica)", "(switch_id, replica)"),
    ],
    "tests/vllm/kernels/test_suffix_match.py": [
        ("kernels reach over the beginning", "kernels.suffix_match:score_kernel", "inside = alive & (back >= 0)", "inside = alive"),
    ],
    "tests/unit/predictor/test_acceptance.py": [
        ("new prompts' acceptance holds for repeated ones", "predictor.acceptance:AcceptanceByPrompt.observe", "self.of_repeated if repeated else self.of_new", "self.of_new"),
        ("the share of repeated prompts is that of the first", "predictor.acceptance:AcceptanceByPrompt.arrived", "self._share = self._arrived[1] / sum(self._arrived)", "self._share = self._share or self._arrived[1]"),
    ],
    "tests/vllm/worker/test_draft_sources.py": [
        ("text drafts wherever it matches", "worker.drafters.sources:DraftSources.choose", "(match > 0) & (accepted[:, 1] >= accepted[:, 0])", "match > 0"),
        ("a state keeps what another request taught", "worker.drafters.sources:DraftSources.begin", "self._request_of[state] != request_id", "not self._request_of[state]"),
    ],
    "tests/vllm/worker/test_calls_in_base.py": [
        ("a part of a drafter's weights is refused", "worker.weight_updates:WeightUpdatesMixin.pat_call_in_base", "with disable_mtp_completeness_check():", "if True:"),
    ],
    "tests/engine/v2/test_drafters.py": [
        ("text does not draft beside weights", "worker.drafters.beside_weights:TextBesideWeights.propose", "drafts.copy_(torch.where(takes_text[:, None], of_text, drafts))", "pass"),
        ("trainers find no drafter", "patches.drafts:prepare_drafter", "name_drafter(runner)", "pass"),
    ],
    "tests/engine/test_memory.py": [
        ("V1: the drafter of each layout has inputs of its own", "worker.request_state:V1RequestStateTransfer.share", "share_drafter_inputs(runner, host)", "pass"),
    ],
    "tests/engine/test_drafters.py::test_all_drafts_are_right_beside_a_request_near_the_longest_context": [
        ("V1: a request near the end has the drafter's pass left out for all", "patches.drafts:draft_near_the_longest_context", 'replace(runner, "_input_fits_in_drafter", lambda original: _is_attended)', "pass"),
    ],
    "tests/vllm/patches/test_drafts.py": [
        ("V1: passes beyond the longest context begin again, and write", "patches.drafts:_count_beyond", "return positions + 1", "return original(positions, *args, **options)"),
        ("a head of the drafter's own is replaced by the target's", "patches.drafts:_sharing_of_v1", "target = SimpleNamespace(model=target.model)", "pass"),
    ],
    "tests/engine/speculation/test_walks.py": [
        ("drafters do not hear of rows", "worker.worker:PATWorkerMixin.take_draft_rows", "self._shelf.take(update)", "pass"),
    ],
})
# fmt: on
