"""The linear roofline under the step-time model: a sum of work terms. Pure.

A step reads the weights (constant), computes its tokens, reads the KV of its contexts and shares
the machine with the other replicas. Draft tokens that it verifies are computed beside the others;
the contexts are read once for all of them. Then it makes the next drafts: a search, or a drafter's
pass for each. Of a mixture it reads the experts that some token goes to, until all are. All
coefficients are non-negative, so the sum grows with batch, contexts, longest context, prefill,
drafts and busy replicas by construction.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pat_vllm.profile import StepSample

KNEES = (64, 256, 1024)
"""Tokens from which computing may cost more per token: where a step that was bound by reading the
weights becomes bound by arithmetic. Which of them matter, if any, the fit finds out."""
_FLOOR = 0.05
"""Least constant, as a share of the fastest sample: no step is free."""
_RIDGE = 0.03
"""Pull of every term but the constant towards 0, in shares of a step: decides only where the
samples do not, so that a single sample makes a constant."""
_WEAK_RIDGE = 2 * _RIDGE
"""The same for terms that samples of equal contexts can hardly tell from plainer ones."""


@dataclass(frozen=True)
class StepBase:
    """Coefficients of one layout, all in seconds per unit and non-negative.

    Attributes:
        constant: of a step.
        batch: per request that decodes.
        context, longest: per token of the contexts, and of the longest one.
        prefill: per prompt token.
        experts, chosen: of all a mixture's experts; the probability that a token goes to one.
        knees: (tokens, seconds per token, decoded, prompt or draft, beyond them).
        drafts: per draft token verified.
        drafting, drafting_batch, drafting_context: of a search for drafts, or of a drafter's pass,
            and more per request and per token of the contexts.
        busy, busy_batch, busy_context, busy_prefill, busy_drafts: per other busy replica; the last
            four per request, token of context, prompt token and draft token.
        has_drafts: whether the samples had steps with drafts.
        has_passes: whether k drafts take k passes of a drafter with weights; else one search. A
            pass that a step has at k = 0, too, is in `constant` and `batch`.
    """

    constant: float
    batch: float
    context: float
    longest: float
    prefill: float
    drafts: float
    drafting: float
    drafting_batch: float
    drafting_context: float
    busy: float
    busy_batch: float
    busy_context: float
    busy_prefill: float
    busy_drafts: float
    knees: tuple[tuple[int, float], ...]
    has_drafts: bool = False
    has_passes: bool = False
    experts: float = 0.0
    chosen: float = 0.0

    @classmethod
    def fit(
        cls, samples: Sequence[StepSample], chosen: float = 0.0, has_passes: bool = False
    ) -> StepBase:
        """Least relative squares over the samples of one layout.

        Without samples that verify drafts, draft tokens count as prompt tokens do; without ones
        that make drafts, making them costs nothing. `chosen` of a dense model is 0.
        """
        from scipy.optimize import nnls

        seconds = np.array([s.seconds for s in samples])
        batch, context, longest, prefill, others, drafts, k = np.array(
            [
                (s.batch, s.context, s.longest, s.prefill, s.busy - 1, s.drafts, s.k)
                for s in samples
            ],
            float,
        ).T
        drafting = _runs(k, has_passes)
        terms = {
            "batch": batch,
            "context": context,
            "longest": longest,
            "prefill": prefill,
            "drafts": drafts,
            "drafting": drafting,
            "drafting_batch": drafting * batch,
            "drafting_context": drafting * context * has_passes,
            "busy": others,
        }
        of_work = ("batch", "context", "prefill", "drafts")
        shared = {f"busy_{name}": others * terms[name] for name in of_work}
        tokens = batch + prefill + drafts
        terms |= shared | ({"experts": 1 - (1 - chosen) ** tokens} if chosen else {})
        weak = {"longest", *shared}
        ridge = [0.0, *(_WEAK_RIDGE if name in weak else _RIDGE for name in terms)]
        ridge += [_WEAK_RIDGE] * len(KNEES)
        columns = [np.ones_like(seconds), *terms.values()]
        for knee in KNEES:
            above = np.maximum(tokens - knee, 0.0)
            # A slope that a single size shows is mostly its noise, and would be carried far out.
            columns.append(above * (len({*above[above > 0]}) > 1))

        floor = _FLOOR * seconds.min()
        relative = np.array(columns) / seconds  # [terms, samples]
        # In units of a term's mean share of a step, terms of all magnitudes are pulled alike.
        share = relative.mean(axis=1)
        unit = np.where(share > 0, share, 1.0)
        matrix = np.vstack([(relative / unit[:, None]).T, np.diag(ridge)])
        wanted = np.concatenate([1.0 - floor / seconds, np.zeros(len(ridge))])
        solution = np.where(share > 0, nnls(matrix, wanted)[0] / unit, 0.0).tolist()

        named = dict(zip(terms, solution[1:], strict=False))
        if not drafts.any():
            named |= {"drafts": named["prefill"], "busy_drafts": named["busy_prefill"]}
        beyond = solution[1 + len(terms) :]
        knees = tuple((k, cost) for k, cost in zip(KNEES, beyond, strict=True) if cost > 0)
        named |= {"constant": solution[0] + floor, "chosen": chosen}
        has_drafts = bool(drafts.any())
        return cls(**named, knees=knees, has_drafts=has_drafts, has_passes=has_passes)

    # `abs` serves numbers and arrays alike: (x + |x|) / 2 is x where positive, else 0.

    def decode(self, batch: Any, context: Any, busy: Any) -> Any:
        """Seconds of a decode step, without what its longest context adds."""
        others = busy - 1
        total = self.constant + others * self.busy
        total = total + batch * (self.batch + others * self.busy_batch)
        total = total + context * (self.context + others * self.busy_context)
        for knee, cost in self.knees:
            above = batch - knee
            total = total + (above + abs(above)) * (0.5 * cost)
        return total + self.experts * (1 - (1 - self.chosen) ** batch)

    def extra(self, batch: Any, longest: Any, prefill: Any, busy: Any, drafts: Any = 0) -> Any:
        """Seconds that the longest context, the prefill and verifying `drafts` add.

        Grows with every argument; they are as in `StepShape`.
        """
        total = self.longest * longest
        more = prefill + drafts
        if type(more) is int and more == 0:
            return total
        others = busy - 1
        total = total + prefill * (self.prefill + others * self.busy_prefill)
        total = total + drafts * (self.drafts + others * self.busy_drafts)
        for knee, per_token in self.knees:
            before = batch - knee
            after = before + more
            total = total + (more + abs(after) - abs(before)) * (0.5 * per_token)
        return total + self.experts * (1 - self.chosen) ** batch * (1 - (1 - self.chosen) ** more)

    def making_drafts(self, batch: Any, context: Any, k: Any) -> Any:
        """Seconds that making the drafts of the next step adds, with a draft length `k`."""
        each = self.drafting + batch * self.drafting_batch + context * self.drafting_context
        return _runs(k, self.has_passes) * each


def _runs(k: Any, has_passes: bool) -> Any:
    """How often a step drafts: a pass for each draft token, or one search."""
    return k if has_passes else k > 0
