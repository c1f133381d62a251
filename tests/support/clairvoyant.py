"""What knowing every length would be worth: the planner, told the truth and replayed. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

import numpy as np
from numpy.typing import ArrayLike

from benchmarks.simulator.drafts import AcceptedDrafts
from benchmarks.simulator.engine import SimulatedLiveRequests, SimulatedReport
from benchmarks.simulator.ground_truth import GroundTruth
from benchmarks.simulator.simulate import simulate
from benchmarks.simulator.traces import LengthTrace
from pat_vllm.layout import Layout
from pat_vllm.predictor.acceptance import PLAIN
from pat_vllm.predictor.forecast import forecast
from pat_vllm.predictor.planner import Planner
from pat_vllm.predictor.policy import Policy, StayPolicy
from pat_vllm.predictor.state import Floats, LiveRequests, LiveState
from pat_vllm.profile import Profile, StepShape
from pat_vllm.reporting import BatchReport

_NEWS = 0.02
"""Share of the live requests that have to end before it plans again."""


class ClairvoyantPolicy(Policy):
    """Plans as PAT does, with the true remaining lengths, acceptance, step and switch times.

    It knows no request before it arrives. A plan takes the live requests for evenly spread, so it
    is no bound: a policy may do better by luck.
    """

    def __init__(
        self,
        batches: Sequence[LengthTrace],
        layouts: Sequence[Layout],
        truth: GroundTruth,
        profile: Profile,
        draft_lengths: Sequence[int] = (0,),
    ) -> None:
        """It will serve `batches`, in this order, and knows where each would best begin.

        Args:
            draft_lengths: among which it chooses, knowing what will be accepted.
        """
        self._lengths = draft_lengths

        def step(layout: Layout, *work: ArrayLike) -> Floats:
            columns = np.broadcast_arrays(*work)  # as in `StepShape`
            rows = np.rint(columns).astype(int).reshape(len(columns), -1).T.tolist()
            seconds = [truth.step_seconds(layout, StepShape(*row), 0.0) for row in rows]
            return np.array(seconds).reshape(columns[0].shape)

        self._planner = Planner(
            layouts,
            step,
            truth.switch_seconds,
            max_num_seqs=profile.max_num_seqs,
            kv_tokens=profile.kv_tokens,
        )
        self._default_layouts = cycle([self._default_layout_of(batch) for batch in batches])
        self.default_layout = next(self._default_layouts)
        self._planned: tuple[Layout, int] | None = None

    def choose(self, state: LiveState) -> Layout:
        layout, live = self._planned or (None, 0)
        if layout == state.layout and abs(state.num_seqs - live) <= _NEWS * live:
            return state.layout
        self._planned = (state.layout, state.num_seqs)
        requests = state.requests()
        assert isinstance(requests, SimulatedLiveRequests)
        missing = np.maximum(requests.num_prompt_tokens - requests.num_computed_tokens, 0)
        ahead = forecast(requests, np.maximum(requests.remaining, 1)[:, None])
        draft_yield = requests.draft_yield(self._lengths) if len(self._lengths) > 1 else PLAIN
        layout_costs = self._planner.layout_costs(
            ahead, prompts=int(missing.sum()), draft_yield=draft_yield
        )
        plan = layout_costs.plan(state.layout)
        if draft_yield is not PLAIN:
            self.drafts = layout_costs.drafts
        return plan.best

    def batch_over(self, now: float, batch: BatchReport | None = None) -> None:
        self.default_layout = next(self._default_layouts)
        self._planned = None

    def _default_layout_of(self, batch: LengthTrace) -> Layout:
        fresh = np.zeros(len(batch), np.int64)
        prompts, lengths = np.array(batch.num_prompt_tokens), np.array(batch.lengths)
        ahead = forecast(LiveRequests.fresh(prompts, batch.max_tokens), lengths[:, None])
        draft_yield = PLAIN
        if len(self._lengths) > 1:
            every = np.arange(len(batch))
            draft_yield = AcceptedDrafts(batch).draft_yield(every, fresh, self._lengths)
        layout_costs = self._planner.layout_costs(
            ahead, prompts=int(prompts.sum()), draft_yield=draft_yield
        )
        return min(self._planner.layouts, key=lambda layout: layout_costs.plan(layout).switch_later)


def clairvoyant(
    trace: LengthTrace,
    layouts: Sequence[Layout],
    truth: GroundTruth,
    profile: Profile,
) -> SimulatedReport:
    """A batch under `ClairvoyantPolicy`, or in a static layout where that is faster."""
    policies: list[Policy] = [ClairvoyantPolicy([trace], layouts, truth, profile)]
    policies += [StayPolicy(layout) for layout in layouts]
    runs = [simulate(trace, policy, truth, profile) for policy in policies]
    return min(runs, key=lambda run: run.seconds)
