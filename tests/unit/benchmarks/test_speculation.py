"""Measurements of speculation: their arithmetic, and whole with engines that pretend."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, ClassVar

import pytest

from benchmarks.speculation import alternate, engines, steps, switches, tail
from benchmarks.speculation.engines import Batch, Served
from benchmarks.speculation.paired import MedianRatio


def test_ratio_is_that_of_pairs() -> None:
    """Whatever both had in common cancels out, and an outlier is not in the interval."""
    ratio = MedianRatio.of([1.5, 3.0, 0.6], [1.0, 2.0, 0.4])
    assert all(math.isclose(value, 1.5) for value in (ratio.median, ratio.low, ratio.high))
    ratio = MedianRatio.of([1.0, 1.02, 1.01, 0.99, 1.0, 1.01, 0.98, 1.0, 9.0], [1.0] * 9)
    assert ratio.low <= ratio.median == 1.0 <= ratio.high < 1.03
    intervals = ((0.98, 1.0, 1.01), (0.98, 1.0, 1.02), (1.0, 1.02, 1.03), (1.02, 1.03, 1.04))
    verdicts = [MedianRatio(mid, low, high, ()).verdict(1.01) for low, mid, high in intervals]
    assert verdicts == ["met", "median within", "median beyond", "missed"]


# ---------------------------------------------------------------- whole


class Pretended:
    """An engine whose batches take a known time on a clock of its own."""

    running: ClassVar[set[int]] = set()
    clock = 0.0

    def __init__(self, options: dict[str, Any], bind: str, core_inside: bool = False) -> None:
        self.uses_pat = options.get("distributed_executor_backend") == "pat"
        self.most = options.get("speculative_config", {}).get("num_speculative_tokens", 0)

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *_: object) -> None:
        self.running.discard(id(self))

    def wait_until_ready(self) -> float:
        self.resume()
        return 0.0

    def resume(self) -> None:
        self.running.add(id(self))

    def pause(self) -> None:
        self.running.remove(id(self))

    def start(self, function: Any, batch: Batch) -> None:
        assert id(self) in self.running
        self.batch = batch

    def result(self) -> Served:
        batch = self.batch
        length = self.most if batch.length is None else batch.length
        seconds = (2.0 if self.uses_pat else 1.9) / (1 + length / 8) / (batch.tp or 1)
        tokens = tuple((sum(prompt["prompt_token_ids"]),) for prompt in batch.prompts)
        drafted = length * len(batch.prompts)
        counts = (batch.new_tokens, drafted, drafted // 2) if self.uses_pat else (0, 0, 0)
        Pretended.clock += seconds
        return Served(Pretended.clock - seconds, Pretended.clock, tokens, *counts)

    def call(self, function: Any, *args: Any) -> Any:
        seconds = 0.02 if self.uses_pat else 0.019
        if function is engines.serve:
            self.start(function, *args)
            return self.result()
        if function is steps.take_changes:
            return [steps.Step(length, 0, 8, seconds) for length in (4, 0) * args[1]]
        if function is steps.take_plain_steps:
            return [steps.Step(0, at, 8, seconds) for at in range(args[1])]
        assert function is switches.take_switches
        reports: list[dict[str, Any]] = []
        drafts = [turn % 4 in (0, 3) for turn in range(2 * args[1]) for _ in range(2)]
        for index, drafting in enumerate(drafts):
            way = ("tp1dp2", "tp2dp1")[:: 1 if index % 2 == 0 else -1]
            stall = 0.0103 if drafting else 0.01
            reports.append(
                dict(source=way[0], target=way[1], seconds=stall + 0.02, quiesce=0.02)
                | dict(first_step=0.03)
            )
        return switches.Switches(tuple(drafts), tuple(reports), 0.5, 0.6)


@pytest.mark.parametrize(
    ("measure", "value", "expected", "line"),
    [
        pytest.param(
            lambda: alternate.static("repeating", alternate.Size(4, 8, 3), 4),
            lambda body: body["tp2dp1"]["ratio"].median,
            2.0 / 1.9,
            "| tp2dp1 | 1.333 (1.333-1.333) | 1.267 (1.267-1.267) | 166.7 | 0.50 | 1.053",
            id="static layouts",
        ),
        pytest.param(
            lambda: switches.measure("repeating", 8, 4, 4),
            lambda body: body["stall tp1dp2 -> tp2dp1"].median,
            1.03,
            "| stall | tp2dp1 -> tp1dp2 | 10.3 (10.3-10.3) | 10.0 (10.0-10.0) | 1.030",
            id="switches",
        ),
        pytest.param(
            lambda: steps.off("repeating", 8, 5, 3, 4),
            lambda body: body["none / stock"].median,
            0.02 / 0.019,
            "| 0 drafts / none | 20.00 | 20.00 | 1.000 (1.000-1.000) | 1.01 | met |",
            id="a draft length of 0",
        ),
        pytest.param(
            lambda: steps.change("repeating", 8, 2, 3, 4),
            lambda body: body["ratio"].median,
            0.02 / 0.019,
            "| 0 | 1 | 8.0 | 20.0 | 19.0 | 1.053 (1.053-1.053) |",
            id="changes of the draft length",
        ),
        pytest.param(
            lambda: tail.measure("repeating", (2, 8), 16, 2),
            lambda body: body["8 responses"]["ratio"].median,
            8 / 15,
            "Best is tp2dp1 with draft length 7: 0.533 (0.533-0.533) of the time of tp2dp1",
            id="the room of a long tail",
        ),
    ],
)
def test_measurements(
    monkeypatch: pytest.MonkeyPatch,
    measure: Callable[[], tuple[dict[str, Any], str]],
    value: Callable[[dict[str, Any]], float],
    expected: float,
    line: str,
) -> None:
    for module in (alternate, steps, switches, tail):
        monkeypatch.setattr(module, "Engine", Pretended)
    monkeypatch.setattr(engines, "model", str)
    monkeypatch.setattr(engines, "_SETTLE_SECONDS", 0.0)
    body, text = measure()
    assert math.isclose(value(body), expected)
    assert line in text
    assert not Pretended.running
