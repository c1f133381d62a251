"""The report and its parts: frozen dataclasses. They travel and are kept as JSON, by pydantic."""

from __future__ import annotations

import functools
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, ClassVar, NamedTuple

from pydantic import ConfigDict, PlainSerializer, PlainValidator, TypeAdapter, ValidationError

from pat_vllm.files.reading import FileError, first_problem, name_of, read_json, shown
from pat_vllm.files.writing import write_whole
from pat_vllm.layout import Layout

FORMAT = 1
"""Version of the file that `Report.save` writes."""
_MOST_BYTES = 512 << 20
"""Of that file: every step of a long run may be in it."""

_parse = functools.lru_cache(maxsize=64)(Layout.parse)


def _layout(value: Layout | str) -> Layout:
    if isinstance(value, Layout):
        return value
    if not isinstance(value, str):
        raise ValueError(f"expected the name of a layout, got {shown(value)}")
    return _parse(value)


SWITCH_REASONS = ("policy", "forced", "idle")
"""Who asks for a switch."""
REFUSALS = ("asleep", "weights_arriving", "streaming_input", "planning_failed")
"""Why a switch is not made: the engine sleeps, new weights are coming in, a request cannot be
carried, or PAT made a mistake."""

LayoutByName = Annotated[Layout, PlainValidator(_layout), PlainSerializer(str, return_type=str)]
"""A layout that JSON shows as its name ("tp1dp4"), as a value and as a key."""


@dataclass(frozen=True)
class SwitchReport:
    """One switch from the layout `source` to the layout `target`.

    Times are in seconds. `at` is on the monotonic clock of the engine core.

    Attributes:
        at: when the switch began.
        reason: who asked for it: "policy", "forced" (the user) or "idle" (back to the default
            layout).
        num_seqs: unfinished requests at that moment. Of these, `migrated` took their KV along,
            `recomputed` prefill again, and the rest had not been computed yet.
        kv_bytes: bytes of KV that were moved, over all ranks.
        seconds: the whole stall. It is the sum of `quiesce`, `plan`, `states`, `kv`, `weights`,
            `activate`, `rpc` and `finish`.
        quiesce: to drain the steps in flight.
        plan: to place requests, allocate blocks and list what moves.
        states: to exchange the states of requests, on the slowest worker.
        kv: to move KV, on the slowest worker.
        weights: to reshard the weights, on the slowest worker.
        activate: to put the layout's group and model runner in place, on the slowest worker.
        rpc: the rest of the call to the workers.
        finish: to tell the new schedulers.
        first_step: duration of the first step in `target`; None before that step has finished.
        tokens: computed tokens of the unfinished requests together.
        cached_tokens: tokens of cached prefixes that no request used, whose KV was moved, too.
        weight_bytes: bytes of weights that came to another place, over all ranks.
    """

    at: float
    source: LayoutByName
    target: LayoutByName
    reason: str
    num_seqs: int
    migrated: int
    recomputed: int
    kv_bytes: int
    seconds: float
    quiesce: float = 0.0
    plan: float = 0.0
    states: float = 0.0
    kv: float = 0.0
    weights: float = 0.0
    activate: float = 0.0
    rpc: float = 0.0
    finish: float = 0.0
    first_step: float | None = None
    tokens: int = 0
    weight_bytes: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True)
class RefusedSwitch:
    """A switch to `target` that was not made. Generation went on in `source`.

    Attributes:
        at: when it was refused, in seconds on the monotonic clock of the engine core.
        why: what stood against it, or the exception with which planning failed.
        reason: a short name of `why`, one of `REFUSALS`.
    """

    at: float
    source: LayoutByName
    target: LayoutByName
    why: str
    reason: str

    @property
    def expected(self) -> bool:
        """False if PAT made a mistake, whose traceback is in the engine's log."""
        return self.reason != "planning_failed"


