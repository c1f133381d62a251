# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes in the predictor, the planner, savings, shards, plans of moves, routing and layouts."""

from __future__ import annotations

from tests.nightly.mutations.mutation import mutations

# fmt: off
MUTATIONS = mutations({
    "tests/unit/predictor/test_acceptance.py": [
        ("evidence of drafts never fades", "predictor.acceptance:Acceptance.observe", "keep = math.exp(-1 / max(memory, _MEMORY_OF_ONE / max(1, requests)))", "keep = 1.0"),
        ("acceptance of old weights counts on", "predictor.acceptance:Acceptance.weights_changed", "keep = ", "keep = 1.0 + 0 * "),
        ("drafts cost as many as are asked for", "predictor.acceptance:Acceptance.observe", "len(accepted) if drafted is None else _at_least(drafted, length)[1:]", "len(accepted)"),
        ("accepted tokens are no hits", "predictor.acceptance:Acceptance._count", "at_least[0] + made", "at_least[0]"),
        ("a draft counts as tried though one before it failed", "predictor.acceptance:Acceptance._count", "+= at_least[:-1]", "+= at_least[0]"),
        ("the share of tokens is taken for that of steps", "predictor.acceptance:Acceptance.expected", "1 / (1 - shares[0] + shares[0] / per_hit)", "1 + shares[0] * (per_hit - 1)"),
    ],
    "tests/unit/predictor/test_kept.py": [
        ("acceptance of another engine is as sure", "predictor.kept:load", "acceptance.weights_changed()", "pass"),
        ("acceptance is not kept", "predictor.kept:save", "if acceptance is not None", "if False"),
    ],
    "tests/unit/predictor/test_planner.py": [
        ("responses end in each replica in turn", "predictor.planner:_batch", "1 + beside * (live - 1) / max(1.0, most - 1)", "np.maximum(1.0, live / replicas)"),
        ("time per token is that of a step without drafts", "predictor.planner:Planner._pace", "token, step = tokens[best, groups]", "token, step = steps[0], steps[0]"),
        ("what waits for a place costs nothing", "predictor.planner:Planner._pace", "turns = batch / running", "turns = 1.0"),
        ("all contexts grow alike where KV is short", "predictor.planner:Planner._pace", "running = np.where(short, queued, running)", "pass"),
        ("lost KV is computed again for nothing", "predictor.planner:Planner._pace", "again = short * course.live", "again = 0 * course.live"),
        ("the first step after a switch has drafts", "predictor.planner:Planner._switch_seconds", "(1 - 1 / pace.tokens)", "0"),
        ("a drain waits for a whole step", "predictor.planner:Planner._switch_seconds", "waits = 0.5 *", "waits = 1.0 *"),
        ("the target's room is the source's", "predictor.planner:Planner._switch_seconds", "- room[j]", "- room[i]"),
        ("prompts are computed last", "predictor.planner:Planner.outlook", "seconds[:, -1] +=", "seconds[:, 0] +="),
        ("one replica computes all prompts", "predictor.planner:Planner._prefill_seconds", "(share * layout.replicas)", "share"),
        ("a switch of the first group is free", "predictor.planner:Outlook.plan", "cost[i] + after[i]", "after[i]"),
        ("later switches are left out", "predictor.planner:Outlook.plan", "value = [min(map(add, row, after)) for row in switch]", "value = after"),
        ("a hope slows a layout down", "predictor.planner:Outlook.hoped", "one / factor", "one * factor"),
        ("contexts do not grow", "predictor.course:course", "made * middle", "0 * middle"),
        ("the last response is forgotten", "predictor.course:course", "before[:, :-1] = ends[:, 1:]", "before[:, :-1] = ends[:, 1:]; before[:, -1] = 1"),
        ("parts of a group come in the wrong order", "predictor.course:_cut", "0.5 - (part + 0.5)", "(part + 0.5)"),
        ("a table ends before the largest batch", "predictor.planner:_schedule", "np.append(begins[1:], most)", "np.append(begins[1:], most - 1)"),
    ],
    "tests/unit/predictor/test_speeds.py": [
        ("each request pays for the steps of the last one", "predictor.planner:Planner._pace", "(steps - fixed) * each", "(steps - fixed) * last"),
        ("a step's fixed part is a step of one request", "predictor.planner:Planner._pace", "(4 * seconds(0.25 * running) - steps) / 3", "seconds(np.ones_like(running))"),
        ("the first token is taken for a step's", "predictor.speeds:Speeds.observe", "& (self._seen[0, before] > 0)", ""),
        ("requests end in the order of their tokens", "predictor.course:course", "-remaining * per_token[used]", "-remaining"),
        ("a request that waits is slow", "predictor.speeds:Speeds.observe", "& (new[0] >= new[1])", ""),
        ("no drafts are taken for refused ones", "predictor.speeds:Speeds.observe", "or (new[0] == new[1]).all()", ""),
        ("steps go on after a switch", "predictor.speeds:Speeds.moved", "self._seen[1] = np.iinfo(np.int64).max // 2", "pass"),
    ],
    "tests/unit/predictor/test_draft_lengths.py::test_speeds_are_seen_in_steps_of_one_draft_length": [
        ("speeds are seen in steps of several draft lengths", "predictor.adaptive:AdaptivePolicy._length_asked", ">= _STEADY * asked.total()", ">= 0"),
    ],
    "tests/unit/predictor/test_lengths.py::test_lengths_alike_have_a_short_tail": [
        ("a batch of lengths alike has a long tail", "predictor.lengths:Prior.given", "(1 - _DOUBT) * share / share.sum() + _DOUBT * self._unseen", "self._unseen"),
    ],
    "tests/unit/predictor/test_correction.py": [
        ("drafts that are dear make all steps seem slow", "predictor.correction:OnlineCorrection._parts", "if drafts > 0:", "if False:"),
        ("what drafts take is left out of many steps", "predictor.correction:OnlineCorrection.factors", "total = total + np.asarray(drafts)", "total = total + 0 * np.asarray(drafts)"),
    ],
    "tests/unit/predictor/test_trajectories.py": [
        ("idle is the end", "predictor.trajectories:Trajectories.is_over", "not self.go_on", "True"),
        ("a batch that seemed to be over stays so", "predictor.trajectories:Trajectories.arrived", "if turn.trajectory in self._left", "if False"),
        ("a tool begins anew at each plan", "predictor.trajectories:Trajectories.sample", "gaps[which] - passed", "gaps[which]"),
        ("tools are faster in a wider layout", "predictor.trajectories:course_of_turns", "live / np.maximum(live + waiting, 1)", "(live > 0)"),
    ],
    "tests/unit/predictor/test_adaptive.py": [
        ("a switch is not held", "predictor.adaptive:AdaptivePolicy._dwell_end", "_DWELL * (", "0 * ("),
        ("what runs is not observed", "predictor.adaptive:AdaptivePolicy._decide", "self._lengths.observe_running(live)", "pass"),
        ("all batches open in the base layout", "predictor.adaptive:AdaptivePolicy._open", "self.home = min(", "min("),
        ("it plans before each step", "predictor.adaptive:AdaptivePolicy._due", "> _NEWS * live", ">= 0"),
        ("real steps teach nothing", "predictor.adaptive:AdaptivePolicy.stepped", "self._steps.observe(layout, shape, seconds)", "pass"),
        ("the engine's cost model hears of switches twice", "predictor.adaptive:AdaptivePolicy.switched", "if self._own_costs", "if True"),
        ("no layout is probed", "predictor.probing:Prober.find", "hoped.best == layout", "False"),
    ],
    "tests/unit/predictor/test_cost.py": [
        ("recomputing uses one replica", "predictor.cost:CostModel.seconds", "np.minimum(np.maximum(num_seqs, 1), target.replicas)", "1"),
        ("the correction of past switches is left out", "predictor.cost:CostModel.seconds", "fixed = correction *", "fixed = 1.0 *"),
        ("drained steps are part of a switch's cost", "predictor.cost:CostModel.observe", "report.seconds - report.quiesce", "report.seconds"),
        ("tiny exchanges say how fast KV moves", "predictor.cost:CostModel.observe", ">= _LEAST_EXCHANGE", ">= 0"),
        ("KV is computed again where only experts move", "predictor.cost:CostModel._mode_of", "source.shares_kv(target)", "False"),
    ],
    "tests/unit/predictor/test_lengths.py": [
        ("prescribed lengths teach", "predictor.lengths:LengthModel.observe_running", "~live.exact & ", ""),
        ("earlier batches are forgotten", "predictor.lengths:LengthModel._refresh", " + self._history", ""),
        ("responses that were cut short count as ended", "predictor.lengths:Pool.of", "at[ended]", "at"),
    ],
    "tests/unit/predictor/test_step_base.py": [
        ("verifying drafts takes no time", "predictor.step_base:StepBase.extra", "drafts * (self.drafts + others", "drafts * 0 * (self.drafts + others"),
        ("looking for drafts takes no time", "predictor.step_base:StepBase.extra", "(k > 0) * (self", "0 * (self"),
        ("drafts read experts that the batch has read", "predictor.step_base:StepBase.extra", "self.experts * (1 - self.chosen) ** batch", "self.experts"),
        ("decoding reads no experts", "predictor.step_base:StepBase.decode", "self.experts * (1 -", "0 * (1 -"),
        ("only decoded tokens read experts", "predictor.step_base:StepBase.fit", "** tokens", "** batch"),
    ],
    "tests/unit/predictor/test_step_residual.py": [
        ("the residual is always used", "predictor.step_residual:StepFit.learned", "sum(self.with_residual) < sum(self.roofline)", "bool(self.roofline)"),
        ("the worse one is used", "predictor.step_residual:StepFit.learned", "< sum(", "> sum("),
        ("errors of steps that were seen", "predictor.step_residual:cross_validate", "by_layout(held, decodes", "by_layout(kept, decodes"),
        ("the residual is judged without the roofline", "predictor.step_residual:cross_validate", "rest * factors", "factors"),
        ("repeats of a shape are torn apart", "predictor.step_residual:folds", "s.batch, s.context, s.prefill", "s.longest, s.batch, s.prefill"),
        ("any number of samples is enough", "predictor.step_residual:learnable", ">= LEAST_SAMPLES", ">= 0"),
        ("one layout that needs the residual has all get it", "predictor.step_time:StepTimeModel.fit", "booster if fits[one].learned else None", "booster"),
    ],
    "tests/unit/predictor/test_step_time.py": [
        ("outliers are believed", "predictor.correction:OnlineCorrection.observe", "trust = min(1.0, believed / distance) if distance > 0 else 1.0", "trust = 1.0"),
        ("a change of the machine is taken for outliers", "predictor.correction:OnlineCorrection.observe", ">= _STREAK", ">= 10**9"),
    ],
    "tests/unit/predictor/test_savings.py": [
        ("a drain is part of the stall", "predictor.savings:Savings.switched", "report.seconds - report.quiesce", "report.seconds"),
        ("steps with drafts count as plain", "predictor.savings:Savings.drafted", "length > 0", "False"),
        ("a fixed layout has the stalls of switches", "predictor.savings:Savings._fold", "taken - stalled - sum", "taken - sum"),
        ("without drafts a batch has no stalls", "predictor.savings:Savings._fold", "taken - sum(s.seconds - s.stall for", "taken - sum(s.seconds for"),
        ("requests with drafts are taken to advance alike", "predictor.savings:Savings.end", "in_step(counted, lengths)", "counted"),
    ],
    "tests/unit/weights/test_shards.py": [
        ("replicated KV heads alternate over ranks", "weights.shards:QKVPartition.shard", "tp_rank // copies * kv_heads", "tp_rank % self.total_kv_heads * kv_heads"),
        ("padding is cut off", "weights.shards:VocabPartition.shard", "size=rows", "size=stop - start"),
        ("the last ranks have the odd experts", "weights.shards:ExpertPartition.shard", "min(tp_rank, more)", "0"),
        ("every dimension is cut in every layout", "weights.shards:Cut.ways", "if self.experts in (None, place.experts) else 1", ""),
        ("a copy begins at the start of the base's piece", "weights.shards:pieces_of", "source.dst + skip", "source.dst"),
    ],
    "tests/unit/weights/test_row_order.py": [
        ("swaps lead the other way", "weights.row_order:RowOrder.swaps_to", "list(self.units), dict(enumerate(other.units))", "list(other.units), dict(enumerate(self.units))"),
        ("joined swaps overlap", "weights.row_order:_joined", "last.length < abs(last.a - last.b)", "True"),
        ("swaps of the same rows share a round", "weights.row_order:rounds", "any(_overlap(swap, other) for other in made[-1])", "False"),
        ("a block lies where most rows move", "weights.row_order:block_of", "return min(blocks", "return max(blocks"),
    ],
    "tests/unit/kv_transfer/test_plan.py": [
        ("heads are read from the start of the source", "kv_transfer.plan:head_routes", "held.index(wanted[start])", "0"),
        ("a head is fetched though the rank holds it", "kv_transfer.plan:_pick_holder", "target_rank if target_rank in holders else ", ""),
        ("one holder sends a replicated head to all", "kv_transfer.plan:_pick_holder", "target_rank % len(holders)", "0"),
        ("only the first pair of replicas is planned for", "kv_transfer.plan:plan_moves", "for of in sorted(source_blocks)", "for of in sorted(source_blocks)[:1]"),
        ("a rank receives what it sends", "kv_transfer.plan:RankMoves.of", "== (peer, rank)", "== (rank, peer)"),
    ],
    "tests/unit/test_chains.py": [
        ("a replica gets more than it has room for", "chains:fill", "left[target] -= len(blocks)", "pass"),
        ("what is carried is carried again", "chains:fill", "held[target][group].update(names)", "pass"),
        ("a chain takes more than there is room for", "chains:_what_fits", "if too_many > 0:", "if False:"),
        ("of several groups too little is carried", "chains:_what_fits", "-(-too_many // len(kinds))", "too_many"),
        ("what is held is carried again", "chains:_what_fits", "chain[place] in hashes)", "False)"),
        ("a chain's first block is taken for held", "kinds:FullAttention.missing", "range(bisect_left(", "range(1 + bisect_left("),
        ("a chain that is continued stays", "chains:Chains.ended", "self._forget_continued(chain)", "pass"),
        ("all chains are remembered", "chains:Chains.ended", "self._blocks > REMEMBERED_BLOCKS", "False"),
        ("the chance is of all time", "chains:Chains.ended", "self._requests > _WINDOW", "False"),
        ("what was not carried is not asked for", "chains:Chains.arrived", "max(unused, *continued, 0)", "unused"),
    ],
    "tests/vllm/scheduler/test_groups.py + tests/unit/test_kinds.py": [
        ("a window is a token shorter", "kinds:SlidingWindow.held", "self.window + 1", "self.window + 2"),
        ("a latent vector is cut as heads are", "kinds:LatentAttention.heads_in", "return 1", "return num_kv_heads"),
        ("a hit may lack what its window needs", "kinds:StateKind.longest_hit", "if gap is None:", "if True:"),
    ],
    "tests/unit/test_routing.py": [
        ("prefixes in caches do not count", "routing:Router.route", "max(cached, default=0)", "0"),
        ("the slack is one request too small", "routing:Router.route", "<= slack else", "< slack else"),
        ("what both have cached counts", "routing:Router.route", "cached[known] - cached[least]", "cached[known]"),
        ("the shortest prefix decides", "routing:Router.route", "len(prefixes) - i\n                break", "len(prefixes) - i"),
        ("prefixes that are used are forgotten first", "routing:Router.route", "popitem(last=False)", "popitem()"),
        ("a replica may get more than its share", "routing:spread", "open_near or [r for r in range(target.replicas) if count[r] < share]", "near or [*range(target.replicas)]"),
        ("contexts are not balanced", "routing:spread", "(count[r], context[r], r)", "(count[r], r)"),
        ("requests move where experts alone lie otherwise", "routing:spread", "source.shares_kv(target)", "False"),
    ],
    "tests/unit/test_layout.py": [
        ("groups are neighbouring ranks", "layout:Layout.replica_of", "rank % self.replicas", "rank // self.tp"),
        ("replicated heads alternate", "layout:Layout.kv_heads_of", "tp_rank // (self.tp // num_kv_heads)", "tp_rank % num_kv_heads"),
        ("whole experts are preferred", "layout:Layout.find", 'layout.experts == "ep"', 'layout.experts == "tp"'),
        ("devices are in the order of ranks", "layout:device_of", "% factor * place", "% factor * block"),
    ],
})
# fmt: on
