# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes in the simulator, the advice, and what both take from the predictor for mixtures."""

from __future__ import annotations

from tests.nightly.mutations.mutation import Mutation

ENGINE = "tests/unit/simulator/test_engine.py"
GUESSES = "tests/unit/simulator/test_guesses.py"
TRUTH = "tests/unit/simulator/test_truth.py"
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
    ("a switch between kinds moves KV", "engine:SimulatedEngine.switch", " * (source.tp != target.tp)", "", MIXTURES),
    ("a switch loses the KV that it moves", "engine:SimulatedEngine.switch", "computed[request] <= room[replica.index]", "computed[request] > room[replica.index]", ENGINE),
    ("requests without KV queue before the others", "engine:SimulatedEngine.switch", "carried.sort(key=lambda one: one[0])", "carried.sort(key=lambda one: not one[0])", ENGINE),
    ("a policy waits for a whole chunk after a switch", "engine:SimulatedEngine._start", "self._policy is not None and not replica.made", "False", ENGINE),
    ("a chunk goes on after an arrival", "engine:SimulatedEngine._start", "until < steps", "until > steps", ENGINE),
    ("a chunk goes on where another replica has drained", "engine:SimulatedEngine.advance", "not all(replica.num_seqs for replica in over)", "False", ENGINE),
    ("steps that end together start the next ones", "engine:SimulatedEngine.advance", "self.now + first.rounding", "self.now - first.rounding", ENGINE),
    ("a response that was cut short is complete", "engine:SimulatedEngine._finish", "length < self._requests.max_tokens", "length <= self._requests.max_tokens", ENGINE),
    ("a policy does not see the steps of a chunk", "engine:SimulatedEngine._live_requests", "int(steps * replica.pace)", "0", ENGINE),
    ("drafts are verified at another length than planned", "engine:SimulatedEngine._draft_length", "first <= batch <= last", "first < batch <= last", GUESSES),
    ("a chunk has the shape of its first step", "replica:ScheduledStep.shape", "self.context + int(batch * middle)", "self.context", ENGINE),
    ("a replica runs one request too many", "replica:SimulatedReplica.schedule", "len(self.running) < most", "len(self.running) <= most", ENGINE),
    ("a shared prompt is computed again", "replica:SimulatedReplica.schedule", "group in self.cached_prompts and", "group not in self.cached_prompts and", ENGINE),
    ("a prompt is computed in a step whatever its length", "replica:SimulatedReplica.schedule", "if missing := tokens - int(computed[request]):\n                prefilling.append((request, min(missing, budget)))", "if missing := tokens - int(computed[request]):\n                prefilling.append((request, missing))", ENGINE),
    ("preempted requests are not counted", "replica:SimulatedReplica._make_room", "requests.preempted += 1", "pass", ENGINE),
    ("the end of a prompt gives no token", "replica:SimulatedReplica.finish", "outputs[request] += 1\n                computed[request] += 1", "pass", ENGINE),
    ("context grows by a token for all requests together", "steady:Steady.advance", "self.context += steps * len(running)", "self.context += steps", ENGINE),
    ("context of responses that have ended is still read", "steady:Steady.advance", "self.context -= requests.num_tokens(request)", "pass", ENGINE),
    ("a response ends a step early", "steady:Steady.advance", "self._by_end[-1][0] <= self.made", "self._by_end[-1][0] <= self.made + 1", ENGINE),
    ("the last step of a run has no room for its own token", "guesses:GuessedTokens._chain", "(self._tokens + k) // (k + 1)", "(self._tokens + k + 1) // (k + 1)", GUESSES),
    ("steps go on into the next response", "guesses:GuessedTokens.outputs", "np.minimum(chain.first[requests] + steps, chain.last[requests])", "chain.first[requests] + steps + 1", GUESSES),
    ("the token after the drafts counts as accepted", "guesses:GuessedTokens.accepted", "self._tokens[run] - 1 - at", "self._tokens[run] - at", GUESSES),
    ("drafts of a tuned schedule cost nothing", "tuned:tuned_schedule", "drafts=batch * k", "drafts=0", GUESSES),
    ("a prompt beside a batch reads the weights again", "truth:ReplayedTruth.step_seconds", "prefill - min(seconds, prefill, self._decode[layout].shortest)", "prefill", TRUTH),
    ("drafts of one request are those of the batch", "truth:ReplayedTruth._decode_seconds", "(shape.batch * shape.k)", "shape.k", TRUTH),
    ("a batch beyond the largest takes as long as it", "truth:_DecodeTimes._row", "(batch / math.exp(at))", "1.0", TRUTH),
    ("a chunk has the noise of one step", "truth:_Noise.of_steps", "(sums[first + steps] - sums[first]) / steps", "sums[first + 1] - sums[first]", TRUTH),
    ("a machine slows down for ever", "truth:DriftingTruth.step_seconds", "min(1.0, max(0.0, now) / self.over)", "max(0.0, now) / self.over", TRUTH),
    ("the way home costs a fixed switch", "truth:FixedSwitches.switch_seconds", "source == target or not np.any(live)", "source == target", TRUTH),
    ("batches share prompts", "replay:simulate_batches", "first + group for group", "group for group", ENGINE),
    ("a batch begins while the engine is on its way home", "replay:simulate_batches", "runs[-1].back + gap", "runs[-1].ended + gap", ENGINE),
    ("a header may be anywhere", "traces:_lines", "if not first:", "if number < 0:", TRACES),
    ("lengths of a group are unrelated", "traces:grpo", "standard_normal(prompts)[groups]", "standard_normal(len(groups))", TRACES),
    ("the first request arrives late", "traces:staggered", "np.cumsum(gaps) - gaps[0]", "np.cumsum(gaps)", TRACES),
    ("experts of the mean rank are read", "modelled.expert_load:_busiest", "hot.max(axis=1)", "hot.mean(axis=1)", EXPERTS),
    ("work of the mean rank is done", "modelled.expert_load:_busiest", "work.max(axis=1)", "work.mean(axis=1)", EXPERTS),
    ("work does not vary between ranks", "modelled.expert_load:_busiest", "tokens**0.5 * off", "0 * off", EXPERTS),
    ("experts are more popular than the law says", "modelled.expert_load:_popularity", "** -routing.skew", "** (-2 * routing.skew)", EXPERTS),
    ("popular experts lie on the same rank", "modelled.expert_load:_drawn", "random.permuted(popularity, axis=1)", "popularity", EXPERTS),
    ("experts of the base layout are moved", "modelled.roofline:Machine.moved_experts", ' and end != base', "", EXPERTS),
    ("experts are read whole where they are cut", "modelled.roofline:Machine.step", "memory += load.hot * model.expert_weights", "memory += load.hot * tp * model.expert_weights", EXPERTS),
    ("a drafter runs in steps without drafts", "modelled.roofline:Machine.step", "self.drafting if k else 0.0", "self.drafting", HARDWARE),
    ("KV that a rank holds is moved", "modelled.roofline:Machine.moved", "len(needed - held.get(rank, set()))", "len(needed)", HARDWARE),
]
_ADVICE: list[Row] = [
    ("luck is a gain", "verdict:Gain.of", "mean + half, mean - half", "mean, mean", ADVISE),
    ("a gain as large as PAT's own work pays", "verdict:Gain.reaches", "(0.0, OWN_WORK)", "(0.0,)", ADVISE),
    ("drafts are advised where they cost time", "verdict:advise", "sum(pat) < sum(plain)", "sum(pat) > sum(plain)", ADVISE),
    ("PAT with drafts is compared with static layouts without", "verdict:advise", "Gain.of(pat, plain)", "Gain.of(pat, sides.static.seconds)", ADVISE),
    ("the slowest static side is the best", "sides:replay", "min(map(whole, sides)", "max(map(whole, sides)", ADVISE),
    ("a wide replica has the limits of a wide one", "sides:Rollouts.with_own_limits", "getattr(self.static, name)[base.tp]", "max(getattr(self.static, name).values())", ADVISE),
    ("layouts without room for a response stay", "sides:with_room", "if most > tokens", "if most > 0", ADVISE),
    ("the base layout is not in the settings", "settings:pat_options", "if sizes[0] > 1:", "if sizes[0] > 2:", ADVISE),
    ("a kind of layouts is not in the settings", "settings:pat_options", 'kinds == {"ep"} or', "", ADVISE),
    ("data-parallel ranks share experts", "settings:_Engine.settings", "self.engines > 1 and self.experts is None", "self.engines > 1", ADVISE),
    ("a prompt is as long as prompt and response", "lengths:_of_records", "total - length for total", "total for total", LENGTHS),
    ("a response of no tokens is one", "lengths:_whole_numbers", "not 1 <= one", "not 0 <= one", LENGTHS),
    ("prompts are those of other responses", "lengths:EarlierRollouts.draw", "self.num_prompt_tokens[i] for i in picks.tolist()", "self.num_prompt_tokens[0] for i in picks.tolist()", LENGTHS),
    ("steps of a directory are read by their digits", "lengths:read_rollouts", "(len(file.stem), file.stem)", "file.stem", LENGTHS),
]
_MIXTURES: list[Row] = [
    ("steps of both kinds look alike", "predictor.step_time:_features", 'layout.experts == "ep"', "0", MIXTURES),
    ("requests stay whatever the layout", "routing:spread", "source.tp == target.tp", "True", MIXTURES),
    ("KV costs time between kinds", "predictor.cost:CostModel._linear", "source.tp == target.tp", "False", MIXTURES),
    ("KV costs no time in any switch", "predictor.cost:CostModel._linear", "source.tp == target.tp", "True", MIXTURES),
    ("KV is migrated in every switch", "predictor.cost:CostModel._mode_of", "source.tp == target.tp", "True", MIXTURES),
    ("a switch tells of another kind", "predictor.cost:CostModel.observe", "report.source, report.target", "report.source, Layout(report.target.tp, report.target.replicas)", MIXTURES),
]
# fmt: on

MUTATIONS = [
    Mutation(name, f"pat_vllm.{package}{function}", {old: new}, (tests,))
    for package, rows in (("simulator.", _SIMULATOR), ("advice.", _ADVICE), ("", _MIXTURES))
    for name, function, old, new, tests in rows
]
