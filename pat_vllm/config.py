"""`additional_config["pat"]`: what a user may set, validated. Imports no vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from pat_vllm.layout import Layout


class StrictModel(BaseModel):
    """A value that cannot be changed and takes no unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StaticPolicyConfig(StrictModel):
    """Stay in one layout."""

    kind: Literal["static"]
    tp: int = Field(ge=1)


class SchedulePolicyConfig(StrictModel):
    """With at most K live requests, be in the layout with tensor parallelism `switch_at[K]`.

    Attributes:
        num_speculative_tokens: draft length by tp; what is not named is as `speculative_config`
            says.
    """

    kind: Literal["schedule"]
    switch_at: dict[int, int] = Field(min_length=1)
    num_speculative_tokens: dict[int, Annotated[int, Field(ge=0)]] = {}

    @field_validator("switch_at")
    @classmethod
    def _positive(cls, switch_at: dict[int, int]) -> dict[int, int]:
        for live, tp in switch_at.items():
            if live < 1 or tp < 1:
                raise ValueError(
                    f"maps a number of live requests (>= 1) to a tp (>= 1), got {{{live}: {tp}}}"
                )
        return switch_at


class PredictorPolicyConfig(StrictModel):
    """Switch when the predicted saving exceeds the predicted cost.

    Attributes:
        profile: file made by `pat-vllm profile` for this engine; None: the cached one, or a quick
            one taken at start.
        lengths_file: what is learnt about response lengths, and with speculative decoding about
            drafts, is read from and kept in this file; None: kept as long as the engine lives.
        length_bound: longest response, tokens, in place of what each request says. Benchmarks
            that fix lengths by `max_tokens` hide them from the predictor with it.
    """

    kind: Literal["predictor"] = "predictor"
    profile: str | None = None
    lengths_file: str | None = None
    length_bound: int | None = Field(default=None, ge=1)


PolicyConfig = Annotated[
    StaticPolicyConfig | SchedulePolicyConfig | PredictorPolicyConfig,
    Field(discriminator="kind"),
]


