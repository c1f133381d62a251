"""A profile: what steps and switches of one engine take, measured or modelled. Pure.

One JSON file. It carries a digest of its content, so that a damaged or edited file is an error and
never a wrong decision, and a key that says for which model, hardware, flags and versions it holds.
"""

from __future__ import annotations

import hashlib
import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    AliasChoices,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
    model_validator,
)

from pat_vllm.config import StrictModel
from pat_vllm.files import write_whole
from pat_vllm.layout import Layout

FORMAT = 1
"""Version of the file format."""

MOST_TIMES = 16
"""Repeats of a step whose times a sample keeps, so that files stay small."""

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class ProfileError(ValueError):
    """A profile cannot be used; the message names the file, what is wrong and what to do."""


@dataclass(frozen=True, slots=True)
class StepShape:
    """The work of one step of one replica.

    Attributes:
        batch: requests that decode a token.
        context: tokens of their contexts, summed.
        longest: tokens of the longest of these contexts.
        prefill: prompt tokens that are computed beside them.
        busy: replicas that step at the same time, this one included; where they share a resource
            (a CPU's memory, a power limit) a step takes longer the more of them do.
        drafts: draft tokens of all requests together that are verified beside their tokens.
        k: draft tokens that the drafter is asked for, for each request: vLLM's
            `num_spec_tokens_to_schedule`. They are verified in the next step. 0: it does not run.
    """

    batch: int
    context: int
    longest: int
    prefill: int = 0
    busy: int = 1
    drafts: int = 0
    k: int = 0


class StepSample(StrictModel):
    """Time of one step of one replica; see `StepShape` for the meaning of the fields.

    A sample with `batch` 0 is a prefill of `prefill` tokens and nothing else.

    Attributes:
        seconds: median over `repeats` steps.
        low, high: the fastest and the slowest of them.
        times: the times of these steps in the order of measuring, of at most `MOST_TIMES` of them
            (see `thinned`); empty in older files, and where nothing was repeated.
    """

    tp: Positive
    batch: Count
    context: Count
    longest: Count
    prefill: Count = 0
    busy: Positive = 1
    seconds: Seconds
    low: Seconds
    high: Seconds
    repeats: Positive
    drafts: Count = 0
    k: Count = 0
    times: tuple[Seconds, ...] = Field(default=(), max_length=MOST_TIMES)

    @model_validator(mode="after")
    def _times_agree(self) -> StepSample:
        if not self.times:
            return self
        if len(self.times) > self.repeats:
            raise ValueError(f"a step has {len(self.times)} times and {self.repeats} repeats")
        # Of thinned times the median and the extremes may be others.
        if len(self.times) < self.repeats:
            if min(self.times) < self.low or max(self.times) > self.high:
                raise ValueError(f"a step's times are not between its low and high: {self}")
        elif (statistics.median(self.times), min(self.times), max(self.times)) != (
            self.seconds,
            self.low,
            self.high,
        ):
            raise ValueError(f"a step's median, low or high are not those of its times: {self}")
        return self

    @property
    def shape(self) -> StepShape:
        """The step's features."""
        return StepShape(
            self.batch,
            self.context,
            self.longest,
            self.prefill,
            self.busy,
            self.drafts,
            self.k,
        )

    @classmethod
    def of(cls, tp: int, shape: StepShape, times: Sequence[float]) -> StepSample:
        """A sample of the times of equal steps, in the order of measuring; at least one."""
        return cls(
            tp=tp,
            batch=shape.batch,
            context=shape.context,
            longest=shape.longest,
            prefill=shape.prefill,
            busy=shape.busy,
            drafts=shape.drafts,
            k=shape.k,
            seconds=statistics.median(times),
            low=min(times),
            high=max(times),
            repeats=len(times),
            times=thinned(times) if len(times) > 1 else (),
        )


def thinned(times: Sequence[float]) -> tuple[float, ...]:
    """At most `MOST_TIMES` of them, evenly spread; the first and the last are among them."""
    if len(times) <= MOST_TIMES:
        return tuple(times)
    last = len(times) - 1
    return tuple(times[round(i * last / (MOST_TIMES - 1))] for i in range(MOST_TIMES))