@dataclass(frozen=True)
class DecisionReport:
    """A decision of the predictor policy that switched, or nearly did.

    Times are in seconds. `no_switch`, `switch_now` and `cost` are predictions made at that moment,
    averaged over the sampled futures of the unfinished requests.

    Attributes:
        at: when, on the monotonic clock of the engine core.
        no_switch: until the last response ends, in `layout`.
        switch_now: the same after a switch to `target` now, with the cost of the switch.
        why: what decided: "plan", "probe", "hysteresis" or "later".
        step_before: predicted step time in `layout` at that moment.
        step_after: predicted step time in `target`.
        real_before: measured: median of the last steps before, or None.
        real_after: measured: median of the first steps after a switch, or None.
        real_cost: measured stall of the switch, or None.
    """

    at: float
    layout: LayoutByName
    target: LayoutByName
    num_seqs: int
    no_switch: float
    switch_now: float
    cost: float
    fired: bool
    why: str
    step_before: float
    step_after: float
    real_before: float | None = None
    real_after: float | None = None
    real_cost: float | None = None

    @property
    def came_true(self) -> bool | None:
        """Whether steps became faster, or slower, as predicted; None: that was not measured."""
        if self.real_before is None or self.real_after is None:
            return None
        return (self.real_after < self.real_before) == (self.step_after < self.step_before)


@dataclass(frozen=True)
class PredictorReport:
    """What the predictor policy decided, and how well its models predict.

    Attributes:
        step_error: by layout, how many steps were compared with their predictions, and the mean
            absolute error relative to the real step time. Each prediction was made before the
            model learnt from its step.
        planning: seconds of all plans together; `slowest_plan` of one.
        batches, responses: that the length model has learnt from.
    """

    decisions: tuple[DecisionReport, ...] = ()
    step_error: Mapping[LayoutByName, tuple[int, float]] = field(default_factory=dict)
    plans: int = 0
    planning: float = 0.0
    slowest_plan: float = 0.0
    batches: int = 0
    responses: int = 0

    @property
    def share_come_true(self) -> float | None:
        """Share of the decisions that fired and came true, of those where both step times were
        measured; None: there are none."""
        known = [d.came_true for d in self.decisions if d.fired and d.came_true is not None]
        return sum(known) / len(known) if known else None


@dataclass(frozen=True)
class BatchReport:
    """A batch that ended.

    Attributes:
        at: when its last response ended, in seconds on the monotonic clock of the engine core.
        seconds: since its first request arrived.
        responses: requests that ended, aborted ones included.
        tokens: that they generated.
        switches: made while requests were unfinished.
        control: whether the policy kept it in one layout, to compare others with it.
    """

    at: float
    seconds: float
    responses: int
    tokens: int
    switches: int = 0
    control: bool = False


@dataclass(frozen=True)
class ControlComparison:
    """What switching was worth: seconds per generated token of the batches beside control batches,
    relative to those of the control batches. See `reporting/control.py`.

    Attributes:
        controls: control batches that were compared.
        ratio: below 1 where switching batches were faster.
        low, high: the 95% confidence interval of `ratio`.
    """

    controls: int
    ratio: float
    low: float
    high: float


@dataclass(frozen=True)
class LiveSample:
    """From `at` on (seconds) there were `num_seqs` unfinished requests in `layout`.

    `by_replica` says how many of them each replica had; empty where there is one, or nobody knows.
    """

    at: float
    layout: LayoutByName
    num_seqs: int
    by_replica: tuple[int, ...] = ()


class DraftCounts(NamedTuple):
    """Draft tokens that steps verified, and those that became output; `repeated`: of requests to
    whose prompt there were earlier responses."""

    drafted: int = 0
    accepted: int = 0
    repeated_drafted: int = 0
    repeated_accepted: int = 0


@dataclass(frozen=True)
class DraftSample:
    """Steps of one replica with the same draft length, for at most about a second.

    Attributes:
        at: when the first of them ended, seconds on the monotonic clock of the engine core.
        num_speculative_tokens: the most draft tokens that a request got for its next step.
        steps: how many they are.
        counts: their draft tokens.
    """

    at: float
    layout: LayoutByName
    replica: int
    num_speculative_tokens: int
    steps: int
    counts: DraftCounts

    def plus(self, counts: DraftCounts) -> DraftSample:
        """With one more step."""
        total = DraftCounts(*map(operator.add, self.counts, counts))
        return replace(self, steps=self.steps + 1, counts=total)


