"""What a switch costs, and how its requests take their KV along. Pure.

One model answers both questions, so that requests are carried the way that was predicted.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Literal, NamedTuple, TypeVar

import numpy as np

from pat_vllm.layout import Layout
from pat_vllm.models.kinds import Kinds, carried_tokens
from pat_vllm.predictor.state import Floats
from pat_vllm.profile import Profile, SwitchSample
from pat_vllm.reporting import SwitchReport

Number = TypeVar("Number", float, Floats)
Way = Literal["migrate", "recompute"]

_SMOOTHING = 0.5
"""Weight of the newest measurement in the running averages."""
_MAX_CORRECTION = 20.0
"""Most that past switches may correct the costs, as a factor either way."""
_CONTEXTS = np.round(np.geomspace(1, 1 << 22, 200))
"""Tokens of a context for which the share that moves is computed; others lie between them."""
_LEAST_EXCHANGE = 1 << 20
"""Bytes of KV below which an exchange says more about its latency than about its bandwidth."""


class _Linear(NamedTuple):
    """Seconds of a switch between two layouts, linear in the requests and their tokens."""

    fixed: float
    per_request: float
    per_token: float


class CostModel:
    """Seconds that a switch takes away from generation, and the cheaper way to carry each request.

    All that a switch does is linear in the requests and their tokens, for each pair of layouts. A
    profile's switches give the coefficients. Without a profile only the KV is known, from the rates
    measured at start. Past switches of the engine correct either by a factor per pair.

    KV is carried by migrating it, or by recomputing it in the target layout, where replicas work
    side by side as far as there is a request for each. Recomputing is linear in the tokens,
    migrating in those that are held: of full attention all. Then the cheaper way is the same for
    all requests of a switch, and its rate times all tokens is the sum over the requests. A state of
    linear attention moves whole, as so many tokens more, however short its request is.

    Attributes:
        mode: "auto" takes the cheaper way; the others always take theirs.
    """

    def __init__(
        self,
        mode: Literal["auto", "migrate", "recompute"] = "auto",
        migrate: float = 0.0,
        recompute: Mapping[Layout, float] | None = None,
        kinds: Kinds = (),
    ) -> None:
        """A model that knows no switch yet, but the rates that an engine measures at its start.

        Args:
            migrate: seconds to move a token's KV, by all ranks together.
            recompute: seconds to prefill a token again in one replica while all of them prefill, by
                layout; where it is not known, KV is migrated.
            kinds: of state; without any, all of a token's moves.
        """
        self.mode = mode
        self._kinds = kinds
        self._shares = np.array([carried_tokens(kinds, int(n)) / int(n) for n in _CONTEXTS])
        self._most_moves = float(self._shares.max())
        self._recompute = dict(recompute or {})
        self._by_pair: dict[tuple[Layout, Layout], _Linear] = {}
        self._other_pairs = _Linear(0.0, 0.0, migrate)
        self._log_correction: dict[tuple[Layout, Layout], float] = {}

    def fit(self, profile: Profile) -> CostModel:
        """Take what a profile says in place of the rates measured at start. Returns this model.

        A pair of layouts without any switch takes the most expensive coefficients of the others.
        """
        by_pair: dict[tuple[Layout, Layout], list[SwitchSample]] = defaultdict(list)
        for sample in profile.switches:
            by_pair[sample.source, sample.target].append(sample)
        self._by_pair = {pair: self._fit(samples) for pair, samples in by_pair.items()}
        if known := self._by_pair.values():
            self._other_pairs = _Linear(*map(max, zip(*known, strict=True)))
        measured: dict[Layout, float] = {}
        for step in profile.steps:
            if not step.batch and step.prefill and step.busy == step.layout.replicas:
                per_token = step.seconds / step.prefill
                measured[step.layout] = min(per_token, measured.get(step.layout, math.inf))
        self._recompute.update(measured)
        return self

    def seconds(self, source: Layout, target: Layout, num_seqs: Number, tokens: Number) -> Number:
        """The stall of a switch with `num_seqs` requests of `tokens` tokens of context together."""
        linear, correction = self._linear(source, target)
        fixed = correction * (linear.fixed + linear.per_request * num_seqs)
        migrate, in_one_replica = self._per_token(source, target)
        moving = self._carried(num_seqs, tokens)
        cheaper = migrate * target.replicas * max(1.0, self._most_moves) <= in_one_replica
        if self.mode == "migrate" or (self.mode == "auto" and cheaper):
            return fixed + migrate * moving
        recompute = in_one_replica / np.minimum(np.maximum(num_seqs, 1), target.replicas)
        if self.mode == "recompute":
            return fixed + recompute * tokens
        return fixed + np.minimum(migrate * moving, recompute * tokens)

    def choose(self, num_tokens: int, source: Layout, target: Layout, num_seqs: int) -> Way:
        """How a request takes its KV along, of `num_seqs` that are carried.

        Args:
            num_tokens: of the request, with KV in memory. All of them are computed again; what
                moves is what is left of them in each kind of state.
        """
        if self.mode != "auto":
            return self.mode
        migrate, in_one_replica = self._per_token(source, target)
        recompute = in_one_replica / max(1, min(num_seqs, target.replicas))
        tokens = max(1, num_tokens)  # of a request that waits, any that are cached for it
        moving = carried_tokens(self._kinds, tokens)
        return "migrate" if migrate * moving <= recompute * tokens else "recompute"

    def observe(self, report: SwitchReport) -> None:
        """Learn from a switch. The engine, or whoever plays one, calls this once for each.

        The steps in flight that the switch let finish are no cost: they produced tokens.
        """
        if not report.num_seqs or (report.migrated and report.recomputed):
            return  # nothing was carried, or some this way and some that
        pair = report.source, report.target
        linear, _ = self._linear(*pair)
        # What recomputing takes is paid after the switch.
        tokens = report.cached_tokens + (0 if report.recomputed else report.tokens)
        moving = self._carried(report.num_seqs, float(tokens))
        if self._by_pair:
            predicted = linear.fixed + linear.per_request * report.num_seqs
            predicted += linear.per_token * moving
            real = report.seconds - report.quiesce
        elif report.kv_bytes >= _LEAST_EXCHANGE:
            predicted, real = linear.per_token * moving, report.kv
        else:
            return
        if predicted <= 0 or real <= 0:
            return
        limit = math.log(_MAX_CORRECTION)
        ratio = min(limit, max(-limit, math.log(real / predicted)))
        old = self._log_correction.get(pair)
        self._log_correction[pair] = ratio if old is None else old + _SMOOTHING * (ratio - old)

    def _carried(self, num_seqs: Number, tokens: Number) -> Number:
        """What moves with requests of so many tokens together, in tokens whose state is whole.

        As if all were equally long, which is at least what moves if they are not.
        """
        if len(self._kinds) == 0:
            return tokens
        share = np.interp(tokens / np.maximum(num_seqs, 1), _CONTEXTS, self._shares)
        return tokens * share  # type: ignore[return-value]

    def _fit(self, samples: Sequence[SwitchSample]) -> _Linear:
        """Least squares of the relative error; coefficients are never negative."""
        from scipy.optimize import nnls

        features = np.array(
            [[1.0, s.num_seqs, self._carried(s.num_seqs, float(s.tokens))] for s in samples]
        )
        seconds = np.array([s.seconds for s in samples])
        # Columns differ by orders of magnitude.
        scale = np.maximum(features.max(axis=0), 1.0)
        coefficients, _ = nnls(features / seconds[:, None] / scale, np.ones(len(samples)))
        return _Linear(*(coefficients / scale).tolist())

    def _linear(self, source: Layout, target: Layout) -> tuple[_Linear, float]:
        """The coefficients of a pair, and the factor that corrects them."""
        linear = self._by_pair.get((source, target), self._other_pairs)
        return linear, math.exp(self._log_correction.get((source, target), 0.0))

    def _per_token(self, source: Layout, target: Layout) -> tuple[float, float]:
        """Seconds to migrate a token, and to recompute it in one replica.

        Where nothing is known of its prefill, a layout is taken to recompute no faster than KV
        migrates to it.
        """
        linear, correction = self._linear(source, target)
        migrate = correction * linear.per_token
        return migrate, self._recompute.get(target, migrate * target.replicas)
