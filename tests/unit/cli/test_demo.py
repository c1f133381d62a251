"""`pat-vllm demo` without engines: its batch, its engines' options, and what it shows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import pytest

from pat_vllm.cli.demo import disagreement, table_rows, verdict
from pat_vllm.cli.demo_batch import (
    Variant,
    engine_options,
    make_batch,
    response_lengths,
    run_spec,
    schedule,
    variants,
)
from pat_vllm.cli.engine_run import RESULT, Batch, RunFailed, RunResult, RunSpec
from pat_vllm.config import PATConfig
from pat_vllm.layout import Layout
from pat_vllm.models.moe_config import MoEConfig
from pat_vllm.policy_config import SchedulePolicyConfig
from pat_vllm.reporting import DraftCounts, DraftSample, LiveSample, Report, SwitchReport
from tests.support.command_line import invoke
from tests.unit.reporting.samples import ONE, TWO, switch_report

BEGAN = 100.0
CONFIG = dict(num_hidden_layers=2, num_attention_heads=4, hidden_size=64, vocab_size=300)
Timeline = list[tuple[float, Layout, int]]


def a_result(seconds: float, timeline: Timeline, *switches: SwitchReport) -> RunResult:
    """A run as it would be recorded: JSON there and back."""
    samples = tuple(LiveSample(BEGAN + at, layout, live) for at, layout, live in timeline)
    moved = tuple(dataclasses.replace(s, at=BEGAN + s.at) for s in switches)
    report = Report(ONE, (ONE, TWO), moved, (), samples)
    result = RunResult(20.0, BEGAN, seconds, ((5, 6), (7, 8, 9, 10)), report)
    travels = json.dumps(RESULT.dump_python(result, mode="json"))
    return RESULT.validate_python(json.loads(travels))


WARM_UP: Timeline = [(-2.0, ONE, 8), (-1.0, TWO, 3), (-0.5, TWO, 0)]
SWITCHING: Timeline = [(0.0, ONE, 8), (4.0, ONE, 2), (4.5, TWO, 2), (6.0, TWO, 1), (8.1, TWO, 0)]
RESULTS = (
    a_result(12.0, [(-2.0, ONE, 8), (0.0, ONE, 8), (6.0, ONE, 2), (8.0, ONE, 1), (12, ONE, 0)]),
    a_result(10.0, [(-2.0, TWO, 8), (0.0, TWO, 8), (7.0, TWO, 2), (8.0, TWO, 1), (10, TWO, 0)]),
    a_result(
        8.0,
        WARM_UP + SWITCHING,
        switch_report(-1.5),
        switch_report(-0.4, TWO, ONE, "idle"),
        switch_report(4.0, num_seqs=2),
        switch_report(7.99, TWO, ONE, "idle"),
    ),
)


TABLE = schedule(2, switch_at=2)
ROUNDS = (1.0, 0.98, 1.02)
"""Times of a way's rounds, relative to the typical one."""


def slower(result: RunResult, factor: float) -> RunResult:
    """The same run, as if it had taken longer after its last event."""
    return dataclasses.replace(result, seconds=result.seconds * factor)


def runs(
    last: RunResult = RESULTS[2], rounds: Sequence[float] = ROUNDS
) -> list[tuple[Variant, list[RunResult]]]:
    """The three variants and their runs."""
    return [
        (variant, [slower(result, factor) for factor in rounds])
        for variant, result in zip(variants(TABLE), (*RESULTS[:2], last), strict=True)
    ]


def a_batch(longest: int = 9, seed: int = 5) -> Batch:
    return make_batch((4, longest), vocab=300, temperature=1.0, seed=seed)


def test_batches_are_heavy_tailed_and_repeatable() -> None:
    lengths = response_lengths(200, 400, seed=3)
    assert lengths == response_lengths(200, 400, seed=3) != response_lengths(200, 400, seed=4)
    ordered = sorted(lengths)
    assert ordered[0] >= 4 and ordered[-1] == 400
    # Half of the requests are short, and a few run alone for long.
    assert ordered[100] < 400 / 8
    assert 2 <= sum(length > 400 / 3 for length in lengths) <= 30
    batch = a_batch()
    assert batch == a_batch() and batch.prompts != a_batch(seed=6).prompts
    assert all(3 <= token < 300 for prompt in batch.prompts for token in prompt)
    assert batch.tokens == 13
    assert batch.longest == max(len(batch.prompts[0]) + 4, len(batch.prompts[1]) + 9)


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("mixture", [None, MoEConfig(num_experts=24, intermediate=384)])
def test_variants_are_valid(ranks: int, mixture: MoEConfig | None) -> None:
    table = schedule(ranks, 16, mixture)
    config = PATConfig.parse(engine_options(table, mixture))
    assert isinstance(config.policy, SchedulePolicyConfig)
    # The schedule goes from the narrowest layout through all to the widest.
    layouts = config.resolve_layouts(ranks, mixture)
    entered = [Layout.find(name, layouts) for _, name in sorted(config.policy.switch_at.items())]
    assert entered == [
        *sorted(layouts[1:], key=lambda layout: (-layout.tp, layout.experts == "ep"))
    ]
    # The others stay in layouts of the same engine.
    replicas, group, switching = (variant.way for variant in variants(table))
    assert replicas == str(layouts[0]) and group == str(Layout(ranks, 1)) and switching is None
    if mixture is not None:
        assert config.weights == "inplace"


