"""Mistakes in the predictor, the planner, savings, shards, plans of moves, routing and layouts."""

from tests.nightly.mutations.mutation import Mutation

PREDICTOR = "pat_vllm.predictor"
ACCEPTANCE = ("tests/unit/predictor/test_acceptance.py",)
ADAPTIVE = ("tests/unit/predictor/test_adaptive.py",)
COST = ("tests/unit/predictor/test_cost.py",)
KEPT = ("tests/unit/predictor/test_kept.py",)
LENGTHS = ("tests/unit/predictor/test_lengths.py",)
PLANNER = ("tests/unit/predictor/test_planner.py",)
SAVINGS = ("tests/unit/predictor/test_savings.py",)
SPEEDS = ("tests/unit/predictor/test_speeds.py",)
TRAJECTORIES = ("tests/unit/predictor/test_trajectories.py",)
STEP_BASE = ("tests/unit/predictor/test_step_base.py",)
STEP_RESIDUAL = ("tests/unit/predictor/test_step_residual.py",)
STEP_TIME = ("tests/unit/predictor/test_step_time.py",)
SHARDS = ("tests/unit/weights/test_shards.py",)
ROW_ORDER = ("tests/unit/weights/test_row_order.py",)
PLAN = ("tests/unit/kv_transfer/test_plan.py",)
ROUTING = ("tests/unit/test_routing.py",)
CHAINS = ("tests/unit/test_chains.py",)
KINDS = ("tests/vllm/scheduler/test_groups.py", "tests/unit/test_kinds.py")
LAYOUT = ("tests/unit/test_layout.py",)

_FADES = "keep = math.exp(-1 / max(memory, _MEMORY_OF_ONE / max(1, requests)))"

