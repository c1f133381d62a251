"""What a user may set of a policy, validated; kinds of values in options. Imports no vLLM."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictFloat,
    StrictInt,
    StrictStr,
)

from pat_vllm.files.reading import shown

MOST_RANKS = 1024
"""Of an engine: more than any has."""
MOST_PROBLEMS = 5
"""That an error names."""
_MOST_DIGITS, _MOST_TOKENS = 9, 2**31
IDLE_SECONDS = 5.0
"""Seconds without a request after which a batch is over, if a user says nothing else: longer than
most tools take between two turns of an agent."""
_MOST_IDLE_SECONDS = 86_400.0
"""A day: `idle_seconds` of a policy may be no longer."""


def _layout_tp(value: Any) -> int:
    tp = _number(value)
    if tp is None or tp < 1:
        raise ValueError(f"expected the tp of a layout (>= 1), got {shown(value)}")
    return tp


def _live_requests(value: Any) -> int:
    live = _number(value)
    if live is None or not 1 <= live <= _MOST_TOKENS:
        raise ValueError(f"expected a number of live requests (>= 1), got {shown(value)}")
    return live


def _number(value: Any) -> int | None:
    """A whole number, or its digits, as JSON has it in keys; None: it is neither."""
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        return int(value) if len(value) <= _MOST_DIGITS else None
    return value if type(value) is int else None


def _each_once(table: Any) -> Any:
    """Refuse a table that names something twice: 2 and "2" are one number."""
    if not isinstance(table, dict):
        return table
    names = Counter(key if (number := _number(key)) is None else number for key in table)
    if twice := [str(name) for name, count in names.items() if count > 1]:
        raise ValueError(f"it names {', '.join(twice[:MOST_PROBLEMS])} more than once")
    return table


LayoutTp: TypeAlias = Annotated[int, BeforeValidator(_layout_tp)]
"""A layout as users name it, by its tp; its digits do, too, as JSON has them in keys."""
LiveRequests: TypeAlias = Annotated[int, BeforeValidator(_live_requests)]
FileName: TypeAlias = Annotated[StrictStr, Field(min_length=1)]
DraftLength: TypeAlias = Annotated[StrictInt, Field(ge=0, le=_MOST_TOKENS)]
Tp: TypeAlias = Annotated[StrictInt, Field(le=MOST_RANKS)]


class StrictModel(BaseModel):
    """A value that cannot be changed and takes no unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class EveryPolicyConfig(StrictModel):
    """Options that every policy has.

    Attributes:
        idle_seconds: a batch is over when no request has been there for this long, seconds. It is
            over at once when caches are reset or weights have changed, as where training begins.
    """

    idle_seconds: Annotated[StrictFloat, Field(ge=0, le=_MOST_IDLE_SECONDS)] = IDLE_SECONDS


class StaticPolicyConfig(EveryPolicyConfig):
    """Stay in one layout.

    Attributes:
        tp: the layout's; None: the base layout.
    """

    kind: Literal["static"]
    tp: LayoutTp | None = None


class SchedulePolicyConfig(EveryPolicyConfig):
    """With at most K live requests, be in the layout of tp `switch_at[K]`.

    Attributes:
        num_speculative_tokens: draft length by tp; what is not named is as `speculative_config`
            says.
    """

    kind: Literal["schedule"]
    switch_at: Annotated[
        dict[LiveRequests, LayoutTp], BeforeValidator(_each_once), Field(min_length=1)
    ]
    num_speculative_tokens: Annotated[
        dict[LayoutTp, DraftLength],
        BeforeValidator(_each_once),
    ] = {}


class PredictorPolicyConfig(EveryPolicyConfig):
    """Follow the plan of layouts that is predicted to end the batch soonest, switches included.

    Attributes:
        profile: file made by `pat-vllm profile` for this engine; None: the cached one, or a quick
            one taken at start.
        length_bound: longest response, tokens, in place of what each request says. Benchmarks
            that fix lengths by `max_tokens` hide them from the predictor with it.
        control_every: each so many-th batch is a control batch: it is kept in the static layout
            that would be best for a batch like the one before it, by the planner, and the report
            tells what the others take relative to such batches; None: none is. With 2, two control
            batches would have a neighbour in common, and be no independent samples.
    """

    kind: Literal["predictor"] = "predictor"
    profile: FileName | None = None
    length_bound: Annotated[StrictInt, Field(ge=1, le=_MOST_TOKENS)] | None = None
    control_every: Annotated[StrictInt, Field(ge=3, le=_MOST_TOKENS)] | None = None


PolicyConfig = Annotated[
    StaticPolicyConfig | SchedulePolicyConfig | PredictorPolicyConfig,
    Field(discriminator="kind"),
]
