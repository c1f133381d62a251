"""`additional_config["pat"]`: what a user may set, validated. Imports no vLLM."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    Field,
    StrictBool,
    StrictInt,
    StrictStr,
    ValidationError,
)

from pat_vllm.files.reading import cut, said_of, shown
from pat_vllm.layout import Experts, Layout
from pat_vllm.models.moe_config import MoEConfig, WantedExperts
from pat_vllm.policy_config import (
    MOST_PROBLEMS,
    FileName,
    PolicyConfig,
    PredictorPolicyConfig,
    SchedulePolicyConfig,
    StaticPolicyConfig,
    StrictModel,
    Tp,
)

SCHEDULER_CLS = "pat_vllm.scheduler.scheduler.PATScheduler"
"""Value of vLLM's option `scheduler_cls` in an engine that runs with PAT."""


def _none_if_auto(value: Any) -> Any:
    return None if isinstance(value, str) and value == "auto" else value


class PATConfig(StrictModel):
    """Options of the adaptive-tensor-parallelism executor.

    Attributes:
        layouts: tensor-parallel sizes to keep ready, multiples of `base_tp`. None, or "auto": those
            that an engine chooses when it starts (`start/choice.py`); until then
            `base_tp`, its doublings that divide the number of ranks, and the number of ranks.
        base_tp: the smallest tp, in which weights are loaded and to which an idle engine returns.
            None, or "auto": where `layouts` are named, the largest that divides them; else as an
            engine chooses, until then 1.
        experts: how the experts of a mixture lie in layouts with tp > 1: "tp" cuts each over the
            group, "ep" leaves them whole and spreads them over it; "auto" cuts them where all
            layouts can.
        policy: who decides on switches.
        kv_transfer: what becomes of in-flight KV at a switch: "migrate" copies it between ranks,
            "recompute" prefills again, "auto" takes the cheaper for each request. Prefixes in
            caches come along, the last used first, as far as blocks are free; with "recompute" no
            KV moves at all.
        weights: "inplace" keeps one copy of the weights for all layouts and moves rows in it at a
            switch; "materialized" keeps a copy for each layout; "auto" is "inplace" with CUDA's
            default kernels, else "materialized".
        limits_per: what `max_num_seqs` and `max_num_batched_tokens` count for. "rank": a replica of
            tp ranks may run tp times as many, so that the engine takes the same number of requests
            in every layout; see `start/limits.py` for where that ends. "replica": each replica of
            any layout runs as many as given.
        launcher: who starts the workers: "mp", processes of this host; "ray", actors in a Ray
            placement group; "auto", Ray if the engine is made inside a placement group.
        readonly_calls: worker methods that are called by `collective_rpc` and only read. Any other
            that is not known counts as a weight update.
        draft_history_bytes: of earlier responses that are kept for n-gram drafts, the latest, at
            most 8 GiB; a request drafts from those to its own prompt, too. 0: from its own text
            alone, by vLLM's drafter.
        state_dir: directory of this engine's in which it keeps for the next one what it has learnt
            about response lengths and drafts, and these responses: written when no request is left,
            read at start. None: kept as long as the engine lives.
        enabled: whether the engine runs with PAT, whatever `distributed_executor_backend` is; None:
            as that says. For engines that a trainer makes, which names a backend itself.
    """

    layouts: Annotated[tuple[Tp, ...] | None, BeforeValidator(_none_if_auto)] = None
    base_tp: Annotated[Annotated[Tp, Field(ge=1)] | None, BeforeValidator(_none_if_auto)] = None
    experts: WantedExperts = "auto"
    policy: PolicyConfig = PredictorPolicyConfig()
    kv_transfer: Literal["auto", "migrate", "recompute"] = "auto"
    weights: Literal["auto", "inplace", "materialized"] = "auto"
    limits_per: Literal["rank", "replica"] = "rank"
    launcher: Literal["auto", "mp", "ray"] = "auto"
    readonly_calls: tuple[StrictStr, ...] = ()
    draft_history_bytes: Annotated[StrictInt, Field(ge=0, le=8 << 30)] = 256 << 20
    state_dir: FileName | None = None
    enabled: StrictBool | None = None

    @classmethod
    def parse(cls, options: Any) -> PATConfig:
        """Validate the raw options.

        Raises:
            ValueError: names the option, its value and what is allowed.
        """
        if options is None:
            options = {}
        if not isinstance(options, dict):
            raise ValueError(
                f'additional_config["pat"] must be a dict of options, got {shown(options)}; '
                f"allowed options: {', '.join(cls.model_fields)}"
            )
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            problems = [_describe(detail) for detail in error.errors()[:MOST_PROBLEMS]]
            if (more := error.error_count() - len(problems)) > 0:
                problems.append(f"and {more} more")
            raise ValueError(f'additional_config["pat"]: {"; ".join(problems)}') from None

    @property
    def base(self) -> int:
        """The tp of the base layout, as far as it is chosen."""
        return self.base_tp or math.gcd(*(self.layouts or ())) or 1

    def resolve_layouts(self, world_size: int) -> tuple[Layout, ...]:
        """The layouts to keep ready, ascending in tp; the first is the base layout.

        Raises:
            ValueError: a tp does not divide `world_size` or is no multiple of the base layout's, or
                the policy names another layout.
        """
        layouts = tuple(Layout.of(tp, world_size) for tp in self._sizes(world_size))
        self._check_policy(layouts)
        return layouts

    def default_layout(self, layouts: Sequence[Layout]) -> Layout:
        """The layout in which an engine of these layouts starts; the base layout comes first."""
        if not isinstance(self.policy, StaticPolicyConfig) or self.policy.tp is None:
            return layouts[0]
        return Layout.of(self.policy.tp, layouts[0].world_size)

    def resolve_experts(
        self, mixture: MoEConfig | None, layouts: Iterable[Layout]
    ) -> Experts | None:
        """The option `experts`, without "auto"; None of a model without experts.

        Args:
            mixture: the model's; None: it has no experts.
            layouts: the engine's.

        Raises:
            ValueError: the model's experts cannot lie as asked for, or it has none.
        """
        if mixture is not None:
            return mixture.resolve(self.experts, {layout.tp for layout in layouts})
        if self.experts != "auto":
            raise ValueError(
                f"pat.experts is {self.experts!r}, but the model has no experts; leave it at 'auto'"
            )
        return None

    def _sizes(self, world_size: int) -> list[int]:
        """The tp of the layouts, ascending."""
        if self.base_tp is not None and world_size % self.base_tp:
            raise ValueError(
                f"pat.base_tp names tp={self.base_tp}, which does not divide "
                f"tensor_parallel_size={world_size}; allowed: {_divisors(world_size)}"
            )
        if self.layouts is None:
            doublings = (self.base << power for power in range(world_size.bit_length()))
            sizes = {world_size, *(tp for tp in doublings if world_size % tp == 0)}
        else:
            if not self.layouts:
                raise ValueError("pat.layouts is empty; name at least one tensor-parallel size")
            sizes = {*self.layouts, self.base}
        for tp in sorted(sizes):
            if tp < 1 or world_size % tp:
                raise ValueError(
                    f"pat.layouts names tp={tp}, which does not divide tensor_parallel_size="
                    f"{world_size}; allowed: {_divisors(world_size)}"
                )
            if tp < self.base:
                raise ValueError(
                    f"pat.layouts names tp={tp}, smaller than pat.base_tp={self.base_tp}; "
                    "base_tp must be the smallest layout"
                )
            if tp % self.base:
                raise ValueError(
                    f"pat.layouts names tp={tp}, which is no multiple of pat.base_tp="
                    f"{self.base_tp}: ranks would lack part of their weights in that layout"
                )
        return sorted(sizes)

    def _check_policy(self, layouts: Sequence[Layout]) -> None:
        ranks, kept = layouts[0].world_size, {layout.tp for layout in layouts}
        for tp in self.policy_tps():
            if ranks % tp:
                raise ValueError(f"pat.policy names tp={tp}, but {no_tp_of(ranks)}")
            if tp not in kept:
                raise ValueError(
                    f"pat.policy names tp={tp}, which is not among the layouts "
                    f"{', '.join(map(str, layouts))}; add it to pat.layouts or change the policy"
                )

    def pinned(self, world_size: int) -> dict[str, Any]:
        """Options of an engine like this one in which nothing that numbers rest on depends on time:
        one layout, that of a static policy or the widest, and no drafts from earlier responses.

        Raises:
            ValueError: as `resolve_layouts`.
        """
        tp = self.resolve_layouts(world_size)[-1].tp
        if isinstance(self.policy, StaticPolicyConfig):
            tp = self.policy.tp or self.base_tp or tp
        return {
            "layouts": [tp],
            "base_tp": tp,
            "policy": {"kind": "static", "tp": tp},
            "draft_history_bytes": 0,
            "state_dir": None,
        }

    def largest_batch(self, layout: Layout) -> int | None:
        """Most live requests for which the policy goes to a layout; None: it sets no limit."""
        if not isinstance(self.policy, SchedulePolicyConfig) or layout.tp == self.base:
            return None
        schedule = self.policy.switch_at.items()
        return max((live for live, tp in schedule if tp == layout.tp), default=None)

    def policy_tps(self) -> tuple[int, ...]:
        """The tp of each layout that the policy names."""
        match self.policy:
            case StaticPolicyConfig(tp=tp):
                return () if tp is None else (tp,)
            case SchedulePolicyConfig() as policy:
                return (*policy.switch_at.values(), *policy.num_speculative_tokens)
            case _:
                return ()