# What replaces what, by function and then by the mistake's name.
_MISTAKES: dict[tuple[str, tuple[str, ...]], dict[str, dict[str, str]]] = {
    (f"{PREDICTOR}.acceptance:Acceptance.observe", ACCEPTANCE): {
        "evidence of drafts never fades": {_FADES: "keep = 1.0"},
    },
    (f"{PREDICTOR}.acceptance:Acceptance.weights_changed", ACCEPTANCE): {
        "acceptance of old weights counts on": {"keep = ": "keep = 1.0 + 0 * "},
    },
    (f"{PREDICTOR}.acceptance:Acceptance._count", ACCEPTANCE): {
        "accepted tokens are no hits": {"at_least[0] + made": "at_least[0]"},
        "a draft counts as tried though one before it failed": {
            "+= at_least[:-1]": "+= at_least[0]"
        },
    },
    (f"{PREDICTOR}.acceptance:Acceptance.expected", ACCEPTANCE): {
        "the share of tokens is taken for that of steps": {
            "1 / (1 - shares[0] + shares[0] / per_hit)": "1 + shares[0] * (per_hit - 1)"
        },
    },
    (f"{PREDICTOR}.kept:load", KEPT): {
        "acceptance of another engine is as sure": {"acceptance.weights_changed()": "pass"},
    },
    (f"{PREDICTOR}.kept:save", KEPT): {
        "acceptance is not kept": {"if acceptance is not None": "if False"},
    },
    (f"{PREDICTOR}.planner:Planner._pace", PLANNER): {
        "time per token is that of a step without drafts": {
            "token, step = tokens[best, groups]": "token, step = steps[0], steps[0]"
        },
        "what waits for a place costs nothing": {"turns = batch / running": "turns = 1.0"},
        "all contexts grow alike where KV is short": {
            "running = np.where(short, queued, running)": "pass"
        },
        "lost KV is computed again for nothing": {
            "again = short * course.live": "again = 0 * course.live"
        },
    },
    (f"{PREDICTOR}.planner:Planner._pace", SPEEDS): {
        "each request pays for the steps of the last one": {
            "(steps - fixed) * each": "(steps - fixed) * last"
        },
    },
    (f"{PREDICTOR}.course:course", SPEEDS): {
        "requests end in the order of their tokens": {"-remaining * per_token[used]": "-remaining"},
    },
    (f"{PREDICTOR}.trajectories:Trajectories.is_over", TRAJECTORIES): {
        "idle is the end": {"not self.go_on": "True"},
    },
    (f"{PREDICTOR}.trajectories:Trajectories.arrived", TRAJECTORIES): {
        "a batch that seemed to be over stays so": {"if turn.trajectory in self._left": "if False"},
    },
    (f"{PREDICTOR}.trajectories:Trajectories.sample", TRAJECTORIES): {
        "a tool begins anew at each plan": {"gaps[which] - passed": "gaps[which]"},
    },
    (f"{PREDICTOR}.trajectories:course_of_turns", TRAJECTORIES): {
        "tools are faster in a wider layout": {
            "live / np.maximum(live + waiting, 1)": "(live > 0)"
        },
    },
    (f"{PREDICTOR}.speeds:Speeds.observe", SPEEDS): {
        "a request that waits is slow": {"& (new[0] >= new[1])": ""},
        "no drafts are taken for refused ones": {"or (new[0] == new[1]).all()": ""},
    },
    (f"{PREDICTOR}.speeds:Speeds.moved", SPEEDS): {
        "steps go on after a switch": {"self._seen[1] = np.iinfo(np.int64).max // 2": "pass"},
    },
    (f"{PREDICTOR}.planner:Planner._switch_seconds", PLANNER): {
        "the first step after a switch has drafts": {"(1 - 1 / pace.tokens)": "0"},
        "a drain waits for a whole step": {"waits = 0.5 *": "waits = 1.0 *"},
        "the target's room is the source's": {"- room[j]": "- room[i]"},
    },
    (f"{PREDICTOR}.planner:Planner.outlook", PLANNER): {
        "prompts are computed last": {"seconds[:, -1] +=": "seconds[:, 0] +="},
    },
    (f"{PREDICTOR}.planner:Planner._prefill_seconds", PLANNER): {
        "one replica computes all prompts": {
            "(share * layout.replicas)": "share",
        },
    },
    (f"{PREDICTOR}.planner:Outlook.plan", PLANNER): {
        "a switch of the first group is free": {
            "cost[i] + after[i]": "after[i]",
        },
        "later switches are left out": {
            "value = [min(map(add, row, after)) for row in switch]": "value = after"
        },
    },
    (f"{PREDICTOR}.planner:Outlook.hoped", PLANNER): {
        "a hope slows a layout down": {"one / factor": "one * factor"},
    },
    (f"{PREDICTOR}.course:course", PLANNER): {
        "contexts do not grow": {"made * middle": "0 * middle"},
        "the last response is forgotten": {
            "before[:, :-1] = ends[:, 1:]": "before[:, :-1] = ends[:, 1:]; before[:, -1] = 1"
        },
    },
    (f"{PREDICTOR}.course:_cut", PLANNER): {
        "parts of a group come in the wrong order": {
            "0.5 - (part + 0.5)": "(part + 0.5)",
        },
    },
    (f"{PREDICTOR}.planner:_schedule", PLANNER): {
        "a table ends before the largest batch": {
            "np.append(begins[1:], most)": "np.append(begins[1:], most - 1)"
        },
    },
    (f"{PREDICTOR}.adaptive:AdaptivePolicy._dwell_end", ADAPTIVE): {
        "a switch is not held": {"_DWELL * (": "0 * ("},
    },
    (f"{PREDICTOR}.adaptive:AdaptivePolicy._decide", ADAPTIVE): {
        "what runs is not observed": {"self._lengths.observe_running(live)": "pass"},
    },
    (f"{PREDICTOR}.adaptive:AdaptivePolicy._open", ADAPTIVE): {
        "all batches open in the base layout": {"self.home = min(": "min("},
    },
    (f"{PREDICTOR}.adaptive:AdaptivePolicy._due", ADAPTIVE): {
        "it plans before each step": {"> _NEWS * live": ">= 0"},
    },
    (f"{PREDICTOR}.adaptive:AdaptivePolicy.stepped", ADAPTIVE): {
        "real steps teach nothing": {"self._steps.observe(layout, shape, seconds)": "pass"},
    },
    (f"{PREDICTOR}.adaptive:AdaptivePolicy.switched", ADAPTIVE): {
        "the engine's cost model hears of switches twice": {"if self._own_costs": "if True"},
    },
    (f"{PREDICTOR}.probing:Prober.find", ADAPTIVE): {
        "no layout is probed": {"hoped.best == layout": "False"},
    },
    (f"{PREDICTOR}.cost:CostModel.seconds", COST): {
        "recomputing uses one replica": {
            "np.minimum(np.maximum(num_seqs, 1), target.replicas)": "1"
        },
        "the correction of past switches is left out": {"fixed = correction *": "fixed = 1.0 *"},
    },
    (f"{PREDICTOR}.cost:CostModel.observe", COST): {
        "drained steps are part of a switch's cost": {
            "report.seconds - report.quiesce": "report.seconds"
        },
        "tiny exchanges say how fast KV moves": {">= _LEAST_EXCHANGE": ">= 0"},
    },
    (f"{PREDICTOR}.cost:CostModel._mode_of", COST): {
        "KV is computed again where only experts move": {"source.shares_kv(target)": "False"},
    },
    (f"{PREDICTOR}.lengths:LengthModel.observe_running", LENGTHS): {
        "prescribed lengths teach": {"~live.exact & ": ""},
    },
    (f"{PREDICTOR}.lengths:LengthModel._refresh", LENGTHS): {
        "earlier batches are forgotten": {" + self._history": ""},
    },
    (f"{PREDICTOR}.lengths:Pool.of", LENGTHS): {
        "responses that were cut short count as ended": {"at[ended]": "at"},
    },
    (f"{PREDICTOR}.step_base:StepBase.extra", STEP_BASE): {
        "verifying drafts takes no time": {
            "drafts * (self.drafts + others": "drafts * 0 * (self.drafts + others"
        },
        "looking for drafts takes no time": {"(k > 0) * (self": "0 * (self"},
        "drafts read experts that the batch has read": {
            "self.experts * (1 - self.chosen) ** batch": "self.experts"
        },
    },
    (f"{PREDICTOR}.step_base:StepBase.decode", STEP_BASE): {
        "decoding reads no experts": {"self.experts * (1 -": "0 * (1 -"},
    },
    (f"{PREDICTOR}.step_base:StepBase.fit", STEP_BASE): {
        "only decoded tokens read experts": {"** tokens": "** batch"},
    },
    (f"{PREDICTOR}.step_residual:StepFit.learned", STEP_RESIDUAL): {
        "the residual is always used": {
            "sum(self.with_residual) < sum(self.roofline)": "bool(self.roofline)"
        },
        "the worse one is used": {"< sum(": "> sum("},
    },
    (f"{PREDICTOR}.step_residual:cross_validate", STEP_RESIDUAL): {
        "errors of steps that were seen": {"by_layout(held, decodes": "by_layout(kept, decodes"},
        "the residual is judged without the roofline": {"rest * factors": "factors"},
    },
    (f"{PREDICTOR}.step_residual:folds", STEP_RESIDUAL): {
        "repeats of a shape are torn apart": {
            "s.batch, s.context, s.prefill": "s.longest, s.batch, s.prefill"
        },
    },
    (f"{PREDICTOR}.step_residual:learnable", STEP_RESIDUAL): {
        "any number of samples is enough": {">= LEAST_SAMPLES": ">= 0"},
    },
    (f"{PREDICTOR}.step_time:StepTimeModel.fit", STEP_RESIDUAL): {
        "one layout that needs the residual has all get it": {
            "booster if fits[one].learned else None": "booster"
        },
    },
    (f"{PREDICTOR}.correction:OnlineCorrection.observe", STEP_TIME): {
        "outliers are believed": {
            "trust = min(1.0, believed / distance) if distance > 0 else 1.0": "trust = 1.0"
        },
        "a change of the machine is taken for outliers": {">= _STREAK": ">= 10**9"},
    },
    (f"{PREDICTOR}.savings:Savings.switched", SAVINGS): {
        "a drain is part of the stall": {"report.seconds - report.quiesce": "report.seconds"},
    },
    (f"{PREDICTOR}.savings:Savings.drafted", SAVINGS): {
        "steps with drafts count as plain": {"length > 0": "False"},
    },
    (f"{PREDICTOR}.savings:Savings._fold", SAVINGS): {
        "a fixed layout has the stalls of switches": {"taken - stalled - sum": "taken - sum"},
        "without drafts a batch has no stalls": {
            "taken - sum(s.seconds - s.stall for": "taken - sum(s.seconds for"
        },
    },
    (f"{PREDICTOR}.savings:Savings.end", SAVINGS): {
        "requests with drafts are taken to advance alike": {"in_step(counted, lengths)": "counted"},
    },
    ("pat_vllm.weights.shards:QKVPartition.shard", SHARDS): {
        "replicated KV heads alternate over ranks": {
            "tp_rank // copies * kv_heads": "tp_rank % self.total_kv_heads * kv_heads"
        },
    },
    ("pat_vllm.weights.shards:VocabPartition.shard", SHARDS): {
        "padding is cut off": {"size=rows": "size=stop - start"},
    },
    ("pat_vllm.weights.shards:ExpertPartition.shard", SHARDS): {
        "the last ranks have the odd experts": {"min(tp_rank, more)": "0"},
    },
    ("pat_vllm.weights.shards:Cut.ways", SHARDS): {
        "every dimension is cut in every layout": {
            "if self.experts in (None, place.experts) else 1": ""
        },
    },
    ("pat_vllm.weights.shards:pieces_of", SHARDS): {
        "a copy begins at the start of the base's piece": {"source.dst + skip": "source.dst"},
    },
    ("pat_vllm.weights.row_order:RowOrder.swaps_to", ROW_ORDER): {
        "swaps lead the other way": {
            "list(self.units), dict(enumerate(other.units))": (
                "list(other.units), dict(enumerate(self.units))"
            )
        },
    },
    ("pat_vllm.weights.row_order:_joined", ROW_ORDER): {
        "joined swaps overlap": {"last.length < abs(last.a - last.b)": "True"},
    },
    ("pat_vllm.weights.row_order:rounds", ROW_ORDER): {
        "swaps of the same rows share a round": {
            "any(_overlap(swap, other) for other in made[-1])": "False"
        },
    },
    ("pat_vllm.weights.row_order:block_of", ROW_ORDER): {
        "a block lies where most rows move": {"return min(blocks": "return max(blocks"},
    },
    ("pat_vllm.kv_transfer.plan:head_routes", PLAN): {
        "heads are read from the start of the source": {
            "held.index(wanted[start])": "0",
        },
    },
    ("pat_vllm.kv_transfer.plan:_pick_holder", PLAN): {
        "a head is fetched though the rank holds it": {
            "target_rank if target_rank in holders else ": ""
        },
        "one holder sends a replicated head to all": {"target_rank % len(holders)": "0"},
    },
    ("pat_vllm.kv_transfer.plan:plan_moves", PLAN): {
        "only the first pair of replicas is planned for": {
            "for of in sorted(source_blocks)": "for of in sorted(source_blocks)[:1]"
        },
    },
    ("pat_vllm.kv_transfer.plan:RankMoves.of", PLAN): {
        "a rank receives what it sends": {"== (peer, rank)": "== (rank, peer)"},
    },
    ("pat_vllm.chains:fill", CHAINS): {
        "a replica gets more than it has room for": {"left[target] -= len(blocks)": "pass"},
        "what is carried is carried again": {"held[target][group].update(names)": "pass"},
    },
    ("pat_vllm.chains:_what_fits", CHAINS): {
        "a chain takes more than there is room for": {"if too_many > 0:": "if False:"},
        "what is held is carried again": {"chain[place] in hashes)": "False)"},
    },
    ("pat_vllm.kinds:FullAttention.missing", CHAINS): {
        "a chain's first block is taken for held": {"range(bisect_left(": "range(1 + bisect_left("},
    },
    ("pat_vllm.kinds:SlidingWindow.held", KINDS): {
        "a window is a token shorter": {"self.window + 1": "self.window + 2"},
    },
    ("pat_vllm.kinds:LatentAttention.heads_in", KINDS): {
        "a latent vector is cut as heads are": {"return 1": "return num_kv_heads"},
    },
    ("pat_vllm.kinds:StateKind.longest_hit", KINDS): {
        "a hit may lack what its window needs": {"if gap is None:": "if True:"},
    },
    ("pat_vllm.chains:Chains.ended", CHAINS): {
        "a chain that is continued stays": {"self._replace(chain)": "pass"},
        "all chains are remembered": {"self._blocks > REMEMBERED_BLOCKS": "False"},
        "the chance is of all time": {"self._requests > _WINDOW": "False"},
    },
    ("pat_vllm.chains:Chains.arrived", CHAINS): {
        "what was not carried is not asked for": {"max(unused, *continued, 0)": "unused"},
    },
    ("pat_vllm.routing:Router.route", ROUTING): {
        "prefixes in caches do not count": {"max(cached, default=0)": "0"},
        "the slack is one request too small": {"<= slack else": "< slack else"},
        "what both have cached counts": {"cached[known] - cached[least]": "cached[known]"},
        "the shortest prefix decides": {
            "len(prefixes) - i\n                break": "len(prefixes) - i"
        },
        "prefixes that are used are forgotten first": {"popitem(last=False)": "popitem()"},
    },
    ("pat_vllm.routing:spread", ROUTING): {
        "a replica may get more than its share": {
            "open_near or [r for r in range(target.replicas) if count[r] < share]": (
                "near or [*range(target.replicas)]"
            )
        },
        "contexts are not balanced": {"(count[r], context[r], r)": "(count[r], r)"},
        "requests move where experts alone lie otherwise": {"source.shares_kv(target)": "False"},
    },
    ("pat_vllm.layout:Layout.replica_of", LAYOUT): {
        "groups are neighbouring ranks": {"rank % self.replicas": "rank // self.tp"},
    },
    ("pat_vllm.layout:Layout.kv_heads_of", LAYOUT): {
        "replicated heads alternate": {
            "tp_rank // (self.tp // num_kv_heads)": "tp_rank % num_kv_heads"
        },
    },
    ("pat_vllm.layout:Layout.find", LAYOUT): {
        "whole experts are preferred": {'layout.experts == "ep"': 'layout.experts == "tp"'},
    },
    ("pat_vllm.layout:device_of", LAYOUT): {
        "devices are in the order of ranks": {"% factor * place": "% factor * block"},
    },
}

MUTATIONS = [
    Mutation(name, function, changes, tests)
    for (function, tests), mistakes in _MISTAKES.items()
    for name, changes in mistakes.items()
]
