"""What layouts and drafts save: tells `reporting.Savings` what the policy sees and predicts."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.predictor.planner import Course, Outlook, Plan, Planner, course
from pat_vllm.predictor.state import Ints, LiveRequests, LiveState
from pat_vllm.reporting import BatchTimes, Look, Savings, Stretch


class PlannedSavings(Savings):
    """Savings of batches that a planner plans."""

    def __init__(self, planner: Planner) -> None:
        super().__init__(planner.layouts[0])
        self._planner = planner
        self._ended_tokens = 0

    def finished(self, num_output_tokens: int) -> None:
        super().finished(num_output_tokens)
        self._ended_tokens += num_output_tokens

    def idle(self, at: float) -> None:
        """The batch ended at this time."""
        self.end(at, self._ended_tokens)

    def planned(
        self,
        state: LiveState,
        live: LiveRequests,
        prompts: int,
        remaining: Ints,
        outlook: Outlook,
        plan: Plan,
    ) -> None:
        """A plan was made.

        Args:
            prompts, remaining: for what is ahead of the requests: as in `Planner.outlook` and
                `course`.
            outlook, plan: what was expected and planned.
        """
        # Nobody tells of the end of a response whose length was prescribed. What such responses
        # have left to generate tells as much.
        tokens = live.num_output_tokens.sum() - live.max_tokens[live.exact].sum()
        look = Look(
            at=state.now,
            layout=state.layout,
            num_seqs=state.num_seqs,
            context=int(live.context.sum()),
            longest=int(live.context.max()),
            tokens=self._ended_tokens + int(tokens),
            prompts=prompts,
            prompt=math.inf if live.exact.any() else float(live.num_prompt_tokens.mean()),
        )
        if self.look(look):
            drafted = any(length for table in plan.drafts.values() for *_, length in table)
            plain = outlook
            if drafted:
                plain = self._planner.outlook(course(live, remaining), prompts=prompts)
            fixed, undrafted = plain.plan(self._base), plain.plan(state.layout)
            shortest = [min((one.stay, *one.go.values())) for one in (undrafted, plan)]
            prescribed = live.max_tokens[live.exact].tolist()
            self.predicted(BatchTimes(fixed.never, *shortest), prescribed)

    def plain_seconds(self, layout: Layout, stretches: Sequence[Stretch]) -> list[float]:
        columns = [(s.live, s.tokens, s.context, s.longest) for s in stretches]
        live, tokens, context, longest = np.array(columns).T
        done = Course(live, live, tokens, context, longest)
        return (self._planner.token_seconds(layout, done) * tokens).tolist()
