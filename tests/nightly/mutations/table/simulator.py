# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes in the simulator, the advice, and what both take from the predictor for mixtures."""

from __future__ import annotations

from tests.nightly.mutations.mutation import Mutation

ENGINE = "tests/unit/simulator/test_engine.py"
GUESSES = "tests/unit/simulator/test_guesses.py"
TRUTH = "tests/unit/simulator/test_truth.py"
TURNS = "tests/unit/simulator/test_turns.py"
TRACES = "tests/unit/simulator/test_traces.py"
MIXTURES = "tests/unit/simulator/test_expert_layouts.py"
EXPERTS = "tests/unit/simulator/modelled/test_expert_load.py"
HARDWARE = "tests/unit/simulator/modelled/test_hardware.py"
LENGTHS = "tests/unit/advice/test_lengths.py"
ADVISE = "tests/unit/advice/test_advise.py"

Row = tuple[str, str, str, str, str]
"""The mistake, the function, what is replaced, by what, and the tests that must see it."""

# fmt: off
_SIMULATOR: list[Row] = [
    ("a switch does not wait for steps in flight", "engine:SimulatedEngine.switch", "self.drain()", "pass", ENGINE),
    ("a chunk is cut at the step before the one in flight", "replica:SimulatedReplica.steps_made", "max(1, math.ceil(made - _ROUNDING))", "max(1, math.floor(made))", ENGINE),
    ("a switch between kinds moves KV", "engine:SimulatedEngine.switch", " * (not source.shares_kv(target))", "", MIXTURES),
    ("a switch loses the KV that it moves", "carrying:carry", "computed[request] <= room[replica.index]", "computed[request] > room[replica.index]", ENGINE),
    ("a chunk goes on after an arrival", "engine:SimulatedEngine._start", "until < steps", "until > steps", ENGINE),
    ("a chunk goes on where another replica has drained", "engine:SimulatedEngine.advance", "not all(replica.num_seqs for replica in over)", "False", ENGINE),
    ("a response that was cut short is complete", "engine:SimulatedEngine._finish", "length < most", "length <= most", ENGINE),
    ("a policy does not see the steps of a chunk", "engine:SimulatedEngine._live_requests", "requests.tokens_in(replica.decoding, steps, replica.k)", "0", ENGINE),
    ("drafts are verified at another length than planned", "engine:SimulatedEngine._draft_length", "first <= batch <= last", "first < batch <= last", GUESSES),
    ("a replica runs one request too many", "replica:SimulatedReplica.schedule", "len(self.running) < most", "len(self.running) <= most", ENGINE),
    ("a prompt is computed in a step whatever its length", "replica:SimulatedReplica.schedule", "if missing := tokens - int(computed[request]):\n                prefilling.append((request, min(missing, budget)))", "if missing := tokens - int(computed[request]):\n                prefilling.append((request, missing))", ENGINE),
    ("context grows by a token for all requests together", "steady:Steady.advance", "self.context += steps * len(running)", "self.context += steps", ENGINE),
    ("a response ends a step early", "steady:Steady.advance", "self._by_end[-1][0] <= self.made", "self._by_end[-1][0] <= self.made + 1", ENGINE),
    ("the last step of a run has no room for its own token", "guesses:GuessedTokens._chain", "(self._tokens + k) // (k + 1)", "(self._tokens + k + 1) // (k + 1)", GUESSES),
    ("the token after the drafts counts as accepted", "guesses:GuessedTokens.accepted", "self._tokens[run] - 1 - at", "self._tokens[run] - at", GUESSES),
    ("drafts of a tuned schedule cost nothing", "tuned:tuned_schedule", "drafts=batch * k", "drafts=0", GUESSES),
    ("a prompt beside a batch reads the weights again", "truth:ReplayedTruth.step_seconds", "prefill - min(seconds, prefill, self._decode[layout].shortest)", "prefill", TRUTH),
    ("a batch beyond the largest takes as long as it", "truth:_DecodeTimes._row", "(batch / math.exp(at))", "1.0", TRUTH),
    ("batches share prompts", "replay:simulate_batches", "first + group for group", "group for group", ENGINE),
    ("lengths of a group are unrelated", "shapes:grpo", "standard_normal(prompts)[groups]", "standard_normal(len(groups))", TRACES),
    ("experts of the mean rank are read", "modelled.expert_load:_busiest", "hot.max(axis=1)", "hot.mean(axis=1)", EXPERTS),
    ("work does not vary between ranks", "modelled.expert_load:_busiest", "tokens**0.5 * off", "0 * off", EXPERTS),
    ("popular experts lie on the same rank", "modelled.expert_load:_drawn", "random.permuted(popularity, axis=1)", "popularity", EXPERTS),
    ("experts of the base layout are moved", "modelled.roofline:Machine.moved_experts", ' and end != base', "", EXPERTS),
    ("experts are read whole where they are cut", "modelled.roofline:Machine.step", "memory += load.hot * model.expert_weights", "memory += load.hot * tp * model.expert_weights", HARDWARE),
    ("KV that a rank holds is moved", "modelled.roofline:_moved_heads", "len(needed - held.get(rank, set()))", "len(needed)", HARDWARE),
    ("a turn arrives when the one before it ends", "requests:SimulatedRequests.end", "at + float(self._trace.arrivals[following])", "at", TURNS),
    ("a cache holds parts of blocks", "replica:SimulatedReplica._take_back", " // _BLOCK * _BLOCK", "", TURNS),
    ("only the turn before a turn has left something", "replica:SimulatedReplica._left_by", "while before is not None and not self.free.left_by(before):", "if before is not None and not self.free.left_by(before):\n            return None\n        while False:", TURNS),
    ("contexts are moved between kinds", "carrying:carry", "if source.shares_kv(target):", "if False:", TURNS),
    ("the oldest contexts are carried first", "carrying:_carry_contexts", "-one.used", "one.used", TURNS),
    ("a chunk goes on after a turn has arrived", "engine:SimulatedEngine._stop_for", "replica.end > arrival", "False", TURNS),
    ("nobody asks again whether a batch is over", "replay:simulate", "if policy.is_over(engine.now):", "if False:", TURNS),
]
_ADVICE: list[Row] = [
    ("luck is a gain", "replay:gain", "mean + half, mean - half", "mean, mean", ADVISE),
    ("a gain as large as PAT's own work pays", "replay:Gain.reaches", "(0.0, OWN_WORK)", "(0.0,)", ADVISE),
    ("drafts are advised where they cost time", "verdict:conclude", "ours = best(records, (pat_plain, pat))", "ours = max((pat_plain, pat), key=lambda one: sum(seconds_of(records, one)))", ADVISE),
    ("PAT with drafts is compared with static layouts without", "verdict:conclude", "over(pat, pat_plain)", "over(pat, fastest)", ADVISE),
    ("a wide replica has the limits of a wide one", "rollouts:Rollouts.with_own_limits", "getattr(self.static, name)[base.tp]", "max(getattr(self.static, name).values())", ADVISE),
    ("data-parallel ranks share experts", "settings:_forms", "engines > 1 and not mixture", "engines > 1", ADVISE),
    ("a prompt is as long as prompt and response", "lengths:_of_records", "total - length for total", "total for total", LENGTHS),
    ("steps of a directory are read by their digits", "lengths:read_rollouts", "(len(file.stem), file.stem)", "file.stem", LENGTHS),
    ("tools take no time", "lengths:_turn", "float(seconds)", "0.0", LENGTHS),
]
_MIXTURES: list[Row] = [
    ("steps of both kinds look alike", "predictor.step_residual:features_of", 'layout.experts == "ep"', "0", MIXTURES),
    ("requests stay whatever the layout", "routing:spread", "source.shares_kv(target)", "True", MIXTURES),
    ("KV costs time between kinds", "predictor.cost:CostModel._linear", "source.shares_kv(target)", "False", MIXTURES),
    ("a switch tells of another kind", "predictor.cost:CostModel.observe", "report.source, report.target", "report.source, Layout(report.target.tp, report.target.replicas)", MIXTURES),
]
# fmt: on

MUTATIONS = [
    Mutation(name, f"pat_vllm.{package}{function}", {old: new}, (tests,))
    for package, rows in (("simulator.", _SIMULATOR), ("advice.", _ADVICE), ("", _MIXTURES))
    for name, function, old, new, tests in rows
]
