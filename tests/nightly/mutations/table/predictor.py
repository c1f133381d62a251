# ruff: noqa: E501  # pieces of source stay whole
"""Mistakes in the predictor, the planner, shards, plans of moves, routing and layouts."""

from __future__ import annotations

from tests.nightly.mutations.mutation import mutations

# fmt: off
MUTATIONS = mutations({
    "tests/unit/predictor/test_planner.py": [
        ("time per token is that of a step without drafts", "predictor.planner:Planner._pace", "token, step = tokens[best, groups]", "token, step = steps[0], steps[0]"),
        ("what waits for a place costs nothing", "predictor.planner:Planner._load", "waves = batch / running", "waves = running / running"),
        ("the first step after a switch has drafts", "predictor.planner:Planner._switch_seconds", "(1 - 1 / pace.tokens)", "0"),
        ("prompts are computed last", "predictor.planner:Planner.layout_costs", "seconds[:, -1] +=", "seconds[:, 0] +="),
        ("one replica computes all prompts", "predictor.planner:Planner.prefill_seconds", "(share * layout.replicas)", "share"),
        ("a switch of the first group is free", "predictor.planner:LayoutCosts.plan", "cost[i] + after[i]", "after[i]"),
        ("a hope slows a layout down", "predictor.planner:LayoutCosts.optimistic", "value / factor", "value * factor"),
        ("contexts do not grow", "predictor.forecast:forecast", "generated * middle", "0 * middle"),
        ("a table ends before the largest batch", "predictor.planner:_schedule", "np.append(begins[1:], most)", "np.append(begins[1:], most - 1)"),
    ],
    "tests/unit/predictor/test_speeds.py": [
        ("the first token is taken for a step's", "predictor.speeds:Speeds.observe", "& (self._seen[0, before] > 0)", ""),
    ],
    "tests/unit/predictor/test_length_model.py::test_lengths_alike_have_a_short_tail": [
        ("a batch of lengths alike has a long tail", "predictor.length_model:Prior.posterior", "(1 - _DOUBT) * share / share.sum() + _DOUBT * self._unseen", "self._unseen"),
    ],
    "tests/unit/predictor/test_correction.py": [
        ("drafts that are dear make all steps seem slow", "predictor.steps.correction:OnlineCorrection._parts", "if drafts > 0:", "if False:"),
        ("what drafts take is left out of many steps", "predictor.steps.correction:OnlineCorrection.factor", "total = total + np.asarray(drafts)", "total = total + 0 * np.asarray(drafts)"),
    ],
    "tests/unit/predictor/test_adaptive.py": [
        ("real steps teach nothing", "predictor.steps.step_time:StepTimeModel.observe", "self._correction.observe(layout, shape.batch, ratio, drafts)", "1.0"),
    ],
    "tests/unit/predictor/test_cost.py": [
        ("recomputing uses one replica", "predictor.cost:CostModel.seconds", "np.minimum(np.maximum(num_seqs, 1), target.replicas)", "1"),
        ("the correction of past switches is left out", "predictor.cost:CostModel.seconds", "fixed = correction *", "fixed = 1.0 *"),
        ("drained steps are part of a switch's cost", "predictor.cost:CostModel.observe", "report.seconds - report.quiesce", "report.seconds"),
    ],
    "tests/unit/predictor/test_length_model.py": [
        ("prescribed lengths teach", "predictor.length_model:LengthModel.observe_running", "~live.exact & ", ""),
    ],
    "tests/unit/predictor/test_step_base.py": [
        ("a drafter's passes are one search", "predictor.steps.step_base:_runs", "return k if has_passes", "return k > 0 if has_passes"),
        ("verifying drafts takes no time", "predictor.steps.step_base:StepBase.extra", "drafts * (self.drafts + others", "drafts * 0 * (self.drafts + others"),
    ],
    "tests/unit/weights/test_shards.py": [
        ("the last ranks have the odd experts", "weights.shards:ExpertPartition.shard", "min(tp_rank, more)", "0"),
        ("a copy begins at the start of the base's piece", "weights.shards:pieces_of", "source.dst + skip", "source.dst"),
    ],
    "tests/unit/weights/test_row_order.py": [
        ("swaps lead the other way", "weights.row_order:RowOrder.swaps_to", "list(self.units), dict(enumerate(other.units))", "list(other.units), dict(enumerate(self.units))"),
        ("a block of columns begins inside a band", "weights.row_order:block_of", "math.gcd(rows, len(units) * unit)", "unit"),
    ],
    "tests/unit/kv_transfer/test_plan.py": [
        ("heads are read from the start of the source", "kv_transfer.plan:head_routes", "held.index(wanted[start])", "0"),
        ("a head is fetched though the rank holds it", "kv_transfer.plan:_pick_holder", "target_rank if target_rank in holders else ", ""),
        ("only the first pair of replicas is planned for", "kv_transfer.plan:plan_moves", "for of in sorted(source_blocks)", "for of in sorted(source_blocks)[:1]"),
    ],
    "tests/unit/scheduler/test_routing.py": [
        ("prefixes in caches do not count", "scheduler.routing:Router.route", "max(cached, default=0)", "0"),
    ],
    "tests/unit/test_layout.py": [
        ("groups are neighbouring ranks", "layout:Layout.replica_of", "rank % self.replicas", "rank // self.tp"),
        ("replicated heads alternate", "layout:Layout.kv_heads_of", "tp_rank // (self.tp // num_kv_heads)", "tp_rank % num_kv_heads"),
    ],
})
# fmt: on