@dataclass(frozen=True)
class LayoutSteps:
    """Steps of all replicas in one layout.

    Attributes:
        median: seconds of a step, by the last thousand.
        by_draft_length: seconds of all steps with each draft length.
    """

    steps: int
    median: float
    by_draft_length: Mapping[int, float]

    @property
    def seconds(self) -> float:
        """Seconds of all steps together."""
        return sum(self.by_draft_length.values())


@dataclass(frozen=True, repr=False)
class Report:
    """State and history of an engine.

    `print(report)` shows a sentence, and a line for each switch and each batch.

    A report may be asked for `since` a time. Then `switches`, `refused`, `timeline`, `drafts`,
    `batches` and the predictor's decisions hold only what happened at that time or later. The rest
    is always about the whole life of the engine. Records are the oldest first; of switches, refused
    ones, samples, drafts and batches at most the last `history.MAX_RECORDS` are kept.

    Attributes:
        layouts: all layouts that the engine keeps ready, the base layout first.
        timeline: a sample per change of the layout or of the number of unfinished requests.
        predictor: what the predictor policy did; empty for other policies.
        errors: switches that failed for an unexpected reason and were undone. The engine's log has
            their tracebacks.
        drafts: for engines that speculate, by replica over time.
        chosen: why these layouts, and what they leave for KV, in a line.
        batches: batches that ended, and the last one, as far as it got, while no request is left.
        control: what switching was worth, by control batches; None before there are two.
        drafter_is_stale: whether the weights of a drafter are older than the model's: fewer of its
            drafts are accepted then.
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(ser_json_inf_nan="constants")

    layout: LayoutByName
    layouts: tuple[LayoutByName, ...]
    switches: tuple[SwitchReport, ...]
    refused: tuple[RefusedSwitch, ...]
    timeline: tuple[LiveSample, ...]
    steps: Mapping[LayoutByName, LayoutSteps] = field(default_factory=dict)
    predictor: PredictorReport = PredictorReport()
    errors: int = 0
    drafts: tuple[DraftSample, ...] = ()
    chosen: str = ""
    batches: tuple[BatchReport, ...] = ()
    control: ControlComparison | None = None
    drafter_is_stale: bool = False

    def __str__(self) -> str:
        from pat_vllm.reporting.text import describe_report  # words are made of values

        return describe_report(self)

    def __repr__(self) -> str:
        """Short; `to_json` has everything."""
        return (
            f"<Report of {self.layout.world_size} ranks in {self.layout}: {len(self.switches)} "
            f"switches, {len(self.timeline)} samples, {len(self.batches)} batches>"
        )

    def to_json(self) -> str:
        """The report as JSON text. Layouts are named as in "tp1dp4"."""
        return _REPORT.dump_json(self).decode()

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """Inverse of `to_json`.

        Raises:
            ValueError: `text` is not the JSON of a report.
        """
        return _REPORT.validate_json(text)

    def save(self, path: str | Path) -> None:
        """Write a file of JSON that `load` reads, all of it or nothing.

        Raises:
            OSError: it cannot be written.
        """
        write_whole(Path(path), f'{{"format":{FORMAT},{self.to_json()[1:]}\n')

    @classmethod
    def load(cls, path: str | Path) -> Report:
        """What `save` wrote.

        Raises:
            ValueError: the file cannot be read, is damaged, or of another format.
        """
        content, named = read_json(path, "report", most=_MOST_BYTES), f"report {name_of(path)}"
        found = content.get("format") if isinstance(content, dict) else None
        if found != FORMAT:
            raise FileError(f"{named} has format {shown(found)}, this version reads {FORMAT}")
        try:
            return _REPORT.validate_python(content)
        except ValidationError as error:
            raise FileError(f"{named} is damaged: {first_problem(error)}") from None

    def plot(self, path: str | Path) -> None:
        """Draw a picture: requests, layouts, draft lengths, switches and steps over time.

        Args:
            path: file to write; its suffix says what kind (.png, .svg, .pdf).

        Raises:
            ImportError: matplotlib is not installed.
            OSError: the file cannot be written.
            ValueError: the report has no requests, or the suffix is unknown.
        """
        from pat_vllm.reporting.report_plot import plot_report

        plot_report(self, Path(path))


_REPORT = TypeAdapter(Report)
