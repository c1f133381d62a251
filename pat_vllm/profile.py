"""A profile: what steps and switches of one engine take, measured or modelled. Pure.

One JSON file. It carries a key that says for which model, hardware, flags and versions it holds.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, model_validator

from pat_vllm.files.reading import FileError, cut, first_problem, name_of, read_json, shown
from pat_vllm.files.writing import write_whole
from pat_vllm.layout import Layout
from pat_vllm.policy_config import StrictModel
from pat_vllm.reporting.values import LayoutByName

MOST_TIMES = 16
"""Repeats of a step whose times a sample keeps, so that files stay small."""
_MOST = 2**53
"""So that sums of counts are exact, and none is too large for an array."""
Seconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False)]
Part = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0, le=_MOST)]
Positive = Annotated[int, Field(ge=1, le=_MOST)]


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
            `num_spec_tokens_to_schedule`. They are verified in the next step. 0: a drafter of text
            does not run, one with weights makes its first pass.
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
            (see `thinned`); empty where nothing was repeated.
    """

    layout: LayoutByName
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

    @property
    def shape(self) -> StepShape:
        """The step's features."""
        return StepShape(*(getattr(self, name) for name in StepShape.__slots__))

    @classmethod
    def of(cls, layout: Layout, shape: StepShape, times: Sequence[float]) -> StepSample:
        """A sample of the times of equal steps, in the order of measuring; at least one."""
        return cls(
            layout=layout,
            **asdict(shape),
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
        num_seqs: requests that were carried with their KV.
        tokens: tokens of their contexts, summed.
        kv_bytes: KV bytes moved, over all ranks.
        seconds: the stall, without the steps in flight that a switch lets finish.
        kv: seconds of it that moved KV.
        weights: seconds of it that resharded weights.
    """

    source: LayoutByName
    target: LayoutByName
    num_seqs: Count
    tokens: Count
    kv_bytes: Count
    seconds: Seconds
    kv: Part
    weights: Part


class Profile(StrictModel):
    """What steps and switches take on one engine.

    Attributes:
        kind: "measured", or "modelled" from public figures of the hardware.
        title: one line for people: model, hardware, ranks.
        created: date and time, ISO 8601.
        key: for what it holds: model, hardware, flags, versions; names and plain values.
        ranks: devices of the engine.
        layouts: ascending in tp; the first is the base.
        max_num_seqs: requests that a replica runs at once, by tp.
        max_batch_tokens: tokens that a step of a replica may compute, by tp.
        kv_tokens: tokens whose KV a replica's memory holds, by tp.
        kv_bytes_per_token: KV bytes of a token over all layers and KV heads.
        experts: of a mixture, how many a layer has, and to how many of them a token goes.
        drafter_has_weights: whether drafts are made by a model, in a pass for each; else they are
            looked for.
        steps, switches: the samples.
        note: where modelled figures come from, or how a measurement was made.
    """

    format: Literal[2] = 2
    kind: Literal["measured", "modelled"]
    title: str
    created: str
    key: dict[str, Any]
    ranks: Positive
    layouts: tuple[LayoutByName, ...] = Field(min_length=1)
    max_num_seqs: dict[int, Positive]
    max_batch_tokens: dict[int, Positive]
    kv_tokens: dict[int, Annotated[int, Field(le=_MOST)]]
    kv_bytes_per_token: Positive
    experts: tuple[Positive, Positive] | None = None
    drafter_has_weights: bool = False
    steps: tuple[StepSample, ...]
    switches: tuple[SwitchSample, ...] = ()
    note: str = ""

    @model_validator(mode="after")
    def _of_its_layouts(self) -> Profile:
        sizes, known = [layout.tp for layout in self.layouts], {*self.layouts}
        if sizes != sorted(sizes) or len(known) < len(sizes):
            raise ValueError("layouts must ascend in tp, without repeats")
        decoded = {sample.layout for sample in self.steps if sample.batch}
        for layout in self.layouts:
            if layout.world_size != self.ranks:
                raise ValueError(f"layout {layout} is not one of {self.ranks} ranks")
            for name in ("max_num_seqs", "max_batch_tokens", "kv_tokens"):
                if getattr(self, name).get(layout.tp, 0) < 1:
                    raise ValueError(f"{name} has no entry for tp={layout.tp}")
            if layout not in decoded:
                raise ValueError(f"steps has no decode step of layout {layout}")
        named = {sample.layout for sample in self.steps}
        for switch in self.switches:
            named |= {switch.source, switch.target}
        if unknown := named - known:
            raise ValueError(f"a sample is of {min(unknown)}, which is not among layouts")
        return self

    @property
    def chosen(self) -> float:
        """Probability that a token goes to an expert, all equally popular; 0: it has none."""
        count, per_token = self.experts or (1, 0)
        return per_token / count

    def save(self, path: Path, *, private: bool = False) -> None:
        """Write the file, whole or not at all; directories are made. If `private`, nobody but the
        user may read it.

        Raises:
            OSError: it cannot be written.
        """
        path.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps(self.model_dump(mode="json"), indent=1)
        write_whole(path, text + "\n", private=private)

    @classmethod
    def load(cls, path: Path, *, own: bool = False) -> Profile:
        """Read a file, which has to be this user's if `own`.

        Raises:
            ProfileError: it is missing, or no profile.
        """
        try:
            return cls.model_validate(read_json(path, "profile", own=own))
        except FileError as error:
            problem = str(error)
        except ValidationError as error:
            problem = f"profile {name_of(path)}: {first_problem(error)}"
        raise ProfileError(f"{problem}; make it again with `pat-vllm profile`")

    def check(self, key: Mapping[str, Any], path: Path | str) -> None:
        """Make sure that the profile holds for an engine.

        Raises:
            ProfileError: it does not; names what differs.
        """
        different = [
            f"{cut(name)} is {shown(key.get(name))} here and {shown(self.key.get(name))} in the "
            "profile"
            for name in sorted({*key, *self.key})
            if key.get(name) != self.key.get(name)
        ]
        if different:
            raise ProfileError(
                f"profile {path} was made for another engine: {'; '.join(different)}. Make one "
                "for this engine with `pat-vllm profile`, or name none in pat.policy and let the "
                "engine take a quick one at start"
            )
