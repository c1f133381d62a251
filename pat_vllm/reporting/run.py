"""Part of a report, in seconds from its beginning; draft length and acceptance over time. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import TYPE_CHECKING, NamedTuple

from pat_vllm.layout import Layout

if TYPE_CHECKING:
    from pat_vllm.reporting.values import BatchSavings, DraftSample, Report, SwitchReport

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
        began = next((one.at for one in timeline if one.num_seqs), first)
        last = [
            *(one.at for one in timeline[-1:]),
            *(one.at + one.seconds for one in report.switches[-1:]),
            *(one.at for one in report.drafts[-1:]),
            *(one.at for one in report.predictor.savings[-1:]),
        ]
        return cls(report, began, max([one - began for one in last if one > began], default=1.0))

    def during(self, at: float) -> bool:
        """Whether a time on the report's clock lies in it."""
        return 0 <= at - self.began <= self.seconds

    @property
    def switches(self) -> tuple[SwitchReport, ...]:
        """Those of the report while requests were running; returns of an idle engine left out."""
        return tuple(
            one for one in self.report.switches if self.during(one.at) and one.reason != "idle"
        )

    @property
    def savings(self) -> tuple[BatchSavings, ...]:
        """Of batches that ended."""
        return tuple(one for one in self.report.predictor.savings if self.during(one.at))

    @property
    def drafts(self) -> tuple[DraftSample, ...]:
        """The report's samples of drafts."""
        return tuple(one for one in self.report.drafts if self.during(one.at))

    @property
    def drafted(self) -> int:
        """Draft tokens that were verified."""
        return sum(sample.drafted for sample in self.drafts)

    @property
    def acceptance(self) -> float:
        """Share of the draft tokens that was accepted; 0 without any."""
        return sum(sample.accepted for sample in self.drafts) / max(1, self.drafted)

    @property
    def live(self) -> tuple[tuple[float, int], ...]:
        """Unfinished requests: pairs of (seconds, requests from then on), the end last.

        There are none after a batch has ended, and where the engine was idle.
        """
        counts = [(one.at, one.num_seqs) for one in self.report.timeline]
        counts += [(one.at, 0) for one in self.report.switches if one.reason == "idle"]
        counts += [(one.at, 0) for one in self.savings]
        live = sorted((at - self.began, count) for at, count in counts if self.during(at))
        return (*live, (self.seconds, live[-1][1]))

    @property
    def spans(self) -> tuple[Span, ...]:
        """Layouts one after another. One lasts until a switch, also while there is no request."""
        seen = [(one.at, one.layout) for one in self.report.timeline]
        seen += [(one.at, one.target) for one in self.report.switches]
        changes: list[tuple[Layout, float]] = []
        for at, layout in sorted(seen, key=itemgetter(0)):
            if at <= self.began or not changes:
                changes = [(layout, 0.0)]
            elif self.during(at) and changes[-1][0] != layout:
                changes.append((layout, at - self.began))
        stops = [start for _, start in changes[1:]] + [self.seconds]
        return tuple((one, start, stop) for (one, start), stop in zip(changes, stops, strict=True))


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
    for one in samples:
        if one.at >= began:
            by_interval[int((one.at - began) / width)].append(one)
    means = []
    for i, here in sorted(by_interval.items()):
        drafted = sum(one.drafted for one in here)
        accepted = sum(one.accepted for one in here) / drafted if drafted else None
        means.append(DraftMean(i * width, (i + 1) * width, mean_length(here), accepted))
    return means


def mean_length(samples: Sequence[DraftSample]) -> float:
    """Mean draft length over all steps."""
    steps = sum(one.steps for one in samples)
    return sum(one.num_speculative_tokens * one.steps for one in samples) / steps