class PATConfig(StrictModel):
    """Options of the adaptive-tensor-parallelism executor.

    Attributes:
        layouts: tensor-parallel sizes to keep ready, multiples of `base_tp`. None: `base_tp`, its
            doublings that divide the number of ranks, and the number of ranks itself.
        base_tp: the smallest tp, in which weights are loaded and to which an idle engine returns.
        policy: who decides on switches.
        kv_transfer: what becomes of in-flight KV at a switch: "migrate" copies it between ranks,
            "recompute" prefills again, "auto" takes the cheaper for each request.
        weights: "inplace" keeps one copy of the weights for all layouts and moves rows in it at a
            switch; "materialized" keeps a copy for each layout; "auto" is "inplace" with CUDA's
            default kernels, else "materialized".
        limits_per: what `max_num_seqs` and `max_num_batched_tokens` count for. "rank": a replica of
            tp ranks may run tp times as many, so that the engine takes the same number of requests
            in every layout; see `pat_vllm/limits.py` for where that ends. "replica": each replica
            of any layout runs as many as given.
        launcher: who starts the workers: "mp", processes of this host; "ray", actors in a Ray
            placement group; "auto", Ray if the engine is made inside a placement group.
    """

    layouts: tuple[int, ...] | None = None
    base_tp: int = Field(default=1, ge=1)
    policy: PolicyConfig = PredictorPolicyConfig()
    kv_transfer: Literal["auto", "migrate", "recompute"] = "auto"
    weights: Literal["auto", "inplace", "materialized"] = "auto"
    limits_per: Literal["rank", "replica"] = "rank"
    launcher: Literal["auto", "mp", "ray"] = "auto"

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
                f'additional_config["pat"] must be a dict of options, got {options!r}; '
                f"allowed options: {', '.join(cls.model_fields)}"
            )
        try:
            return cls.model_validate(options)
        except ValidationError as error:
            problems = "; ".join(_describe(e) for e in error.errors())
            raise ValueError(f'additional_config["pat"]: {problems}') from None

    def resolve_layouts(self, world_size: int) -> tuple[Layout, ...]:
        """The layouts to keep ready, ascending in tp; the first is the base layout.

        Raises:
            ValueError: a tp does not divide `world_size` or is no multiple of the base layout's,
                or the policy names another layout.
        """
        if world_size % self.base_tp:
            raise ValueError(
                f"pat.base_tp names tp={self.base_tp}, which does not divide "
                f"tensor_parallel_size={world_size}; allowed: {_divisors(world_size)}"
            )
        if self.layouts is None:
            sizes = {world_size}
            tp = self.base_tp
            while tp <= world_size:
                if world_size % tp == 0:
                    sizes.add(tp)
                tp *= 2
        else:
            if not self.layouts:
                raise ValueError("pat.layouts is empty; name at least one tensor-parallel size")
            sizes = {*self.layouts, self.base_tp}
        for tp in sorted(sizes):
            if tp < 1 or world_size % tp:
                raise ValueError(
                    f"pat.layouts names tp={tp}, which does not divide tensor_parallel_size="
                    f"{world_size}; allowed: {_divisors(world_size)}"
                )
            if tp < self.base_tp:
                raise ValueError(
                    f"pat.layouts names tp={tp}, smaller than pat.base_tp={self.base_tp}; "
                    "base_tp must be the smallest layout"
                )
            if tp % self.base_tp:
                raise ValueError(
                    f"pat.layouts names tp={tp}, which is no multiple of pat.base_tp="
                    f"{self.base_tp}: ranks would lack part of their weights in that layout"
                )
        for tp in self._policy_sizes():
            if tp not in sizes:
                raise ValueError(
                    f"pat.policy names tp={tp}, which is not among the layouts {sorted(sizes)}; "
                    "add it to pat.layouts or change the policy"
                )
        return tuple(Layout.of(tp, world_size) for tp in sorted(sizes))

    def largest_batch(self, layout: Layout) -> int | None:
        """Most live requests for which the policy goes to a layout; None: it sets no limit."""
        if not isinstance(self.policy, SchedulePolicyConfig) or layout.tp == self.base_tp:
            return None
        return max(
            (live for live, tp in self.policy.switch_at.items() if tp == layout.tp), default=None
        )

    def _policy_sizes(self) -> tuple[int, ...]:
        match self.policy:
            case StaticPolicyConfig(tp=tp):
                return (tp,)
            case SchedulePolicyConfig() as policy:
                return (*policy.switch_at.values(), *policy.num_speculative_tokens)
            case _:
                return ()


def pat_config(vllm_config: Any) -> PATConfig:
    """The validated PAT options of an engine."""
    additional = vllm_config.additional_config
    options = additional.get("pat") if isinstance(additional, dict) else None
    return PATConfig.parse(options)


def layouts_of(vllm_config: Any) -> tuple[Layout, ...]:
    """The engine's layouts, base layout first."""
    config = pat_config(vllm_config)
    return config.resolve_layouts(vllm_config.parallel_config.tensor_parallel_size)


def home_layout(vllm_config: Any) -> Layout:
    """The layout in which the engine starts."""
    layouts = layouts_of(vllm_config)
    policy = pat_config(vllm_config).policy
    if isinstance(policy, StaticPolicyConfig):
        return next(layout for layout in layouts if layout.tp == policy.tp)
    return layouts[0]


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def _describe(error: Any) -> str:
    option = ".".join(str(part) for part in error["loc"]) or "options"
    if error["type"] == "extra_forbidden":
        return (
            f"unknown option {option!r} (value {error['input']!r}); "
            f"allowed: {', '.join(PATConfig.model_fields)}"
        )
    return f"option {option!r} has value {error['input']!r}: {error['msg']}"