def of_one_engine(options: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The options of one of the engines that a trainer makes with the same ones: what it keeps is
    in a directory of its own in `state_dir`.

    Args:
        options: raw, as `PATConfig.parse` takes them.
        number: the engine's, which is the same after the trainer has started again.
    """
    if not isinstance(state_dir := options.get("state_dir"), str):
        return dict(options)
    return {**options, "state_dir": os.path.join(state_dir, f"engine-{number}")}


def runs_pat(vllm_config: Any) -> bool:
    """Whether an engine of this config runs with PAT."""
    return bool(vllm_config.scheduler_config.scheduler_cls == SCHEDULER_CLS)


def no_tp_of(ranks: int) -> str:
    """Why a tp that does not divide the number of ranks is none of an engine's, and what to do."""
    return (
        f"the engine has {ranks} ranks (tensor_parallel_size={ranks}), whose layouts can have "
        f"tp={', '.join(map(str, _divisors(ranks)))}; name one of these, or make the engine with a "
        "tensor_parallel_size that it divides"
    )


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _describe(error: Any) -> str:
    option = cut(".".join(str(part) for part in error["loc"])) or "options"
    if error["type"] == "extra_forbidden":
        return (
            f"unknown option {option!r} (value {shown(error['input'])}); "
            f"allowed: {', '.join(PATConfig.model_fields)}"
        )
    problem = cut(said_of(error), 400)
    if error["loc"] == ("policy",) and error["type"] != "union_tag_invalid":
        problem = (
            "expected an object with a 'kind' ('static', 'schedule', 'predictor') and its options, "
            'such as {"kind": "predictor"}'
        )
    return f"option {option!r} has value {shown(error['input'])}: {problem}"
