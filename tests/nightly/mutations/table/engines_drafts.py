# ruff: noqa: E501
"""Mistakes with drafts and with Model Runner V2: a switch in the workers, handing over, grammars."""

from __future__ import annotations

from tests.nightly.mutations.mutation import Mutation

SWITCH = "worker.worker:PATWorkerMixin.pat_switch"
WALKS = "tests/engine/speculation/test_walks.py"
FEATURES = "tests/engine/speculation/test_features.py::test_outputs_are_those_without_drafts"
SEEDS = "tests/engine/speculation/test_sampled.py::test_a_seed_without_drafts_gives_what_it_does_without_speculation"
LAW = "tests/engine/speculation/test_law.py::test_the_law_holds_across_switches_and_changes_of_the_draft_length"
V2 = "tests/engine/v2/test_pairs.py"
V2_PAIRS = f"{V2}::test_every_ordered_pair_of_layouts"
V2_DRAFTS = "tests/engine/v2/test_drafts.py"
V2_BUFFERS = f"{V2_DRAFTS}::test_buffers_are_as_computed"
PATCHES = "tests/vllm/patches/test_drafts.py"
TOKEN_BEFORE = """results = self.executor.finished(wait_for_all=True)
        for one in results:
            requests = self.replicas[one.replica].scheduler.requests
            for name, tokens in zip(one.output.req_ids, one.output.sampled_token_ids, strict=True):
                tokens[:] = [requests[name].all_token_ids[-1] for _ in tokens if name in requests]
        self.finish(results)"""

# fmt: off
# Mistake, function, what is replaced, by what, tests.
_ROWS = [
    # A switch in the workers.
    ("KV stays where it was", SWITCH, "self._move_kv(source, target, command.moves)", "pass", V2_PAIRS),
    ("weights of the layout before", SWITCH, "weight_bytes = self._weights.arrange(target.layout)", "weight_bytes = 0", V2_PAIRS),
    ("ranks of a replica draw different numbers", SWITCH, "command.target.replica_of(self.rank)", "self.rank", V2_PAIRS),
    ("V2: the runner that is left keeps its requests", SWITCH, "self._handover.clear(source.runner)", "pass", V2_PAIRS),
    ("replicas draw the same numbers", SWITCH, "command.target.replica_of(self.rank)", "0", LAW),
    ("each switch seeds alike", SWITCH, "command.switch_id", "0", LAW),
    ("KV comes to other rows of the block table", "kv_transfer.connector:PATConnector.update_state_after_alloc", "tuple(ids[: -(-tokens // size)])", "tuple(reversed(ids[: -(-tokens // size)]))", V2_PAIRS),
    ("new weights come to the active layout", "worker.updates:WeightUpdatesMixin.pat_call_in_base", "self._enter_for_a_call(self._base)\n            return function", "return function", f"{V2}::test_an_update_between_switches_reaches_every_layout"),
    # Requests that are handed over.
    ("a request's random numbers begin again", "worker.handover:V1Handover.give", "generator.set_state(packed.generator_state)", "generator.manual_seed(packed.state['sampling_params'].seed)", SEEDS),
    ("a request's seed is lost", "worker.handover:V1Handover.take", "state.generator.get_state() if state.generator else None", "None", SEEDS),
    ("a runner does not know what was generated", "worker.handover:V1Handover.give", "output_token_ids=packed.output_token_ids.tolist()", "output_token_ids=[]", FEATURES),
    ("half-computed prompts lose their log-probabilities", "worker.handover:V1Handover.give", "packed.num_prompt_logprobs is not None", "False", FEATURES),
    ("V1: the runner that is left keeps its requests", "worker.handover:V1Handover.clear", "_finish(runner, set(runner.requests))", "pass", f"{WALKS}::test_switches_inside_runs_of_right_drafts"),
    ("states come to the replica that a rank was in", "worker.handover:gather_states", "command.target.replica_of(rank)", "command.source.replica_of(rank)", f"{WALKS}::test_switches_inside_runs_of_right_drafts"),
    ("V2: log-probabilities of half-computed prompts are not computed again", "scheduler.switch:_must_recompute", "scheduler.use_v2_model_runner", "False", V2_PAIRS),
    ("V2: each layout has penalty counters of its own", "worker.handover:V2Handover.share", "share_penalty_counts(runner, host)", "pass", V2_BUFFERS),
    ("V2: each layout has grammar bitmasks of its own", "patches.runners:share_grammar_bitmask", "own.grammar_bitmask = shared.grammar_bitmask[:rows]", "pass", V2_BUFFERS),
    ("V2: each layout has token ids of its own", "patches.runners:token_ids_of", "states.StagedWriteTensor = take", "states.StagedWriteTensor = make", V2_BUFFERS),
    # A switch in the scheduler.
    ("tokens left behind count as computed", "scheduler.switch_plan:_rewind", "request.num_computed_tokens = 0", "request.num_computed_tokens = 0 if one.migrates else max(0, one.computed - 1)", f"{V2}::test_every_ordered_pair_when_kv_is_computed_again"),
    ("the step in flight hands out the token before", "scheduler.replica_set:ReplicaSet.drain", "self.finish(self.executor.finished(wait_for_all=True))", TOKEN_BEFORE, V2_PAIRS),
    ("requests wait until a new scheduler has made as many steps", "scheduler.switch_plan:_rewind", "request.next_decode_eligible_step = 0", "pass", V2_PAIRS),
    ("drafts are kept between kinds of experts", "patches.schedulers:queue_with_blocks", "request.spec_token_ids = []", "pass", f"{V2_DRAFTS}::test_every_ordered_pair_of_layouts"),
    # Steps.
    ("a grammar sees older drafts", "scheduler.replica:Replica.finish", "self._drafts = drafts", "self._drafts = getattr(self, 'older', None); self.older = drafts", f"{V2_DRAFTS}::test_grammars_see_the_drafts"),
    ("a second step starts beside one with grammars", "scheduler.replica:Replica.may_step", "step.has_structured_output_requests for", "False for", V2_PAIRS),
    ("V1: steps of draft length 0 draft", "patches.drafts:prepare_drafter", "skip_empty_drafts(runner)", "pass", PATCHES),
    ("V2: drafts of length 0 are looked for", "patches.drafts:_asks_for_none", 'options.get("num_speculative_tokens") == 0', "False", f"{V2_DRAFTS}::test_steps_without_drafts_look_for_none"),
    ("all drafts of ngram_gpu are valid", "patches.drafts:_propose_some", "num_valid.clamp(max=num_speculative_tokens)", "num_valid", PATCHES),
    ("a step without drafts fails on CPU", "patches.drafts:verify_sampled_drafts", "original(logits, *args, **options) if len(logits) else logits", "original(logits, *args, **options)", PATCHES),
]
# fmt: on

MUTATIONS = [
    Mutation(name, f"pat_vllm.{function}", {old: new}, (tests,))
    for name, function, old, new, tests in _ROWS
]
