"""Messages between the engine core and the workers: the steps of the replicas, and switches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntFlag
from typing import Literal, TypeAlias

from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.v1.core.sched.output import GrammarOutput, SchedulerOutput
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput

from pat_vllm.drafts.shelf import RowUpdate
from pat_vllm.kv_transfer.plan import BlockMove
from pat_vllm.layout import Layout

EncoderInputs: TypeAlias = dict[str, dict[int, MultiModalKwargsItem]]
"""Data of images, such as pixels, by request id and index in the request's `mm_features`."""


@dataclass(frozen=True)
class SwitchCommand:
    """A switch, as the workers carry it out.

    Attributes:
        switch_id: number of this switch; together with the replica it seeds unseeded sampling.
        source, target: the layouts from which and to which to switch.
        moves: KV block moves; empty when nothing migrates.
        placement: target replica of each request whose runner state is carried.
    """

    switch_id: int
    source: Layout
    target: Layout
    moves: tuple[BlockMove, ...] = ()
    placement: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class SwitchTimes:
    """Seconds that one rank spent on the parts of a switch, and the bytes that it moved.

    Attributes:
        states: gathering the runners' states of requests.
        kv: the exchange of KV.
        weights: resharding, as far as it is not hidden behind the exchange of KV.
        activate: putting the target layout and its requests' states in place.
        kv_bytes: bytes of KV that this rank packed, those that stay on it included.
        weight_bytes: bytes of weights that were moved.
    """

    states: float
    kv: float
    weights: float
    activate: float
    kv_bytes: int
    weight_bytes: int = 0

    @classmethod
    def slowest(cls, ranks: Sequence[SwitchTimes]) -> SwitchTimes:
        """Each part's time on the rank that took longest; their sum may exceed the call."""
        parts = ("states", "kv", "weights", "activate", "kv_bytes")
        return cls(**{part: max(getattr(times, part) for times in ranks) for part in parts})


@dataclass(frozen=True)
class TransferRates:
    """What a rank measured at start.

    Attributes:
        bandwidth: bytes per second of the exchange of KV.
        prefill_rate: tokens per second of a replica's prefill, by layout.
    """

    bandwidth: float
    prefill_rate: Mapping[Layout, float]


@dataclass(frozen=True)
class ResolvedKernels:
    """What a worker chose where the engine's configuration leaves the choice to it.

    Attributes:
        attention: names of the layers' attention backends, each once, sorted.
        weights: PAT's weight strategy.
    """

    attention: tuple[str, ...]
    weights: Literal["inplace", "materialized"]


class Refreshed(IntFlag):
    """What came of deriving the layouts' weights again; false where nothing did."""

    MISSING = 0
    """The base layout has not got all of its own yet."""
    DONE = 1
    WITH_OTHER_KV_SCALES = 3
    """Done; what KV caches hold is worth nothing under the new scales."""
    WITH_STALE_DRAFTER = 5
    """Done; the drafter's weights are older than the target's."""


@dataclass(frozen=True)
class StepReply:
    """A replica's reply to a step.

    Attributes:
        drafts: draft tokens for the replica's next step, where the scheduler has to know them.
    """

    output: ModelRunnerOutput
    drafts: DraftTokenIds | None = None


@dataclass(frozen=True)
class CallFailed:
    """A worker's reply to a call of the engine's user that failed."""

    error: str


@dataclass
class PATSchedulerOutput(SchedulerOutput):
    """Steps by replica. The inherited fields only tell vLLM's engine loop that there is work.

    Attributes:
        steps: by replica, the step that it starts.
        draft_rows: by replica, what its drafters have to know before its step.
        encoder_inputs: by replica, data of the step's images that model runners lack.
    """

    steps: dict[int, SchedulerOutput] = field(default_factory=dict)
    draft_rows: dict[int, RowUpdate] = field(default_factory=dict)
    encoder_inputs: dict[int, EncoderInputs] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        steps: dict[int, SchedulerOutput],
        in_flight: bool,
        draft_rows: dict[int, RowUpdate] | None = None,
        encoder_inputs: dict[int, EncoderInputs] | None = None,
    ) -> PATSchedulerOutput:
        """Bundle the steps that replicas start at once.

        vLLM's engine loop takes zero scheduled tokens for "nothing to wait for". So the total is at
        least one while any step is in flight, including an earlier one.
        """
        empty = vars(SchedulerOutput.make_empty())
        output = cls(
            **empty,
            steps=steps,
            draft_rows=draft_rows or {},
            encoder_inputs=encoder_inputs or {},
        )
        tokens = sum(step.total_num_scheduled_tokens for step in steps.values())
        output.total_num_scheduled_tokens = max(tokens, int(in_flight))
        return output


@dataclass
class PATGrammarOutput(GrammarOutput):
    """Grammar bitmasks by replica."""

    of_replica: dict[int, GrammarOutput] = field(default_factory=dict)