@pytest.mark.parametrize("drafts", [0, 3])
def test_the_engine_has_room_for_the_batch(drafts: int, tmp_path: Path) -> None:
    def spec(batch: Batch) -> RunSpec:
        return run_spec(tmp_path, 2, engine_options(TABLE), batch, batch, drafts, ("a", None), 3)

    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    run = spec(a_batch())
    assert run.ways == ("a", None) and run.rounds == 3
    assert run.engine["max_model_len"] == a_batch().longest
    speculative = run.engine.get("speculative_config", {})
    assert speculative.get("num_speculative_tokens", 0) == drafts
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"max_position_embeddings": 64}))
    with pytest.raises(ValueError, match="--max-tokens 32 or less"):
        spec(a_batch(longest=90))


def test_what_is_shown() -> None:
    """Of the batch, without the warm-up."""
    counts, home = [(0.0, 8), (4.0, 2), (4.5, 2), (6.0, 1)], pytest.approx(7.99)
    assert RESULTS[2].run.live == (*counts, (home, 0), (8.0, 0))
    assert RESULTS[2].run.spans == ((ONE, 0.0, 4.0), (TWO, 4.0, home), (ONE, home, 8.0))
    assert len(RESULTS[2].run.switches) == 1, "the way back is none that a user waits for"
    assert RESULTS[1].run.spans == ((TWO, 0.0, 10.0),)
    assert table_rows(runs()) == [
        ("replicas", "tp1dp2", "12.00", "4%", "1.20", "0", "-"),
        ("one group", "tp2dp1", "10.00", "4%", "1.00", "0", "-"),
        ("live switch", "tp1dp2, tp2dp1 at 2", "8.00", "4%", "0.80", "1", "250"),
    ]
    assert disagreement(runs()) is None
    shorter = dataclasses.replace(RESULTS[2], outputs=((5,), (7, 8, 9, 10)))
    assert "has 2 and 1 tokens" in (disagreement(runs(shorter)) or "")


@pytest.mark.parametrize(
    ("seconds", "rounds", "words"),
    [
        (8.0, ROUNDS, "20.0% less than the best static layout ('one group', 10.00 s): it paid."),
        (11.0, ROUNDS, "10.0% more than the best static layout ('one group', 10.00 s): it did not"),
        (9.7, ROUNDS, "equal within the noise, as the times of one way differ by up to 4.0%"),
        (10.3, ROUNDS, "3.0% more than the best static layout ('one group', 10.00 s): equal"),
        (9.0, (1.0, 1.1, 1.2), "equal within the noise"),
        # The load of the machine rose: from 39 to 68 s of the same batch, say.
        (8.0, (1.0, 1.3, 1.7), "These figures cannot be compared"),
    ],
)
def test_the_verdict(seconds: float, rounds: Sequence[float], words: str) -> None:
    """Of times in turn; a difference that is within that of one way's rounds is none."""
    assert words in verdict(runs(dataclasses.replace(RESULTS[2], seconds=seconds), rounds))


def test_the_verdict_without_a_switch() -> None:
    assert "did not happen" in verdict(runs(RESULTS[1]))


def with_drafts(result: RunResult) -> RunResult:
    """A run that speculated: 7 of 10 draft tokens were accepted in its batch."""
    drafts = (
        DraftSample(BEGAN - 1.0, ONE, 0, 4, 5, DraftCounts(90, 1)),  # in the warm-up
        DraftSample(BEGAN + 1.0, ONE, 0, 4, 3, DraftCounts(8, 6)),
        DraftSample(BEGAN + 2.0, TWO, 0, 4, 3, DraftCounts(2, 1)),
    )
    return dataclasses.replace(result, report=dataclasses.replace(result.report, drafts=drafts))


def demo_command(folder: Path, model: Path | str, *options: str) -> tuple[int, str, Path]:
    """Exit status, what was printed, and the picture."""
    output = folder / "out.png"
    code, text = invoke("demo", "--model", str(model), "--output", str(output), *options)
    return code, text, output


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs that agree, with a picture of draft lengths, and that do not; an engine that ends;
    and what a user got wrong."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    output = tmp_path / "out.png"

    def demo(answers: Iterable[RunResult], model: Path | str, *options: str) -> tuple[int, str]:
        def run(spec: RunSpec, on_result: Callable[[RunResult], object]) -> None:
            for answer in answers:
                on_result(answer)

        monkeypatch.setattr("pat_vllm.cli.engine_run.run", run)
        options = ("--requests", "2", "--switch-at", "2", "--rounds", "2", *options)
        return demo_command(tmp_path, model, *options)[:2]

    code, text = demo([*map(with_drafts, RESULTS)] * 2, tmp_path)
    assert code == 0 and "Outputs of all runs agree" in text, text
    assert "round 2 of 2: replicas 12.00 s, one group 10.00 s, live switch 8.00 s" in text
    assert "n-gram drafts, k = 4: accepted in 'replicas' 70% of 10" in text
    assert output.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")

    monkeypatch.setattr("pat_vllm.reporting.report_plot.plot_runs", lambda *_: None)
    other = dataclasses.replace(RESULTS[2], outputs=((5, 6), (7, 8, 9, 11)))
    code, text = demo([*RESULTS, *RESULTS[:2], other], tmp_path)
    assert code == 1 and "DIFFERENT OUTPUTS" in text and "agree" not in text
    assert "differ in 1 of 2 requests; request 1 differs first at token 3: 10 and 11" in text

    def ends() -> Iterator[RunResult]:
        raise RunFailed("the engine's process ended with exit code 1:\nlast words")
        yield

    code, text = demo(ends(), tmp_path)
    assert code == 1 and "last words" in text
    code, text = demo((), "nowhere")
    assert code == 2 and "is no directory with a checkpoint" in text
    code, text = demo((), "repeating", "--speculate", "--temperature", "1")
    assert code == 2 and "--temperature 1 does not go with" in text
