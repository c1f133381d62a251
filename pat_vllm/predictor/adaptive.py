"""The policy that decides by prediction. Engines take it by default. Pure.

It joins the models: how long steps take (`StepTimeModel`), how many tokens responses still have to
generate (`LengthModel`), what a switch costs (`CostModel`), what drafts are worth (`Acceptance`).
The `Planner` makes a plan from them. This module says when to plan, and whether a plan is sure
enough to switch.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.predictor.acceptance import PLAIN, AcceptanceByPrompt
from pat_vllm.predictor.cost import CostModel
from pat_vllm.predictor.forecast import forecast
from pat_vllm.predictor.learned_state import LearnedState
from pat_vllm.predictor.planner import LayoutCosts, Plan, Planner
from pat_vllm.predictor.policy import SETTLE_SECONDS, Policy
from pat_vllm.predictor.probing import Prober
from pat_vllm.predictor.speeds import Speeds
from pat_vllm.predictor.state import Ints, LiveRequests, LiveState
from pat_vllm.predictor.steps.step_time import StepTimeModel
from pat_vllm.profile import Profile, StepShape
from pat_vllm.reporting import (
    BatchReport,
    DecisionReport,
    PredictorReport,
    RefusedSwitch,
    SwitchReport,
)
from pat_vllm.reporting.decisions import Decisions

_TRUSTED_STEPS = 4
"""Steps in the first layout that are compared with the profile before it may lead to a switch."""
_PATIENCE = 64
"""After this many steps that cannot be compared (they compute prompts), it is trusted anyway."""
_NEWS = 0.02
"""Share of the live requests that has to end, or to come, before it plans again."""
_HYSTERESIS = 5.0
"""A switch holds for this many times its cost before the next one may be made."""
_PLANNING_SHARE = 0.004
"""Share of the time that may go into planning."""
_URGENT_SHARE = 0.02
"""The same, once half of the last plan's requests have ended. Without arrivals that is seldom."""
_OBSERVING_SHARE = 0.002
"""Share of the time that may go into learning from steps, and from drafts."""
_STEADY = 0.9
"""Share of the steps that had one draft length, from which on it counts as that of all."""
_FUTURES = 8
"""Sampled futures per plan. With four, batches take as long."""