class SwitchSample(StrictModel):
    """Time of one switch.

    Attributes:
        num_seqs: requests that were carried with their KV (`live` in older files).
        tokens: tokens of their contexts, summed.
        kv_bytes: KV bytes moved, over all ranks.
        seconds: the stall, without the steps in flight that a switch lets finish.
        kv: seconds of it that moved KV.
        weights: seconds of it that resharded weights.
    """

    source: Positive
    target: Positive
    num_seqs: Count = Field(validation_alias=AliasChoices("num_seqs", "live"))
    tokens: Count
    kv_bytes: Count
    seconds: Seconds
    kv: Annotated[float, Field(ge=0, allow_inf_nan=False)]
    weights: Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Profile(StrictModel):
    """What steps and switches take on one engine.

    Attributes:
        kind: "measured", or "modelled" from public figures of the hardware.
        title: one line for people: model, hardware, ranks.
        created: date and time, ISO 8601.
        key: for what it holds: model, hardware, flags, versions; names and plain values.
        ranks: devices of the engine.
        layouts: tensor-parallel sizes, ascending; the first is the base.
        max_num_seqs: requests that a replica runs at once, by tp; older files have one number.
        max_batch_tokens: tokens that a step of a replica may compute, by tp; likewise.
        kv_tokens: tokens whose KV a replica's memory holds, by tp.
        kv_bytes_per_token: KV bytes of a token over all layers and KV heads.
        steps, switches: the samples.
        note: where modelled figures come from, or how a measurement was made.
    """

    format: Literal[1] = 1
    kind: Literal["measured", "modelled"]
    title: str
    created: str
    key: dict[str, Any]
    ranks: Positive
    layouts: tuple[Positive, ...] = Field(min_length=1)
    max_num_seqs: dict[int, Positive]
    max_batch_tokens: dict[int, Positive]
    kv_tokens: dict[int, int]
    kv_bytes_per_token: Positive
    steps: tuple[StepSample, ...]
    switches: tuple[SwitchSample, ...] = ()
    note: str = ""

    @field_validator("max_num_seqs", "max_batch_tokens", mode="before")
    @classmethod
    def _in_every_layout(cls, value: Any, info: ValidationInfo) -> Any:
        return dict.fromkeys(info.data.get("layouts", ()), value) if type(value) is int else value

    @model_validator(mode="after")
    def _consistent(self) -> Profile:
        if list(self.layouts) != sorted(set(self.layouts)):
            raise ValueError("layouts must ascend without repeats")
        for tp in self.layouts:
            if self.ranks % tp:
                raise ValueError(f"layout tp={tp} does not divide the {self.ranks} ranks")
            for name in ("max_num_seqs", "max_batch_tokens", "kv_tokens"):
                if getattr(self, name).get(tp, 0) < 1:
                    raise ValueError(f"{name} has no entry for layout tp={tp}")
            if not any(s.tp == tp and s.batch for s in self.steps):
                raise ValueError(f"steps has no decode step of layout tp={tp}")
        for sample in self.steps:
            if sample.tp not in self.layouts:
                raise ValueError(f"steps names tp={sample.tp}, which is not among layouts")
            if not sample.low <= sample.seconds <= sample.high:
                raise ValueError(f"a step's median is not between its low and high: {sample}")
        for one in self.switches:
            if one.source not in self.layouts or one.target not in self.layouts:
                raise ValueError(f"switches names tp={one.source}->{one.target}, not in layouts")
        return self

    @property
    def all_layouts(self) -> tuple[Layout, ...]:
        """The layouts, base first."""
        return tuple(Layout.of(tp, self.ranks) for tp in self.layouts)

    def save(self, path: Path, *, private: bool = False) -> None:
        """Write the file, whole or not at all; directories are made.

        Args:
            private: nobody but the user may read it.

        Raises:
            OSError: it cannot be written.
        """
        content = self.model_dump(mode="json")
        text = json.dumps({"digest": _digest(content), **content}, indent=1)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text + "\n", private=private)

    @classmethod
    def load(cls, path: Path) -> Profile:
        """Read a file.

        Raises:
            ProfileError: it is missing, damaged, edited, or of another format.
        """
        advice = "make it again with `pat-vllm profile`"
        try:
            content = json.loads(path.read_text())
        except OSError as error:
            raise ProfileError(f"profile {path} cannot be read: {error.strerror}") from None
        except (ValueError, RecursionError) as error:
            raise ProfileError(f"profile {path} is no JSON ({error}); {advice}") from None
        if not isinstance(content, dict) or "digest" not in content:
            raise ProfileError(f"{path} is no profile: it has no digest; {advice}")
        if content.get("format") != FORMAT:
            raise ProfileError(
                f"profile {path} has format {content.get('format')!r}, this version reads "
                f"{FORMAT}; {advice}"
            )
        if content.pop("digest") != _digest(content):
            raise ProfileError(
                f"profile {path} was changed after it was written: its digest does not match; "
                f"{advice}"
            )
        try:
            return cls.model_validate(content)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "profile"
            raise ProfileError(f"profile {path}: {where}: {first['msg']}; {advice}") from None

    def check(self, key: Mapping[str, Any], path: Path | str) -> None:
        """Make sure that the profile holds for an engine.

        Raises:
            ProfileError: it does not; names what differs.
        """
        different = [
            f"{name} is {key.get(name)!r} here and {self.key.get(name)!r} in the profile"
            for name in sorted({*key, *self.key})
            if key.get(name) != self.key.get(name)
        ]
        if different:
            raise ProfileError(
                f"profile {path} was made for another engine: {'; '.join(different)}. Make one "
                "for this engine with `pat-vllm profile`, or name none in pat.policy and let the "
                "engine take a quick one at start"
            )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
