# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes in the simulator, the advice, and what both take from the predictor for mixtures."""

from __future__ import annotations

from tests.nightly.mutations.mutation import mutations

# fmt: off
MUTATIONS = mutations({
    "tests/unit/simulator/test_simulated_engine.py": [
        ("a switch does not wait for steps in flight", "simulator.simulated_engine:SimulatedEngine.switch", "self.drain()", "pass"),
        ("a chunk is cut at the step before the one in flight", "simulator.simulated_replica:SimulatedReplica.steps_made", "max(1, math.ceil(elapsed - _ROUNDING))", "max(1, math.floor(elapsed))"),
        ("a switch loses the KV that it moves", "simulator.carrying:carry", "computed[request] <= room[replica.index]", "computed[request] > room[replica.index]"),
        ("a chunk goes on after an arrival", "simulator.simulated_engine:SimulatedEngine._start", "until < steps", "until > steps"),
        ("a chunk goes on where another replica has drained", "simulator.simulated_engine:SimulatedEngine.advance", "not all(replica.num_seqs for replica in over)", "False"),
        ("a response that was cut short is complete", "simulator.simulated_engine:SimulatedEngine._finish", "length < most", "length <= most"),
        ("a policy does not see the steps of a chunk", "simulator.simulated_engine:SimulatedEngine._live_requests", "requests.tokens_in(decoding, steps, k)", "0"),
        ("a replica runs one request too many", "simulator.simulated_replica:SimulatedReplica.schedule", "len(self.running) < most", "len(self.running) <= most"),
        ("a prompt is computed in a step whatever its length", "simulator.simulated_replica:SimulatedReplica.schedule", "if missing := tokens - int(computed[request]):\n                prefilling.append((request, min(missing, budget)))", "if missing := tokens - int(computed[request]):\n                prefilling.append((request, missing))"),
        ("the context is that of one request", "simulator.simulated_replica:SimulatedReplica.schedule", "int(all_tokens[ready].sum())", "int(all_tokens[ready].max(initial=0))"),
        ("a response ends a step early", "simulator.simulated_replica:SimulatedReplica.finish", ">= requests.columns[1, index]", ">= requests.columns[1, index] - 1"),
        ("batches share prompts", "simulator.simulate:simulate_batches", "first + group for group", "group for group"),
    ],
    "tests/unit/simulator/test_expert_layouts.py": [
        ("a switch between kinds moves KV", "simulator.simulated_engine:SimulatedEngine.switch", " * (not source.shares_kv(target))", ""),
        ("steps of both kinds look alike", "predictor.step_residual:features_of", 'layout.experts == "ep"', "0"),
        ("requests stay whatever the layout", "scheduler.routing:spread", "source.shares_kv(target)", "True"),
        ("KV costs time between kinds", "predictor.cost:CostModel._linear", "source.shares_kv(target)", "False"),
        ("a switch tells of another kind", "predictor.cost:CostModel.observe", "report.source, report.target", "report.source, Layout(report.target.tp, report.target.replicas)"),
    ],
    "tests/unit/simulator/test_accepted_drafts.py": [
        ("drafts are verified at another length than planned", "simulator.simulated_engine:SimulatedEngine._draft_length", "first <= batch <= last", "first < batch <= last"),
        ("the last step of a run has no room for its own token", "simulator.accepted_drafts:AcceptedDraftTokens._step_table", "(self._tokens + k) // (k + 1)", "(self._tokens + k + 1) // (k + 1)"),
        ("the token after the drafts counts as accepted", "simulator.accepted_drafts:AcceptedDraftTokens.accepted", "self._tokens[run] - 1 - at", "self._tokens[run] - at"),
    ],
    "tests/unit/simulator/test_ground_truth.py": [
        ("a prompt beside a batch reads the weights again", "simulator.ground_truth:ReplayedGroundTruth.step_seconds", "prefill - min(seconds, prefill, self._decode[layout].shortest)", "prefill"),
        ("a batch beyond the largest takes as long as it", "simulator.ground_truth:_DecodeTimes._row", "(batch / math.exp(at))", "1.0"),
    ],
    "tests/unit/simulator/test_traces.py": [
        ("lengths of a group are unrelated", "simulator.shapes:grpo", "standard_normal(prompts)[groups]", "standard_normal(len(groups))"),
    ],
    "tests/unit/simulator/modelled/test_expert_load.py": [
        ("experts of the mean rank are read", "simulator.modelled.expert_load:busiest", "hot.max(axis=1)", "hot.mean(axis=1)"),
        ("work does not vary between ranks", "simulator.modelled.expert_load:busiest", "tokens**0.5 * off", "0 * off"),
        ("experts of the base layout are moved", "simulator.modelled.roofline:Machine.moved_experts", " and layout != base", ""),
    ],
    "tests/unit/simulator/modelled/test_hardware.py": [
        ("experts are read whole where they are cut", "simulator.modelled.roofline:Machine.step", "memory += load.hot * model.expert_weights", "memory += load.hot * tp * model.expert_weights"),
        ("KV that a rank holds is moved", "simulator.modelled.roofline:_moved_heads", "len(needed - held.get(rank, set()))", "len(needed)"),
    ],
    "tests/unit/simulator/test_turns.py": [
        ("a turn arrives when the one before it ends", "simulator.simulated_requests:SimulatedRequests.end", "at + float(self._trace.arrivals[following])", "at"),
        ("a cache holds parts of blocks", "simulator.simulated_replica:SimulatedReplica._take_back", " // _BLOCK * _BLOCK", ""),
        ("only the turn before a turn has left something", "simulator.simulated_replica:SimulatedReplica._left_by", "while before is not None and not self.free.left_by(before):", "if before is not None and not self.free.left_by(before):\n            return None\n        while False:"),
        ("contexts are moved between kinds", "simulator.carrying:carry", "if source.shares_kv(target):", "if False:"),
        ("the oldest contexts are carried first", "simulator.carrying:_carry_contexts", "-context.used", "context.used"),
        ("a chunk goes on after a turn has arrived", "simulator.simulated_engine:SimulatedEngine._stop_for", "replica.end > arrival", "False"),
        ("nobody asks again whether a batch is over", "simulator.simulate:simulate", "if policy.is_over(engine.now):", "if False:"),
    ],
    "tests/unit/advice/test_advise.py": [
        ("drafts of a tuned schedule cost nothing", "advice.simulations:draft_schedule", "drafts=batch * k", "drafts=0"),
        ("luck is a gain", "advice.simulations:gain", "mean + half, mean - half", "mean, mean"),
        ("a gain as large as PAT's own work pays", "advice.simulations:Gain.reaches", "(0.0, OWN_WORK)", "(0.0,)"),
        ("drafts are advised where they cost time", "advice.verdict:advise", "ours = best(results, (pat_plain, pat))", "ours = max((pat_plain, pat), key=lambda config: sum(seconds_of(results[config])))"),
        ("PAT with drafts is compared with static layouts without", "advice.verdict:advise", "over(pat, pat_plain)", "over(pat, fastest)"),
        ("a wide replica has the limits of a wide one", "advice.rollouts:Rollouts.with_own_limits", "getattr(self.static, name)[base.tp]", "max(getattr(self.static, name).values())"),
        ("data-parallel ranks share experts", "advice.settings:_forms", "engines > 1 and not mixture", "engines > 1"),
    ],
    "tests/unit/advice/test_lengths.py": [
        ("a prompt is as long as prompt and response", "advice.lengths:_of_records", "total - length for total", "total for total"),
        ("steps of a directory are read by their digits", "advice.lengths:read_rollouts", "(len(file.stem), file.stem)", "file.stem"),
        ("tools take no time", "advice.lengths:_turn", "float(seconds)", "0.0"),
    ],
})
# fmt: on