class AdaptivePolicy(Policy):
    """Follows the cheapest plan of layouts and draft lengths, whose switches are paid for."""

    learns = True

    def __init__(
        self,
        profile: Profile,
        *,
        bound: int,
        costs: CostModel | None = None,
        state_dir: Path | None = None,
        draft_lengths: Sequence[int] = (0,),
        control_every: int | None = None,
        timer: Callable[[], float] = time.perf_counter,
    ) -> None:
        """The policy of a profile's engine.

        Args:
            bound: longest possible response, tokens.
            costs: the engine's cost model, which the engine tells of its switches. None makes one
                of the policy's own, which the policy tells of them.
            state_dir: what is learnt about lengths and drafts is kept here between engines.
            draft_lengths: among which it chooses, ascending. With 0 alone it plans as if no draft
                was accepted, and leaves draft lengths to the engine's configuration.
            control_every: each so many-th batch is kept in the static layout that would be best for
                a batch like the one before it, by the planner; None: none is.
            timer: measures this policy's own work, which is bounded; a simulator that wants
                reproducible runs passes one that stands still.
        """
        layouts = profile.layouts
        self.default_layout = layouts[0]
        self._steps = StepTimeModel.fit(profile)
        self._learned_state = LearnedState(state_dir)
        self._lengths, acceptance = self._learned_state.load(bound, draft_lengths)
        self._own_costs = costs is None
        self._costs = costs or CostModel()
        self._costs.fit(profile)
        self._planner = Planner(
            layouts,
            self._steps.seconds,
            self._costs.seconds,
            max_num_seqs=profile.max_num_seqs,
            kv_tokens=profile.kv_tokens,
        )
        self._acceptance = AcceptanceByPrompt(acceptance) if len(draft_lengths) > 1 else None
        if self._acceptance is not None:
            self.drafts = {layout: ((1, 1, 0),) for layout in layouts}
        self._speeds = Speeds()
        self._asked: Counter[int] = Counter()
        self._prober = Prober()
        self._decisions = Decisions()
        self._control_every = control_every
        self._batches_ended = 0
        self._last_step = 0.0
        self._timer = timer

        self._layout = self.default_layout
        self._largest: LiveRequests | None = None
        self._planned: tuple[Layout, int, tuple[int, int, int]] | None = None
        self._last_plan = self._review = -math.inf
        self._took = 0.0  # seconds, by the last plan
        self._next_observation = -math.inf
        self._next_drafts = [-math.inf, -math.inf]
        """By whether there are earlier responses: both are told of the same steps."""
        self._begun = math.inf
        self._last_switch: SwitchReport | None = None
        self._probed: Layout | None = None  # of the last decision that fired, a probe
        self._skip = 0
        self._worked_before = 0.0
        self._plans = 0
        self._planning = 0.0
        self._slowest_plan = 0.0
        self._steps_seen = 0
        self._error: Mapping[Layout, tuple[int, float]] = {}

    # ---------------------------------------------------------------- what happens

    def arrived(self, now: float, repeated: bool = False) -> None:
        self._begun = min(self._begun, now)
        if self._acceptance is not None:
            self._acceptance.arrived(repeated)

    def ended(self, now: float, num_output_tokens: int, complete: bool | None) -> None:
        if complete is not None:
            self._lengths.finished(num_output_tokens, complete)

    def stepped(self, now: float, layout: Layout, shape: StepShape, seconds: float) -> None:
        self._decisions.stepped(seconds)
        self._steps_seen += 1
        self._last_step = now
        self._prober.stepped()
        if self._skip:
            self._skip -= 1  # the first steps in a layout find cold caches
            return
        if now < self._next_observation:
            return
        started = self._timer()
        predicted = self._steps.observe(layout, shape, seconds)
        if predicted is None:
            return
        count, total = self._error.get(layout, (0, 0.0))
        seen = (count + 1, total + abs(predicted - seconds) / seconds)
        self._error = {**self._error, layout: seen}
        if not self._prober.active:  # a probe is there to observe
            took = self._timer() - started
            self._next_observation = now + took / _OBSERVING_SHARE

    def verified(
        self,
        now: float,
        length: int,
        requests: int,
        accepted: Ints,
        repeated: bool = False,
        drafted: Ints | None = None,
    ) -> None:
        if self._acceptance is None:
            return
        self._asked[length] += 1
        self._acceptance.decoded(requests, repeated)
        if now < self._next_drafts[repeated]:
            return
        started = self._timer()
        self._acceptance.observe(length, requests, accepted, repeated, drafted)
        took = self._timer() - started
        self._next_drafts[repeated] = now + took / _OBSERVING_SHARE

    def weights_changed(self) -> None:
        if self._acceptance is not None:
            self._acceptance.weights_changed()

    def switched(self, report: SwitchReport) -> None:
        if self._own_costs:
            self._costs.observe(report)
        self._decisions.switched(report)
        self._speeds.moved()
        self._skip = report.target.replicas
        self._layout = report.target
        if report.reason != "idle":
            self._last_switch = report

    def refused(self, refused: RefusedSwitch) -> None:
        self._prober.stop()

    def idle(self, now: float) -> None:
        self._decisions.idle()
        # Without a step, where all requests were aborted before one, it did no work.
        self._worked_before += max(0.0, min(now, self._last_step) - self._begun)
        self._begun = math.inf
        self._prober.stop()

    def batch_over(self, now: float, batch: BatchReport | None = None) -> None:
        self._lengths.end_of_batch()
        self._speeds.end_of_batch()
        learnt = None
        if self._acceptance is not None:
            self._acceptance.end_of_batch()
            learnt = self._acceptance.of_new
        self._learned_state.save(self._lengths, learnt)
        self._planned = None
        self._last_switch = None
        self._last_plan = self._review = -math.inf
        self._batches_ended += 1
        every = self._control_every
        self.control = every is not None and (self._batches_ended + 1) % every == 0
        if self._largest is not None:
            self._open(self._largest)
            self._largest = None

    def report(self, since: float = -math.inf) -> PredictorReport:
        # The engine's thread replaces `_error` and never changes it.
        return PredictorReport(
            decisions=self._decisions.records.since(since),
            step_error={
                layout: (count, total / count) for layout, (count, total) in self._error.items()
            },
            plans=self._plans,
            planning=self._planning,
            slowest_plan=self._slowest_plan,
            batches=self._lengths.batches,
            responses=self._lengths.responses,
        )

    # ---------------------------------------------------------------- decisions

    def choose(self, state: LiveState) -> Layout:
        if not self._due(state):
            return state.layout
        started = self._timer()
        target = self._decide(state)
        took = self._timer() - started
        self._plans += 1
        self._planning += took
        self._slowest_plan = max(self._slowest_plan, took)
        self._last_plan, self._took = state.now, took
        return target

    def _due(self, state: LiveState) -> bool:
        """Whether it is time to plan: something has changed, and planning was not just done."""
        halved = self._planned is not None and 2 * state.num_seqs <= self._planned[1]
        share = _URGENT_SHARE if halved else _PLANNING_SHARE
        if state.now < self._last_plan + self._took / share or self._prober.active:
            return False
        compared = sum(count for count, _ in self._error.values())
        if self._steps_seen < _PATIENCE and compared < _TRUSTED_STEPS:
            return False
        since = max(self._last_plan, self._begun)
        if state.quiet < SETTLE_SECONDS and state.now - since < 1.0:
            return False
        if self._planned is None or state.now >= self._review:
            return True
        layout, live, version = self._planned
        changed = (layout, version) != (state.layout, self._versions)
        return changed or abs(state.num_seqs - live) > _NEWS * live

    @property
    def _versions(self) -> tuple[int, int, int]:
        """Of what was learnt from steps and from drafts."""
        drafts = self._acceptance.version if self._acceptance is not None else (0, 0)
        return self._steps.correction_version, *drafts

    def _decide(self, state: LiveState) -> Layout:
        live = state.requests()
        self._planned = (state.layout, state.num_seqs, self._versions)
        if self._largest is None or len(live) > len(self._largest):
            self._largest = live
        self._lengths.observe_running(live)
        if self._acceptance is not None:
            self._speeds.observe(live, self._acceptance.per_step(self._length_asked()))
        remaining = self._lengths.sample(live, _FUTURES)
        plan = self._layout_costs(live, remaining, live.uncomputed).plan(state.layout)
        if self._acceptance is not None:
            self.drafts = plan.layout_costs.drafts
        # While nothing finishes, contexts grow and the rest is seen in another light.
        self._review = state.now + 0.1 * plan.switch_later
        if self.control:
            return self.default_layout
        if plan.best != state.layout:
            fired = state.now >= (held_until := self._hysteresis_end())
            self._note(state, plan, plan.best, "plan" if fired else "hysteresis", fired)
            if fired:
                return plan.best
            self._review = min(self._review, held_until)
        elif plan.switch_now:
            best = min(plan.switch_now, key=plan.switch_now.__getitem__)
            if plan.switch_now[best] < plan.no_switch:
                self._note(state, plan, best, "later", fired=False)
        return self._probe(state, plan)

    def _length_asked(self) -> int:
        """The draft length of the steps since this was last asked; 0 if they had several."""
        asked, self._asked = self._asked, Counter()
        length = max(asked, key=asked.__getitem__, default=0)
        return length if asked[length] >= _STEADY * asked.total() else 0

    def _layout_costs(self, live: LiveRequests, remaining: Ints, prompts: int) -> LayoutCosts:
        draft_yield, tokens, used = PLAIN, None, 0
        if self._acceptance is not None:
            draft_yield = self._acceptance.expected()
            if self._speeds.variance:
                tokens = self._acceptance.tokens_at(self._speeds.sample(live, _FUTURES))
                used = self._acceptance.used
        ahead = forecast(live, remaining, tokens, used)
        return self._planner.layout_costs(ahead, prompts=prompts, draft_yield=draft_yield)

    def _open(self, last: LiveRequests) -> None:
        """Be ready for a batch of as many requests as `last`: between batches an engine switches
        to `default_layout`.

        The last plan's drafts were for a batch's tail. As many of each request in a full batch may
        take the time of many steps.
        """
        none = np.zeros(len(last), np.int64)
        fresh = replace(last, num_output_tokens=none, num_computed_tokens=none)
        remaining = self._lengths.sample(fresh, _FUTURES)
        # A prompt is computed once for all its samples.
        _, first = np.unique(last.group, return_index=True)
        prompts = int(last.num_prompt_tokens[first].sum())
        here = self._layout
        costs = self._layout_costs(fresh, remaining, prompts)
        if self._acceptance is not None:
            self.drafts = costs.drafts
        if self.control:
            static = dict(zip(costs.layouts, map(sum, costs.seconds), strict=True))
            self.default_layout = min(static, key=static.__getitem__)
            return
        plan = costs.plan(here)
        seconds = {here: plan.switch_later}
        for layout, total in plan.switch_now.items():
            idle = self._costs.seconds(here, layout, 0.0, 0.0)
            seconds[layout] = total - plan.cost[layout] + idle
        self.default_layout = min(seconds, key=seconds.__getitem__)

    def _probe(self, state: LiveState, plan: Plan) -> Layout:
        """Try a layout for a few steps if much may be gained and little lost; see `Prober`."""
        seen = {layout: count for layout, (count, _) in self._error.items()}
        worked = self._worked_before + state.now - self._begun
        probe = self._prober.find(state.num_seqs, plan, seen, worked)
        if probe is None:
            return state.layout
        layout, optimistic = probe
        self._note(state, optimistic, layout, "probe", fired=True)
        return layout

    def _hysteresis_end(self) -> float:
        """Until when the last switch holds; probes do not."""
        last = self._last_switch
        if last is None or self._probed == last.target:
            return -math.inf
        return last.at + last.seconds + _HYSTERESIS * (last.seconds - last.quiesce)

    def _note(self, state: LiveState, plan: Plan, target: Layout, why: str, fired: bool) -> None:
        if fired:
            self._probed = target if why == "probe" else None
        self._decisions.add(
            DecisionReport(
                at=state.now,
                layout=state.layout,
                target=target,
                num_seqs=state.num_seqs,
                no_switch=plan.no_switch,
                switch_now=plan.switch_now[target],
                cost=plan.cost[target],
                fired=fired,
                why=why,
                step_before=plan.layout_costs.step[state.layout],
                step_after=plan.layout_costs.step[target],
            )
        )
