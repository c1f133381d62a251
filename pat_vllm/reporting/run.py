"""Part of a report, in seconds from its beginning; draft length and acceptance over time. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from pat_vllm.layout import Layout

if TYPE_CHECKING:
    from pat_vllm.reporting.values import BatchReport, DraftSample, Report, SwitchReport

Span = tuple[Layout, float, float]
"""A layout, from when and until when, in seconds."""


@dataclass(frozen=True)
class Run:
    """What an engine did in the `seconds` from `began` on, by the clock of a report of them."""

    report: Report
    began: float
    seconds: float

    @classmethod
    def of(cls, report: Report) -> Run:
        """From the first request until the last thing that the report has."""
        timeline = report.timeline
        first = timeline[0].at if timeline else 0.0
        began = next((sample.at for sample in timeline if sample.num_seqs), first)
        last = [
            *(sample.at for sample in timeline[-1:]),
            *(switch.at + switch.seconds for switch in report.switches[-1:]),
            *(sample.at for sample in report.drafts[-1:]),
            *(batch.at for batch in report.batches[-1:]),
        ]
        return cls(report, began, max([at - began for at in last if at > began], default=1.0))

    def during(self, at: float) -> bool:
        """Whether a time on the report's clock lies in it."""
        return 0 <= at - self.began <= self.seconds

    @property
    def switches(self) -> tuple[SwitchReport, ...]:
        """Those of the report while requests were running; returns of an idle engine left out."""
        return tuple(
            switch
            for switch in self.report.switches
            if self.during(switch.at) and switch.reason != "idle"
        )

    @property
    def batches(self) -> tuple[BatchReport, ...]:
        """Those that ended."""
        return tuple(batch for batch in self.report.batches if self.during(batch.at))

    @property
    def drafts(self) -> tuple[DraftSample, ...]:
        """The report's samples of drafts."""
        return tuple(sample for sample in self.report.drafts if self.during(sample.at))

    @property
    def drafted(self) -> int:
        """Draft tokens that were verified."""
        return sum(sample.counts.drafted for sample in self.drafts)

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens that was accepted; 0 without any."""
        return sum(sample.counts.accepted for sample in self.drafts) / max(1, self.drafted)

    @property
    def live(self) -> tuple[tuple[float, int], ...]:
        """Unfinished requests: pairs of (seconds, requests from then on), the end last.

        There are none after a batch has ended, and where the engine was idle.
        """
        counts = [(sample.at, sample.num_seqs) for sample in self.report.timeline]
        counts += [(switch.at, 0) for switch in self.report.switches if switch.reason == "idle"]
        counts += [(batch.at, 0) for batch in self.batches]
        live = sorted((at - self.began, count) for at, count in counts if self.during(at))
        return (*live, (self.seconds, live[-1][1]))

    @property
    def spans(self) -> tuple[Span, ...]:
        """Layouts one after another. One lasts until a switch, also while there is no request."""
        seen = [(sample.at, sample.layout) for sample in self.report.timeline]
        seen += [(switch.at, switch.target) for switch in self.report.switches]
        changes: list[tuple[Layout, float]] = []
        for at, layout in sorted(seen, key=itemgetter(0)):
            if at <= self.began or not changes:
                changes = [(layout, 0.0)]
            elif self.during(at) and changes[-1][0] != layout:
                changes.append((layout, at - self.began))
        stops = [start for _, start in changes[1:]] + [self.seconds]
        return tuple(
            (span_layout, start, stop)
            for (span_layout, start), stop in zip(changes, stops, strict=True)
        )


class DraftMean(NamedTuple):
    """The steps of all replicas in an interval, seconds: their mean draft length, and the share of
    the draft tokens that was accepted; None where none were verified."""

    start: float
    end: float
    num_speculative_tokens: float
    acceptance: float | None


def drafts_over_time(
    samples: Iterable[DraftSample], began: float, width: float = 1.0
) -> list[DraftMean]:
    """Means over intervals of `width` seconds, oldest first; those without a step are left out.

    Args:
        began: when the first interval begins, on the clock of the samples; earlier ones are left
            out. The means count seconds from it.
        width: not below a second, which is as far as samples tell times apart.
    """
    by_interval = defaultdict(list)
    for sample in samples:
        if sample.at >= began:
            by_interval[int((sample.at - began) / width)].append(sample)
    means = []
    for i, here in sorted(by_interval.items()):
        drafted = sum(sample.counts.drafted for sample in here)
        accepted = sum(s.counts.accepted for s in here) / drafted if drafted else None
        means.append(DraftMean(i * width, (i + 1) * width, mean_length(here), accepted))
    return means


def mean_length(samples: Sequence[DraftSample]) -> float:
    """Mean draft length over all steps."""
    steps = sum(sample.steps for sample in samples)
    return sum(sample.num_speculative_tokens * sample.steps for sample in samples) / steps
